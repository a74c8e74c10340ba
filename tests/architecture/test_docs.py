"""The documents say what is there: generated parts, links, flags, names of files, the version, the example."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from spmd_encoder import __version__
from spmd_encoder.config import env_name, flag_fields, flag_name, flags_table
from spmd_encoder.errors import ErrorCode
from spmd_encoder.frontends.http.errors import STATUS
from spmd_encoder.models.catalogue import TESTED_WITH
from spmd_encoder.sglang_flags import FLAGS as SGLANG_FLAGS
from tests.harness.readme import (
    MODELS,
    README,
    ROOT,
    SGLANG,
    generated,
    generated_models,
    generated_sglang,
    tree,
)
from tests.harness.world import World, noise_png, off_by, vector

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "launch").glob("*.md"), *(ROOT / "docs").glob("*.md")])
SCRIPTS = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix != ".md" and path.is_file())
OWN_FLAGS = {name for _, _, field in flag_fields() for name in (flag_name(field), *field.metadata["alias"])}
OWN_FLAGS |= {"--check", "--version", "--help"}
FOREIGN_FLAGS = {
    *("--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--max-restarts"),  # torchrun
    "--shutdown-timeout",
    *("--job-name", "--nodes", "--ntasks-per-node", "--signal", "--exclusive", "--cpus-per-task", "--gres"),  # Slurm
    *("--data-binary", "--pid", "--native", "--nproc"),  # curl, py-spy, launch/demo.py
    *(entry.name for entry in SGLANG_FLAGS),
    *(
        "--url",
        "--out",
        "--output",
        "--recursive",
        "--jobs",
        "--items-per-file",
        "--to",
        "--fps",
        "--max-frames",
    ),  # python -m spmd_encoder.client
}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_generated_parts_of_the_readme_are_current() -> None:
    text = README.read_text()
    assert text == generated(text), "run `make readme`"


def test_the_tables_of_sglangs_flags_are_current() -> None:
    text = SGLANG.read_text()
    assert text == generated_sglang(text), "run `make readme`"


def test_the_tables_of_models_are_current() -> None:
    text = MODELS.read_text()
    assert text == generated_models(text), "run `make readme`"


def test_the_tables_of_models_name_the_transformers_that_they_were_tested_with() -> None:
    assert transformers.__version__.startswith(f"{TESTED_WITH}.")
    assert f"transformers {TESTED_WITH} by the tests" in MODELS.read_text()


def test_the_tree_has_a_line_per_file_that_says_something() -> None:
    lines = [line.split(maxsplit=1) for line in tree().splitlines() if line.startswith("  ")]
    assert not [line for line in lines if len(line) < 2]
    files = [path.name for path in (ROOT / "spmd_encoder").rglob("*.py") if path.name != "__init__.py"]
    assert sorted(line[0] for line in lines) == sorted(files)


def test_every_flag_has_its_line_and_its_twin() -> None:
    table = flags_table()
    for _, _, field in flag_fields():
        assert f"`{flag_name(field)}`" in table
        assert f"`{env_name(field)}`" in table


@pytest.mark.parametrize("path", DOCUMENTS + SCRIPTS, ids=ids)
def test_flags_that_are_named_exist(path: Path) -> None:
    text = re.sub(r"--\w+-->", "", path.read_text())  # arrows of the pictures
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))
    assert named <= OWN_FLAGS | FOREIGN_FLAGS


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        document = path.parent / name if name else path
        assert document.exists(), target
        if anchor:
            assert anchor in anchors(document.read_text()), target


def anchors(text: str) -> set[str]:
    """GitHub's names of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_files_that_are_named_exist(path: Path) -> None:
    """A name in backquotes with a folder in it is a file of the repository or of the package."""
    for name in re.findall(r"`((?:[a-z_]+/)+[\w.]+\.(?:py|md|sh|sbatch))`", path.read_text()):
        assert (ROOT / name).exists() or (ROOT / "spmd_encoder" / name).exists(), name


def test_the_readme_names_every_error_and_exit_code() -> None:
    text = README.read_text()
    for code in ErrorCode:
        if code is not ErrorCode.CANCELLED:  # nobody is there to read it
            row = next(line for line in text.splitlines() if line.startswith("|") and f"`{code.value}`" in line)
            assert row.startswith(f"| {STATUS[code]} ")
    for code in range(6):
        assert re.search(rf"^\| {code} \| ", text, re.MULTILINE)


def test_the_changelog_knows_the_version() -> None:
    newest = re.search(r"^## (?!Unreleased)(\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names that the README's Python example defines."""
    source = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert source is not None
    names: dict[str, Any] = {}
    exec(compile(source[1], str(README), "exec"), names)
    return names


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_python_example_decodes(example: dict[str, Any], dtype: str) -> None:
    values = torch.linspace(-2, 2, 6).reshape(2, 3).to(getattr(torch, dtype))
    raw = values.view(torch.uint8).numpy().tobytes()
    item = {"status": "ok", "dtype": dtype, "shape": [2, 3], "embedding": base64.b64encode(raw).decode()}
    got = example["to_numpy"](item)
    assert got.dtype == np.float32
    assert np.array_equal(got, values.float().numpy())


def test_the_python_example_works_on_a_server(example: dict[str, Any], tmp_path: Path) -> None:
    pictures = [noise_png(1, 96, 64), noise_png(2, 64, 128)]
    files = [tmp_path / f"{index}.png" for index in range(len(pictures))]
    for file, data in zip(files, pictures, strict=True):
        file.write_bytes(data)
    flags = ("--model-path", "demo:qwen2.5-vl-tiny", "--dtype", "bfloat16", "--device", "cpu")
    with World(*flags, torchrun=False).start() as world:
        world.wait_ready()
        got = example["encode"](files, world.url)
        entries = world.post(pictures).json()["data"]
    for array, entry in zip(got, entries, strict=True):
        assert entry["dtype"] == "bfloat16"
        assert off_by(array, vector(entry)) <= 0.05  # two batches may round differently
