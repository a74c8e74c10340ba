"""What is not needed for encoding is not imported for it, and is there for whoever needs it after all."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGE = ("scipy", "sklearn", "torch._dynamo", "torch._inductor")


def test_preload_and_building_leave_compiler_and_training_out() -> None:
    said = said_by(f"""
import sys
from importlib.util import find_spec
from spmd_encoder.models import registry
registry.preload("siglip")
import torch
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.utils import is_scipy_available
from spmd_encoder.models.building import build_on_meta
build_on_meta(SiglipVisionModel, SiglipVisionConfig(num_hidden_layers=1), torch.float32)
loaded = [name for name in {LARGE!r} if name in sys.modules]
assert not loaded, loaded
print(bool(find_spec("torch._dynamo")), is_scipy_available())
""")
    assert said.split() == ["True", str(find_spec("scipy") is not None)]


BEFORE = """
import torch
from spmd_encoder.models.lean_imports import deferred_compiler
"""
COMPILE = """
    def twice(x):
        return 2 * x
    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    assert torch._dynamo.config.cache_size_limit
    print(compiled(torch.ones(1)).item())
    torch._dynamo.reset()
"""


def test_compiler_works_within() -> None:
    assert said_by(f"{BEFORE}with deferred_compiler():{COMPILE}") == "2.0"


def test_compiler_works_within_when_a_part_of_it_is_asked_for_first() -> None:
    first = "    import torch._dynamo.backends.registry\n"
    assert said_by(f"{BEFORE}with deferred_compiler():\n{first}{COMPILE}") == "2.0"


def test_compiler_works_afterwards() -> None:
    block = "with deferred_compiler():\n    import transformers.masking_utils\n"
    assert said_by(f"{BEFORE}{block}if True:{COMPILE}") == "2.0"


def test_detectors_losses_find_scipy_where_it_was_imported_first() -> None:
    pytest.importorskip("scipy")
    said = said_by("""
import sys, scipy
from spmd_encoder.models.lean_imports import without_training
with without_training():
    import transformers.loss.loss_for_object_detection as losses
print(losses.linear_sum_assignment.__name__)
""")
    assert said == "linear_sum_assignment"


def test_decorators_do_nothing_before_the_compiler_is_loaded() -> None:
    said = said_by("""
import sys, torch
from spmd_encoder.models.lean_imports import deferred_compiler
with deferred_compiler():
    @torch.compiler.disable(recursive=False)
    def one(): return 1
    @torch._dynamo.allow_in_graph
    def two(): return 2
    print(one(), two(), "torch._dynamo.config" in sys.modules, "torch._dynamo" in sys.modules)
print("torch._dynamo" in sys.modules)
""")
    assert said.split() == ["1", "2", "False", "True", "False"]


def test_decorators_take_the_function_by_its_name() -> None:
    said = said_by(f"""{BEFORE}with deferred_compiler():
    print(torch._dynamo.disable(fn=lambda: 1)(), torch._dynamo.disable(reason="none")(lambda: 2)())
""")
    assert said == "1 2"


def test_compiler_that_could_not_be_loaded_is_loaded_when_it_can_be() -> None:
    """Half of it is never taken for the whole."""
    said = said_by(f"""
import sys
{BEFORE}
class Once:
    has_failed = False
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo.convert_frame" and not self.has_failed:
            self.has_failed = True
            raise ImportError("no memory is left")
sys.meta_path.insert(0, Once())
with deferred_compiler():
    try:
        torch._dynamo.config
    except ImportError as error:
        print(error)
if True:{COMPILE}""")
    assert said.splitlines() == ["no memory is left", "2.0"]


def test_whoever_has_kept_the_deferred_compiler_has_the_only_one() -> None:
    said = said_by(f"""{BEFORE}with deferred_compiler():
    import torch._dynamo as kept
if True:{COMPILE}
print(kept.reset is torch._dynamo.reset, kept.config is torch._dynamo.config)
""")
    assert said.splitlines() == ["2.0", "True True"]


def said_by(code: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
