"""Embeddings as files: read as a language server's connector reads them, bounded, atomic, and without leavings."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.daemon_threads import DaemonThreads
from spmd_encoder.transports.files import EmbeddingFiles, is_key
from tests.harness.parcels import embedding, failed_item, item

pytestmark = pytest.mark.timeout(60)

Make = Callable[..., EmbeddingFiles]
ROWS = 1000  # of one float32: 4000 bytes, and a head of some 450


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def new(root: Path = tmp_path, *, max_bytes: int = 2**20, timeout_s: float = 20.0) -> EmbeddingFiles:
        run = DaemonThreads(4).run
        return EmbeddingFiles(root, max_bytes=max_bytes, timeout_s=timeout_s, model="m@", run=run)

    return new


def path(root: Path, key: str) -> Path:
    return root / key / "encoder_cache.safetensors"


def load(root: Path, key: str) -> torch.Tensor:
    """As the connector does."""
    name = os.path.join(root, key, "encoder_cache.safetensors")  # noqa: PTH118
    assert os.path.exists(name)  # noqa: PTH110
    return safetensors.torch.load_file(name, device="cpu")["ec_cache"]


def keys(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir() if path(root, entry.name).exists()}


def leavings(root: Path) -> list[Path]:
    """Whatever is neither a file in its place nor the folder for what is under way."""
    return [p for p in root.rglob("*") if p.is_file() and p.name != "encoder_cache.safetensors"]


async def put(files: EmbeddingFiles, key: str, fill: int = 1, rows: int = ROWS) -> None:
    await files.deliver(item(embedding(rows, 1, fill)), key)


async def fails(files: EmbeddingFiles, key: str, **more: int) -> str:
    with pytest.raises(EncoderError) as caught:
        await put(files, key, **more)
    assert caught.value.code is ErrorCode.DELIVERY_FAILED
    assert key in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_the_connector_reads_the_very_rows(make: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    rows = torch.randn(7, 24).to(dtype)
    name = str(dtype).removeprefix("torch.")
    raw = rows.view(torch.uint8).numpy().tobytes()
    await make().deliver(item(replace(embedding(7, 24, dtype=name), data=raw)), "h.a-s_h")
    got = load(tmp_path, "h.a-s_h")
    assert got.dtype is dtype
    assert torch.equal(got, rows)
    with safe_open(path(tmp_path, "h.a-s_h"), "pt") as file:
        assert list(file.keys()) == ["ec_cache"]
        assert file.metadata()["digest"] == embedding().digest
    # Other users may read it, as the creator's umask says.
    umask = os.umask(0)
    os.umask(umask)
    assert path(tmp_path, "h.a-s_h").stat().st_mode & 0o777 == 0o666 & ~umask


async def test_a_file_says_what_a_language_model_needs_beside_the_rows(make: Make, tmp_path: Path) -> None:
    files = make()
    film = replace(embedding(7, 24), modality=Modality.VIDEO, details={"second_per_grid_ts": 0.5, "timestamps": [0.25]})
    for fps in (2.0, 4.0):
        # A digest does not say how a film was sampled, but the facts differ: the file is another one.
        await files.deliver(item(replace(film, details={**film.details, "sampled_fps": fps})), "film")
        with safe_open(path(tmp_path, "film"), "pt") as file:
            said = json.loads(file.metadata()["item"])
        assert said == {
            "modality": "video",
            "kind": "tokens",
            "shape": [7, 24],
            "dtype": "float32",
            "grid": [1, 2, 2],
            "num_tokens": 7,
            "digest": film.digest,
            "details": {"second_per_grid_ts": 0.5, "timestamps": [0.25], "sampled_fps": fps},
        }


async def test_a_failed_item_is_nothing_to_write(make: Make, tmp_path: Path) -> None:
    await make().deliver(failed_item(), "key")
    assert not keys(tmp_path)


async def test_an_equal_item_is_not_written_again_and_another_one_is(make: Make, tmp_path: Path) -> None:
    files = make()
    await put(files, "key", 1)
    first = path(tmp_path, "key").stat()
    await put(files, "key", 1)
    assert path(tmp_path, "key").stat().st_ino == first.st_ino
    await put(files, "key", 2)
    assert load(tmp_path, "key").view(torch.uint8).unique().tolist() == [2]
    await put(files, "key", 2, rows=3)
    assert load(tmp_path, "key").shape == (3, 1)
    assert files.used_bytes == path(tmp_path, "key").stat().st_size


async def test_a_damaged_file_is_replaced(make: Make, tmp_path: Path) -> None:
    path(tmp_path, "key").parent.mkdir()
    path(tmp_path, "key").write_bytes(b"half")
    await put(make(), "key")
    assert load(tmp_path, "key").shape == (ROWS, 1)


async def test_the_least_recently_delivered_go_first_also_after_a_restart(make: Make, tmp_path: Path) -> None:
    limit = 3 * 4500
    files = make(max_bytes=limit)
    for index, key in enumerate("abc"):
        await put(files, key, index)
        os.utime(path(tmp_path, key), (1000 + index, 1000 + index))
    await put(files, "a", 0)  # delivered again, though not written
    await put(files, "d", 4)
    assert keys(tmp_path) == {"a", "c", "d"}
    assert not (tmp_path / "b").exists()
    again = make(max_bytes=limit)
    await put(again, "e", 5)
    assert keys(tmp_path) == {"a", "d", "e"}, "the order survives"
    assert again.used_bytes == sum(path(tmp_path, key).stat().st_size for key in keys(tmp_path)) <= limit
    smaller = make(max_bytes=4500)
    await put(smaller, "e", 5)
    assert keys(tmp_path) == {"e"}
    assert not leavings(tmp_path)


async def test_a_reader_keeps_what_is_removed(make: Make, tmp_path: Path) -> None:
    files = make(max_bytes=4500)
    await put(files, "a", 1)
    with path(tmp_path, "a").open("rb") as file:
        await put(files, "b", 2)
        assert keys(tmp_path) == {"b"}
        assert safetensors.torch.load(file.read())["ec_cache"].view(torch.uint8).unique().tolist() == [1]


async def test_a_file_that_somebody_else_removed_is_written_again(make: Make, tmp_path: Path) -> None:
    files = make()
    await put(files, "a")
    path(tmp_path, "a").unlink()
    path(tmp_path, "a").parent.rmdir()
    await put(files, "a")
    assert load(tmp_path, "a").shape == (ROWS, 1)


async def test_one_item_above_the_limit_is_refused_and_nothing_is_lost_for_it(make: Make, tmp_path: Path) -> None:
    files = make(max_bytes=4500)
    await put(files, "a")
    assert "--embedding-dir-max-bytes 4500" in await fails(files, "b", rows=2000)
    assert keys(tmp_path) == {"a"}


async def test_many_at_once_within_little_room(make: Make, tmp_path: Path) -> None:
    files = make(max_bytes=3 * 4500)
    await asyncio.gather(*(put(files, f"k{n % 7}", n % 7) for n in range(100)))
    assert 0 < files.used_bytes <= 3 * 4500
    assert files.used_bytes == sum(path(tmp_path, key).stat().st_size for key in keys(tmp_path))
    for key in keys(tmp_path):
        assert load(tmp_path, key).view(torch.uint8).unique().tolist() == [int(key[1])]
    assert not leavings(tmp_path)


WRITER = """
import asyncio, sys
from pathlib import Path
from spmd_encoder.media.daemon_threads import DaemonThreads
from spmd_encoder.transports.files import EmbeddingFiles
from tests.harness.parcels import embedding, item

async def main():
    files = EmbeddingFiles(
        Path(sys.argv[1]), max_bytes=2 * 4500, timeout_s=20.0, model="m@", run=DaemonThreads(4).run
    )
    for n in range(120):
        await files.deliver(item(embedding(1000, 1, n % 5)), f"k{n % 5}")

asyncio.run(main())
"""


def test_two_servers_in_one_folder_and_a_reader(tmp_path: Path) -> None:
    """They write, replace and remove each other's files; whoever reads meanwhile sees whole files or none."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(2)]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        for n in range(5):
            try:
                content = path(tmp_path, f"k{n}").read_bytes()
            except FileNotFoundError:
                continue
            assert safetensors.torch.load(content)["ec_cache"].view(torch.uint8).unique().tolist() == [n]
            reads += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert reads
    assert not leavings(tmp_path)


async def test_what_a_server_that_was_killed_left_behind_is_swept(make: Make, tmp_path: Path) -> None:
    aside = tmp_path / ".spmd_encoder"
    aside.mkdir()
    for name, age_s in (("old.part", 7200), ("new.part", 0)):
        (aside / name).write_bytes(b"x")
        os.utime(aside / name, (time.time() - age_s, time.time() - age_s))
    await put(make(), "a")
    while (aside / "old.part").exists():
        await asyncio.sleep(0.01)
    assert [left.name for left in leavings(tmp_path)] == ["new.part"]


async def test_a_folder_that_cannot_be_written(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory" in await fails(make(tmp_path / "file" / "folder"), "a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_folder_without_permission(make: Make, tmp_path: Path) -> None:
    files = make()
    await put(files, "a")
    for folder in (tmp_path, tmp_path / ".spmd_encoder"):
        folder.chmod(0o500)
    try:
        assert "Permission denied" in await fails(files, "b")
    finally:
        for folder in (tmp_path, tmp_path / ".spmd_encoder"):
            folder.chmod(0o700)
    await put(files, "b")


async def test_a_link_in_the_place_of_a_folder_is_not_followed(make: Make, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / "a").symlink_to(elsewhere)
    assert "symbolic link" in await fails(make(root), "a")
    assert not list(elsewhere.iterdir())
    assert not leavings(root)


FULL = """
import asyncio, sys
from pathlib import Path
from spmd_encoder.errors import EncoderError
from spmd_encoder.media.daemon_threads import DaemonThreads
from spmd_encoder.transports.files import EmbeddingFiles
from tests.harness.parcels import embedding, item

async def main():
    root = Path(sys.argv[1])
    files = EmbeddingFiles(root, max_bytes=2**30, timeout_s=20.0, model="m@", run=DaemonThreads(4).run)
    await files.deliver(item(embedding(1000, 1, 1)), "small")
    try:
        await files.deliver(item(embedding(1000, 2000, 2)), "large")
    except EncoderError as error:
        print(error.code, error.message)
    print(sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()), files.used_bytes)
    await files.deliver(item(embedding(1000, 1, 3)), "after")
    print((root / "after").exists())

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        # A file system of one MiB in a namespace of its own, and where there is none, a limit on the size of files.
        (["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$3" && exec "$0" "$@"'], "No space left"),
        (["prlimit", "--fsize=1048576"], "File too large"),
    ],
    ids=["full disk", "file too large"],
)
def test_a_full_disk_fails_the_item_and_leaves_nothing_half_written(
    limit: list[str], words: str, tmp_path: Path
) -> None:
    probe = "true" if "unshare" not in limit[0] else None
    check = [*limit, probe] if probe else ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    try:
        possible = subprocess.run(check, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip(f"{limit[0]} cannot be used here")
    done = subprocess.run(
        [*limit, sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    failed, left, after = done.stdout.splitlines()[-3:]
    assert failed.startswith("DELIVERY_FAILED") and words in failed and "large" in failed, done.stderr
    assert left.startswith("['small/encoder_cache.safetensors'] 4")
    assert after == "True"


class Stuck:
    """Threads that stand still until they are let go, as on a file system that is gone."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._threads = DaemonThreads(4)

    async def run(self, function: Callable[[], None]) -> None:
        await self._threads.run(lambda: (self.go.wait(20), function())[1])


@pytest.mark.parametrize("how", ["time", "close", "cancel"])
async def test_a_write_that_hangs_is_given_up_and_comes_to_nothing(tmp_path: Path, how: str) -> None:
    stuck = Stuck()
    timeout_s = 0.2 if how == "time" else 20.0
    files = EmbeddingFiles(tmp_path, max_bytes=2**20, timeout_s=timeout_s, model="m@", run=stuck.run)
    task = asyncio.create_task(put(files, "a"))
    while how != "time" and not files._jobs:
        await asyncio.sleep(0)
    if how == "close":
        await files.close()
    if how == "cancel":
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if how == "cancel":
        assert isinstance(outcome, asyncio.CancelledError)
    else:
        assert isinstance(outcome, EncoderError) and outcome.code is ErrorCode.DELIVERY_FAILED
        assert ("--send-timeout-s" if how == "time" else "ending") in outcome.message
    stuck.go.set()
    await stuck.run(lambda: None)
    while any(thread.name == "media-fetch" for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
    assert not keys(tmp_path)
    assert not leavings(tmp_path)


@pytest.mark.parametrize("key", ["", ".", "..", ".a", "a/b", "/a", "a" * 129, "a\0", "ä", "a b", "a\n", "../a", "a\\b"])
def test_what_is_no_key(key: str) -> None:
    assert not is_key(key)


def test_what_is_one() -> None:
    assert all(is_key(key) for key in ("a", "-", "_", "a..b", "0" * 64, "A" * 128, "a."))
