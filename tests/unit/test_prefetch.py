"""Which bytes of a checkpoint's files are asked for ahead of their use."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_encoder.models.prefetch import CHUNK_BYTES, is_cached, prefetch, spans


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {f"t{n}": torch.full((n + 1, 8), float(n)) for n in range(10)}
    save_file(tensors, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_the_ranges_hold_exactly_the_named_tensors(file: Path) -> None:
    data, weights = file.read_bytes(), load_file(file)
    for seed in range(30):
        names = random.Random(seed).sample(sorted(weights), seed % 10 + 1)
        held = b"".join(data[begin:end] for begin, end in spans(file, names))
        pieces = {name: weights[name].numpy().tobytes() for name in names}
        assert len(held) == sum(map(len, pieces.values()))
        assert all(piece in held for piece in pieces.values())


def test_neighbours_are_one_range(file: Path) -> None:
    ((begin, end),) = spans(file, load_file(file).keys())
    assert end == file.stat().st_size
    assert end - begin == sum(weight.nbytes for weight in load_file(file).values())
    assert spans(file, []) == []


@pytest.mark.parametrize("data", [b"", b"\xff" * 500, (5).to_bytes(8, "little") + b"[1,2]", b"\x08" + bytes(7)])
def test_what_is_no_safetensors_file_is_left_to_its_reader(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(data)
    assert spans(path, ["a"]) == []
    assert spans(tmp_path / "missing", ["a"]) == []


def test_a_tensor_that_the_file_does_not_have_leaves_the_file_alone(file: Path) -> None:
    assert spans(file, ["t0", "nowhere"]) == []


def test_the_threads_end_by_themselves(tmp_path: Path) -> None:
    large = {"big": torch.zeros(3 * CHUNK_BYTES // 4 + 5), "small": torch.ones(3)}
    save_file(large, tmp_path / "b.safetensors")
    threads = prefetch({tmp_path / "b.safetensors": list(large), tmp_path / "missing": ["a"]})
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_what_is_cached_is_told_from_what_is_not(tmp_path: Path) -> None:
    size = 3 * 2**20 + 5
    (tmp_path / "a").write_bytes(bytes(size))
    file = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        try:
            os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            pytest.skip(f"this file system does not tell: {error}")
        assert is_cached(file, 0, size)
        assert is_cached(file, size - 1, size)
        assert not is_cached(file, 0, size + 2**21), "no page lies beyond the end"
    finally:
        os.close(file)
    assert not is_cached(file, 0, size), "a file that cannot be asked"
