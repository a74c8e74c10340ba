"""Checkpoints: what is refused and how, and which bytes of a good one ever reach memory."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spmd_encoder.errors import StartupError
from spmd_encoder.models import checkpoint, registry
from spmd_encoder.models.base import LoadContext
from spmd_encoder.models.checkpoint import resolve_checkpoint
from spmd_encoder.models.dinov2 import Dinov2Adapter
from spmd_encoder.models.loading import adapter_class, load_adapter, resolve_dtype
from spmd_encoder.models.qwen2_5_vl import Qwen25VLAdapter


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    Qwen25VLAdapter.tiny_checkpoint(folder, seed=0)
    return folder


@pytest.fixture
def sharded(qwen: Path, tmp_path: Path) -> Path:
    """The same checkpoint in three shards: two with parts of the tower, one with the language model."""
    weights = load_file(qwen / "model.safetensors")
    tower = sorted(key for key in weights if "visual" in key)
    parts = {"a": tower[::2], "b": tower[1::2], "c": [key for key in weights if "visual" not in key]}
    assert parts["c"]
    for name, keys in parts.items():
        save_file({key: weights[key] for key in keys}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {key: f"{name}.safetensors" for name, keys in parts.items() for key in keys}}
    (tmp_path / checkpoint.INDEX).write_text(json.dumps(index))
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(qwen / name, tmp_path)
    return tmp_path


def mapped_files() -> list[tuple[int, int, str]]:
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in fields[0].split("-"))
        spans.append((low, high, fields[5] if len(fields) > 5 else ""))
    return spans


def file_behind(tensor: torch.Tensor) -> str:
    address = tensor.data_ptr()
    return next(path for low, high, path in mapped_files() if low <= address < high)


def model_of(adapter: Any) -> torch.nn.Module:
    model = adapter._model
    assert isinstance(model, torch.nn.Module)
    return model


def test_the_language_model_gets_no_memory(sharded: Path, context: LoadContext) -> None:
    (sharded / "c.safetensors").unlink()  # not even its file is needed
    model = model_of(load_adapter(sharded, context))
    parts = {name: p for name, p in model.named_parameters() if not name.startswith("model.visual.")}
    assert "lm_head.weight" in parts and not [name for name in parts if ".layers." in name]  # none is even built
    assert all(p.is_meta for p in parts.values())


def test_weights_stay_in_the_mapped_files(sharded: Path, context: LoadContext) -> None:
    model = model_of(load_adapter(sharded, context))
    tower = {name: p for name, p in model.named_parameters() if name.startswith("model.visual.")}
    assert {Path(file_behind(p)).suffix for p in tower.values()} == {".safetensors"}
    assert not any(p.requires_grad for p in tower.values())
    assert not model.training


def test_a_cast_copies_only_what_must_be(qwen: Path, context: LoadContext) -> None:
    half = LoadContext(dtype=torch.bfloat16, device=context.device, group=context.group)
    model = model_of(load_adapter(qwen, half))
    tower = [p for name, p in model.named_parameters() if name.startswith("model.visual.")]
    assert {p.dtype for p in tower} == {torch.bfloat16}
    # The rotary table is no parameter: transformers keeps it in float32 whatever the dtype.
    assert {b.dtype for n, b in model.named_buffers() if n.startswith("model.visual.")} == {torch.float32}


def test_a_rank_alone_takes_a_model_that_the_plan_does_not_fit(
    qwen: Path, context: LoadContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of = Qwen25VLAdapter.plan
    monkeypatch.setattr(Qwen25VLAdapter, "plan", lambda vision: dataclasses.replace(plan_of(vision), num_blocks=5))
    assert load_adapter(qwen, context).tower_bytes > 0


def test_a_missing_shard_is_named(sharded: Path, context: LoadContext) -> None:
    (sharded / "b.safetensors").unlink()
    with pytest.raises(StartupError, match=r"lacks the weights file b\.safetensors"):
        load_adapter(sharded, context)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_corrupt_shard_is_named(sharded: Path, context: LoadContext, damage: str) -> None:
    shard = sharded / "a.safetensors"
    good = shard.read_bytes()
    shard.write_bytes({"truncated": good[:-100], "garbage": b"\xff" * 500, "empty": b""}[damage])
    with pytest.raises(StartupError, match=r"a\.safetensors is broken"):
        load_adapter(sharded, context)


def test_a_shard_that_lacks_what_the_index_names_is_named(sharded: Path, context: LoadContext) -> None:
    weights = load_file(sharded / "a.safetensors")
    lost = sorted(weights)[0]
    save_file({key: value for key, value in weights.items() if key != lost}, sharded / "a.safetensors")
    with pytest.raises(StartupError, match=rf"a\.safetensors is broken .*{lost}"):
        load_adapter(sharded, context)


def test_a_pointer_of_git_lfs_is_told_from_a_broken_file(sharded: Path, qwen: Path, context: LoadContext) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456789\n"
    (sharded / "a.safetensors").write_bytes(pointer)
    with pytest.raises(StartupError, match=r"a\.safetensors is only a pointer of Git LFS.*git lfs pull"):
        load_adapter(sharded, context)


def test_a_corrupt_single_file_is_named(qwen: Path, tmp_path: Path, context: LoadContext) -> None:
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    (tmp_path / checkpoint.SINGLE).write_bytes(b"no safetensors")
    with pytest.raises(StartupError, match=r"model\.safetensors is broken"):
        load_adapter(tmp_path, context)


def test_missing_and_misshapen_weights_are_named(qwen: Path, tmp_path: Path, context: LoadContext) -> None:
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    weights = load_file(qwen / checkpoint.SINGLE)
    (key,) = (k for k in weights if k.endswith("visual.blocks.1.norm1.weight"))
    save_file(weights | {key: torch.zeros(7)}, tmp_path / checkpoint.SINGLE)
    with pytest.raises(StartupError, match=r"blocks\.1\.norm1\.weight has shape \(7,\)"):
        load_adapter(tmp_path, context)
    del weights[key]
    save_file(weights, tmp_path / checkpoint.SINGLE)
    with pytest.raises(StartupError, match=r"lacks 1 weights of the encoder, first .*blocks\.1\.norm1\.weight"):
        load_adapter(tmp_path, context)


def test_weights_that_are_no_numbers_are_called_broken(qwen: Path, tmp_path: Path, context: LoadContext) -> None:
    shutil.copytree(qwen, tmp_path / "broken")
    (file,) = (tmp_path / "broken").glob("*.safetensors")
    weights = load_file(file)
    for name in weights:
        if "visual.blocks.0." in name:
            weights[name] = torch.full_like(weights[name], torch.nan)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(StartupError, match="its weights are broken"):
        load_adapter(tmp_path / "broken", context)


def test_quantised_towers_are_refused(qwen: Path, tmp_path: Path, context: LoadContext) -> None:
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    weights = load_file(qwen / checkpoint.SINGLE)
    save_file({k: v.to(torch.int8) for k, v in weights.items()}, tmp_path / checkpoint.SINGLE)
    with pytest.raises(StartupError, match="quantised"):
        load_adapter(tmp_path, context)


def test_old_dinov2_names_and_mixed_dtypes_load_too(tmp_path: Path, context: LoadContext) -> None:
    Dinov2Adapter.tiny_checkpoint(tmp_path, seed=1)
    before = dict(model_of(load_adapter(tmp_path, context)).state_dict())
    weights = load_file(tmp_path / checkpoint.SINGLE)
    old = {f"dinov2.{k.replace('.attention.q_proj.', '.attention.attention.query.')}": v for k, v in weights.items()}
    old = {k: v.double() if k.endswith("norm1.weight") else v for k, v in old.items()}
    # A classifier on top is not ours to load.
    save_file(old | {"classifier.weight": torch.zeros(10, 96)}, tmp_path / checkpoint.SINGLE)
    after = model_of(load_adapter(tmp_path, context)).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_an_index_cannot_lead_out_of_the_folder(sharded: Path, context: LoadContext) -> None:
    index = sharded / checkpoint.INDEX
    index.write_text(index.read_text().replace("a.safetensors", "../a.safetensors"))
    with pytest.raises(StartupError, match="not a usable index"):
        load_adapter(sharded, context)


def test_the_hub_is_asked_for_the_towers_shards_only(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repo, revision) == ("some/model", "main")
        asked.append(allow_patterns)
        return str(sharded)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("some/model", "main", sharded) == sharded
    assert asked == [["*.json"], ["*.json", "a.safetensors", "b.safetensors", checkpoint.SINGLE]]
    shutil.copy(sharded / "c.safetensors", sharded / checkpoint.SINGLE)
    resolve_checkpoint("some/model", "main", sharded)
    assert asked[-1] == ["*.json", "*.safetensors"], "the single file is what is loaded, whatever an index says"


def test_offline_each_revision_is_its_own_snapshot(sharded: Path, tmp_path: Path) -> None:
    """A cache as the hub's library lays it out: one revision by its name, one by its commit."""
    model = tmp_path / "home" / "hub" / "models--some--model"
    commits = {"main": "a" * 40, "v1": "b" * 40}
    for name, commit in commits.items():
        shutil.copytree(sharded, model / "snapshots" / commit, ignore=shutil.ignore_patterns("home"))
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / name).write_text(commit)
    code = (
        "import sys; from pathlib import Path\n"
        "from spmd_encoder.errors import StartupError\n"
        "from spmd_encoder.models.checkpoint import resolve_checkpoint\n"
        "for revision in (None, 'v1', 'b' * 40, 'v2'):\n"
        "    try: print(resolve_checkpoint('some/model', revision, Path('.')).name)\n"
        "    except StartupError as error: print(error.message)\n"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    *found, missing = done.stdout.splitlines()
    assert found == [commits["main"], commits["v1"], commits["v1"]]
    assert "its revision v2 is not in the local cache and HF_HUB_OFFLINE is set" in missing


def test_offline_without_the_model_is_one_sentence(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from spmd_encoder.errors import StartupError\n"
        "from spmd_encoder.models.checkpoint import resolve_checkpoint\n"
        "try: resolve_checkpoint('some/model', None, Path('.'))\n"
        "except StartupError as error: print(error.message)\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "HF_HUB_OFFLINE is set" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_auto_dtype_is_the_configs(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for text, dtype in (
        ('{"torch_dtype": "bfloat16"}', torch.bfloat16),
        ('{"dtype": "float16", "model_type": "clip"}', torch.float16),
        ('{"dtype": "float16", "model_type": "qwen2_5_vl"}', torch.bfloat16),
        ('{"vision_config": {"dtype": "bfloat16"}}', torch.bfloat16),
        ("{}", torch.float32),
    ):
        config.write_text(text)
        assert resolve_dtype("auto", tmp_path) is dtype
    assert resolve_dtype("float32", tmp_path) is torch.float32
    config.write_text('{"dtype": "float8_e4m3fn"}')
    with pytest.raises(StartupError, match="float8_e4m3fn is not served"):
        resolve_dtype("auto", tmp_path)


def test_float16_is_refused_where_towers_overflow_in_it(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"dtype": "bfloat16", "model_type": "siglip"}')
    with pytest.raises(StartupError, match=r"family siglip are known to overflow.*give --dtype bfloat16 or float32"):
        resolve_dtype("float16", tmp_path)
    config.write_text('{"dtype": "bfloat16", "model_type": "dinov2"}')
    assert resolve_dtype("float16", tmp_path) is torch.float16


def test_shards_are_listed_without_an_index(qwen: Path) -> None:
    with safe_open(qwen / checkpoint.SINGLE, framework="pt") as file:
        assert set(checkpoint.shard_keys(qwen)[checkpoint.SINGLE]) == set(file.keys())


@pytest.mark.parametrize(
    "names", [{"vlm.language_model.": "vlm.model."}, {"vlm.": "", "embedding_proj_layer": "custom_text_proj"}]
)
def test_names_of_another_age_are_told_with_what_to_do(
    names: dict[str, str], tmp_path: Path, context: LoadContext
) -> None:
    """As the first conversions of ColQwen2 have them, and colpali-engine's own checkpoints."""
    adapter_class(registry.find("colqwen2")).tiny_checkpoint(tmp_path, seed=3)
    found = load_file(tmp_path / checkpoint.SINGLE)
    for old, new in names.items():
        found = {f"{new}{name.removeprefix(old)}" if name.startswith(old) else name: w for name, w in found.items()}
    save_file(found, tmp_path / checkpoint.SINGLE)
    with pytest.raises(StartupError, match=r"lacks \d+ weights of the encoder, first .*take a newer conversion"):
        load_adapter(tmp_path, context)


@pytest.mark.parametrize("has_index", [False, True])
def test_a_file_for_which_there_is_no_room_is_told_at_once(
    has_index: bool, qwen: Path, tmp_path: Path, context: LoadContext
) -> None:
    folder = shutil.copytree(qwen, tmp_path / "large")
    file = folder / checkpoint.SINGLE
    body = file.read_bytes()
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    size, hole = len(body) - 8 - length, 2**36
    header["lm_head.hole"] = {"dtype": "U8", "shape": [hole], "data_offsets": [size, size + hole]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body[8 + length :])
    os.truncate(file, 8 + len(text) + size + hole)
    if has_index:
        shard = file.rename(folder / "model-00001-of-00001.safetensors").name
        index = {"weight_map": {name: shard for name in header if name != "__metadata__"}}
        (folder / checkpoint.INDEX).write_text(json.dumps(index))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hole, limits[1]))
    try:
        with pytest.raises(StartupError, match=r"cannot be mapped into memory; save the checkpoint in smaller shards"):
            load_adapter(folder, context)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
