"""The bytes of SGLang's push message."""

from __future__ import annotations

import pickletools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.api.types import Detail, Modality
from spmd_encoder.transports.base import Parcel, ParcelError, ParcelHeader
from spmd_encoder.transports.sglang_frames import ClassPath, SglangFraming
from tests.harness.sglang_receiver import CURRENT, OLDER, LongTensor, read_head
from tests.harness.sglang_receiver import Modality as TheirModality

FRAMING = SglangFraming(ClassPath(CURRENT, "EmbeddingData"))
HEADER = ParcelHeader(
    part_id="r_local_part_0",
    num_parts=2,
    part_idx=0,
    modality=Modality.IMAGE,
    grids=((1, 4, 6),),
    dtype="bfloat16",
    rows=6,
    dim=2,
)
ROWS = bytes(range(24))
SOUNDS = replace(
    HEADER,
    modality=Modality.AUDIO,
    grids=((1, 1, 2), (1, 1, 3000)),
    details=({"audio_feature_length": 100}, {}),
)
# Written down when SGLang 0.5.23's own receiver read it; a change of a byte must be meant.
GOLDEN = bytes.fromhex(
    "80026373676c616e672e7372742e6469736167677265676174696f6e2e656e636f6465722e72656365697665720a456d62656464696e"
    "67446174610a29817d2858060000007265715f6964580e000000725f6c6f63616c5f706172745f3058090000006e756d5f7061727473"
    "4a020000005808000000706172745f6964784a000000005808000000677269645f64696d5d285d284a010000004a040000004a060000"
    "00656558080000006d6f64616c6974796373676c616e672e7372742e6d616e61676572732e7363686564756c655f62617463680a4d6f"
    "64616c6974790a4a0100000085525809000000656d62656464696e674e580900000073656e645f74696d654e58050000006474797065"
    "63746f7263680a62666c6f617431360a580500000073686170655d284a060000004a020000006558070000005f6d725f7074724e5809"
    "0000006572726f725f6d73674e580a0000006572726f725f636f64654e5810000000766964656f5f74696d657374616d70734e581200"
    "00007365636f6e645f7065725f677269645f74734e75622e"
)
GOLDEN_ERROR = bytes.fromhex(
    "80026373676c616e672e7372742e6469736167677265676174696f6e2e656e636f6465722e72656365697665720a456d62656464696e"
    "67446174610a29817d2858060000007265715f6964580e000000725f6c6f63616c5f706172745f3058090000006e756d5f7061727473"
    "4a020000005808000000706172745f6964784a000000005808000000677269645f64696d4e58080000006d6f64616c6974796373676c"
    "616e672e7372742e6d616e61676572732e7363686564756c655f62617463680a4d6f64616c6974790a4a010000008552580900000065"
    "6d62656464696e674e580900000073656e645f74696d654e580500000064747970654e580500000073686170654e58070000005f6d72"
    "5f7074724e58090000006572726f725f6d736758170000006d6d5f6974656d735b305d3a206e6f2070696374757265580a0000006572"
    "726f725f636f64654a900100005810000000766964656f5f74696d657374616d70734e58120000007365636f6e645f7065725f677269"
    "645f74734e75622e"
)


def test_golden_bytes() -> None:
    head, rows = FRAMING(Parcel(header=HEADER, chunks=(memoryview(ROWS),)))
    assert bytes(head) == GOLDEN
    assert bytes(rows) == ROWS
    (head,) = FRAMING(Parcel(header=HEADER, error=ParcelError(status=400, message="mm_items[0]: no picture")))
    assert bytes(head) == GOLDEN_ERROR


def test_only_the_opcodes_of_plain_data_and_three_names() -> None:
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(GOLDEN)}
    assert opcodes == {
        *("PROTO", "STOP", "GLOBAL", "EMPTY_TUPLE", "NEWOBJ", "TUPLE1", "REDUCE", "BUILD", "EMPTY_DICT", "EMPTY_LIST"),
        *("MARK", "SETITEMS", "APPENDS", "NONE", "BININT", "BINUNICODE"),
    }
    names = [argument for opcode, argument, _ in pickletools.genops(GOLDEN) if opcode.name == "GLOBAL"]
    assert names == [f"{CURRENT} EmbeddingData", "sglang.srt.managers.schedule_batch Modality", "torch bfloat16"]


def test_what_the_receiver_builds() -> None:
    assert vars(read_head(GOLDEN)) == {
        "req_id": "r_local_part_0",
        "num_parts": 2,
        "part_idx": 0,
        "grid_dim": [[1, 4, 6]],
        "modality": TheirModality.IMAGE,
        "embedding": None,
        "send_time": None,
        "dtype": "bfloat16",
        "shape": [6, 2],
        "_mr_ptr": None,
        "error_msg": None,
        "error_code": None,
        "video_timestamps": None,
        "second_per_grid_ts": None,
    }
    failed = read_head(GOLDEN_ERROR)
    assert (failed.error_msg, failed.error_code) == ("mm_items[0]: no picture", 400)
    assert (failed.dtype, failed.shape, failed.grid_dim) == (None, None, None)


def test_golden_bytes_of_sounds() -> None:
    lengths = [f"4a{length.to_bytes(4, 'little').hex()}" for length in (100, 3000)]
    tensor = "63746f7263680a4c6f6e6754656e736f720a" + "5d28" + "".join(lengths) + "65" + "85" + "52"
    head = bytes(FRAMING(Parcel(header=SOUNDS, chunks=(ROWS,)))[0])
    image, audio = "4a01000000" + "8552", "4a03000000" + "8552"
    grids = "5d28" + "5d284a010000004a040000004a0600000065" + "65"
    assert head.hex() == GOLDEN.hex().replace(grids, tensor).replace(image, audio)


def test_the_lengths_of_sounds_are_torchs_tensor() -> None:
    head = FRAMING(Parcel(header=SOUNDS, chunks=(ROWS,)))[0]
    lengths = read_head(bytes(head), {("torch", "LongTensor"): torch.LongTensor}).grid_dim
    assert lengths.dtype == torch.int64
    assert lengths.flatten().tolist() == [100, 3000]


@pytest.mark.parametrize("name", ["second_per_grid_ts", "video_second_per_grid"])
def test_times_of_films(name: str) -> None:
    details: dict[str, Detail] = {"timestamps": [0.5, 1.25], name: 0.5, "num_frames": 4}
    header = replace(HEADER, modality=Modality.VIDEO, grids=((2, 4, 6),), details=(details,))
    head = vars(read_head(bytes(FRAMING(Parcel(header=header, chunks=(ROWS,)))[0])))
    assert (head["video_timestamps"], head["second_per_grid_ts"]) == ([[0.5, 1.25]], [0.5])


def test_rows_of_several_items_are_one_frame_in_order() -> None:
    _, rows = FRAMING(Parcel(header=HEADER, chunks=(ROWS[:8], memoryview(ROWS)[8:20], ROWS[20:])))
    assert bytes(rows) == ROWS


def test_one_items_rows_are_not_copied() -> None:
    chunk = memoryview(ROWS)
    assert FRAMING(Parcel(header=HEADER, chunks=(chunk,)))[1] is chunk


def test_an_older_receivers_class() -> None:
    framing = SglangFraming(ClassPath(OLDER, "EmbeddingData"))
    head = bytes(framing(Parcel(header=HEADER, chunks=(ROWS,)))[0])
    assert OLDER.encode() in head and CURRENT.encode() not in head
    assert read_head(head).req_id == HEADER.part_id


def test_a_dtype_cannot_name_anything_else() -> None:
    header = ParcelHeader(part_id="r", num_parts=1, part_idx=0, modality=Modality.IMAGE, dtype="load\nos\n")
    with pytest.raises(ValueError, match="no dtype"):
        FRAMING(Parcel(header=header, chunks=(ROWS,)))


@given(
    part_id=st.text(),
    message=st.text(min_size=1),
    numbers=st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**31), st.integers(0, 2**40)),
    grids=st.lists(st.tuples(*[st.integers(0, 2**33)] * 3), max_size=5),
    modality=st.sampled_from(Modality),
)
def test_any_plain_values_come_back(
    part_id: str,
    message: str,
    numbers: tuple[int, int, int],
    grids: list[tuple[int, int, int]],
    modality: Modality,
) -> None:
    status, part_idx, rows = numbers
    header = ParcelHeader(
        part_id=part_id,
        num_parts=part_idx + 1,
        part_idx=part_idx,
        modality=modality,
        grids=tuple(grids),
        details=tuple({"audio_feature_length": t, "timestamps": [h / 4]} for t, h, _ in grids),
        dtype="float32",
        rows=rows,
        dim=3,
    )
    good = read_head(bytes(FRAMING(Parcel(header=header, chunks=(b"",)))[0]))
    assert (good.req_id, good.part_idx, good.shape) == (part_id, part_idx, [rows, 3])
    is_sound = modality is Modality.AUDIO
    assert good.grid_dim == (LongTensor([t for t, _, _ in grids]) if is_sound else [list(grid) for grid in grids])
    is_told = modality is Modality.VIDEO and grids
    assert vars(good)["video_timestamps"] == ([[h / 4] for _, h, _ in grids] if is_told else None)
    assert good.modality.name == modality.name
    bad = read_head(bytes(FRAMING(Parcel(header=header, error=ParcelError(status=status, message=message)))[0]))
    assert (bad.error_code, bad.error_msg) == (status, message)


def test_neither_torch_nor_sglang_is_imported() -> None:
    code = (
        "import sys, spmd_encoder.transports.registry;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'sglang', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
