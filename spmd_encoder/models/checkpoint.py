"""From a `--model-path` to a folder with a checkpoint, and what its files say. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from spmd_encoder.errors import StartupError
from spmd_encoder.models import demo, registry

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_JSON_PATTERNS = ["*.json"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LFS_POINTER = b"version https://git-lfs"
_ENGINE = re.compile(r"(Col|Bi)[A-Z][A-Za-z0-9_]*(?<!ForRetrieval)")
_ADAPTER = "adapter_config.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_checkpoint(model_path: str, revision: str | None, cache: Path) -> Path:
    """The checkpoint's folder: a local one, a demo model's (made in `cache` once per node), or the hub's snapshot.

    Blocks while it downloads. The hub is asked for JSON files and for the safetensors shards that hold the tower
    only; `HF_HUB_OFFLINE` and `HF_HOME` are honoured. Raises StartupError, one sentence that says what to do.
    """
    if model_path.startswith(demo.PREFIX):
        return demo.prepare(model_path, cache)
    folder = Path(model_path).expanduser()
    if not folder.exists() and _HUB_ID.fullmatch(model_path):
        folder = _from_hub(model_path, revision)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Raises StartupError unless `folder` has a readable config of a supported type and safetensors weights."""
    if not folder.is_dir():
        raise StartupError(
            f"--model-path {folder}: there is no such folder; give a checkpoint folder, a hub id like org/name, "
            f"or one of {', '.join(demo.names())}"
        )
    registry.find(read_model_type(folder))
    _refuse_engine(folder)
    if (folder / INDEX).exists() or (folder / SINGLE).exists():
        return
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled:
        raise StartupError(
            f"{folder} holds its weights only as {pickled[0]}, a pickle, and reading a pickle can run any code: "
            "convert the checkpoint to safetensors (save_pretrained of transformers does)"
        )
    raise StartupError(f"{folder} has neither {SINGLE} nor {INDEX}; download the checkpoint's safetensors files")


def _refuse_engine(folder: Path) -> None:
    """Raises StartupError for a retriever in colpali-engine's own format, whose `model_type` is that of the model that
    it is made of: as this it would be served without its projection, or for rows where it has one vector."""
    named = read_config(folder).get("architectures")
    found = [("config.json", name) for name in (named if isinstance(named, list) else ())]
    for file, name in [*found, (_ADAPTER, _adapted_class(folder))]:
        if isinstance(name, str) and _ENGINE.fullmatch(name):
            raise StartupError(
                f"{folder}: {file} names the architecture {name} of colpali-engine, which transformers does not "
                "load: take the checkpoint whose name ends in -hf (ColPali, ColQwen2), or convert it"
            )


def _adapted_class(folder: Path) -> object:
    """The class that an adapter beside the weights was trained for, where PEFT's file tells it."""
    try:
        said = read_json(folder / _ADAPTER)
    except (OSError, ValueError):
        return None
    mapping = said.get("auto_mapping") if isinstance(said, dict) else None
    return mapping.get("base_model_class") if isinstance(mapping, dict) else None


def read_json(file: Path) -> Any:
    """What a JSON file of a checkpoint says. Raises OSError, and ValueError for no JSON or for too deep a nesting."""
    try:
        return json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError("it is nested more deeply than any such file") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json`. Raises StartupError where it is missing or is no JSON object."""
    try:
        config = read_json(folder / "config.json")
    except FileNotFoundError:
        raise StartupError(f"{folder} has no config.json; --model-path must name a transformers checkpoint") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{folder / 'config.json'} cannot be read ({error}); download the file again") from None
    if not isinstance(config, dict):
        raise StartupError(f"{folder / 'config.json'} is not a JSON object; download the file again")
    return config


def read_model_type(folder: Path) -> str:
    """The checkpoint's `model_type`. Raises StartupError where there is none."""
    model_type = read_config(folder).get("model_type")
    if not isinstance(model_type, str):
        raise StartupError(
            f"{folder / 'config.json'} names no model_type; supported are: "
            f"{', '.join(registry.supported_model_types())}"
        )
    return model_type


def shard_keys(folder: Path) -> dict[str, tuple[str, ...]]:
    """The weights' names by shard file: as the single file itself says, which goes before an index as it does for
    transformers, or as the index says.

    Shards need not exist: whoever reads one finds out. Raises StartupError for an unreadable index or file.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.exists():
        return {SINGLE: _keys_of(folder / SINGLE)}
    try:
        weight_map = read_json(index)["weight_map"]
        shards: dict[str, list[str]] = {}
        for key, shard in weight_map.items():
            # A shard is a file of this folder; a name with a path in it would lead out of it.
            if Path(shard).name != shard:
                raise ValueError(f"odd shard name {shard!r}")
            shards.setdefault(shard, []).append(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} is not a usable index ({error}); download the file again") from None
    return {shard: tuple(keys) for shard, keys in shards.items()}


def left_aside(folder: Path) -> str:
    """The weights' index that is not used, in a folder that has the single file too; "" where there is none."""
    return INDEX if (folder / SINGLE).is_file() and (folder / INDEX).exists() else ""


def _keys_of(path: Path) -> tuple[str, ...]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return tuple(file.keys())
    except MemoryError:
        raise no_room(path) from None
    except (OSError, SafetensorError) as error:
        raise broken(path, error) from None


def no_room(path: Path) -> StartupError:
    """What is said of a weights file that the kernel does not map."""
    return StartupError(f"the weights file {path} cannot be mapped into memory; save the checkpoint in smaller shards")


def broken(path: Path, error: Exception) -> StartupError:
    """What is said of a weights file that cannot be read."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        is_pointer = False
    if is_pointer:
        return StartupError(
            f"the weights file {path} is only a pointer of Git LFS; fetch the file itself (git lfs pull)"
        )
    return StartupError(f"the weights file {path} is broken ({error}); download it again")


def _from_hub(model_id: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns))

    try:
        folder = download(_JSON_PATTERNS)
        entry = registry.find(read_model_type(folder))
        return download(_JSON_PATTERNS + _tower_shards(folder, entry.tower_keys))
    except GatedRepoError:
        why = "its owner grants access on request; ask for it on the hub and log in with `hf auth login`"
    except RepositoryNotFoundError:
        why = "the hub has no such model (or it is private and you are not logged in)"
    except RevisionNotFoundError:
        why = f"it has no revision {revision}"
    except LocalEntryNotFoundError:
        # Checked here and not before: offline with a full cache is an ordinary way to start.
        what = f"its revision {revision}" if revision else "it"
        why = (
            f"{what} is not in the local cache and HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"{what} is not in the local cache and the hub cannot be reached"
        )
    except (HfHubHTTPError, OSError) as error:
        why = f"the download failed ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    raise StartupError(
        f"--model-path {model_id}: there is no such folder, and as a hub model {why}; "
        "or give a checkpoint folder that exists"
    )


def _tower_shards(folder: Path, prefixes: tuple[str, ...]) -> list[str]:
    """Patterns of the shards that hold a key with one of `prefixes`; all shards where that cannot be told."""
    if not prefixes or not (folder / INDEX).exists() or (folder / SINGLE).exists():
        return ["*.safetensors"]
    found = [s for s, keys in shard_keys(folder).items() if any(k.startswith(prefixes) for k in keys)]
    return [*found, SINGLE] if found else ["*.safetensors"]  # a single file beside the index is what is loaded
