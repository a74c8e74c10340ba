"""Our own push message: the document's bytes, both sides against each other, and frames that mean harm."""

from __future__ import annotations

import pickle
import re
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_encoder.api.types import Detail, Embedding, ItemFailure, Modality, OutputKind
from spmd_encoder.client.item_frames import MAX_HEADER_BYTES, BadFrameError, read_frames
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.transports.base import ItemParcel, PartLabel
from spmd_encoder.transports.item_frames import item_frames
from tests.harness.readme import ROOT

WIRE = (ROOT / "docs" / "wire.md").read_text()
ROWS = Embedding(
    modality=Modality.IMAGE,
    kind=OutputKind.TOKENS,
    shape=(2, 2),
    dtype="float32",
    num_tokens=2,
    digest="sha256:" + "ab" * 32,
    data=np.array([[1, 2], [3, 4]], "<f4").tobytes(),
    grid=(1, 2, 4),
)
FAILURE = ItemFailure(error=EncoderError(ErrorCode.MEDIA_CORRUPT, "cannot be decoded"))
GOOD = ItemParcel(request_id="enc-1", index=0, num_items=2, outcome=ROWS, part=PartLabel("request-42"))
BAD = ItemParcel(request_id="enc-1", index=1, num_items=2, outcome=FAILURE)
HEADER, BYTES = map(bytes, item_frames(GOOD))


def golden(name: str) -> bytes:
    """A block of docs/wire.md: hex, with what it means after `#`."""
    (block,) = re.findall(rf"<!-- golden: {name} -->\n```\n(.*?)```", WIRE, re.DOTALL)
    return bytes.fromhex(re.sub(r"#.*", "", block))


def test_the_document_has_the_very_bytes() -> None:
    assert golden("header") == HEADER
    assert golden("rows") == BYTES
    assert [bytes(frame) for frame in item_frames(BAD)] == [golden("error")]


def test_the_document_is_read() -> None:
    header, array = read_frames([golden("header"), golden("rows")], "numpy")
    assert (header.request_id, header.index, header.num_items, header.grid) == ("enc-1", 0, 2, (1, 2, 4))
    assert header.part is not None and (header.part.id, header.part.index, header.part.count) == ("request-42", 0, 1)
    assert array.tolist() == [[1, 2], [3, 4]]
    header, array = read_frames([golden("error")], "numpy")
    assert array is None
    assert header.error is not None and header.error.code == "MEDIA_CORRUPT"


def test_the_rows_are_not_copied_on_their_way_out() -> None:
    assert item_frames(GOOD)[1] is ROWS.data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 5).to(dtype)
    raw = rows.view(torch.uint8).numpy().tobytes()
    outcome = Embedding(
        modality=Modality.IMAGE,
        kind=OutputKind.TOKENS,
        shape=(3, 5),
        dtype=str(dtype).removeprefix("torch."),
        num_tokens=3,
        digest="sha256:0",
        data=raw,
    )
    frames = item_frames(ItemParcel(request_id="r", index=0, num_items=1, outcome=outcome))
    assert torch.equal(read_frames(frames, "torch").array, rows)
    array = read_frames(frames, "numpy").array
    assert np.array_equal(array, rows.float().numpy() if dtype is torch.bfloat16 else rows.numpy())
    assert array.flags.writeable


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=128)
COUNTS = st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(
    request_id=TEXT,
    part=st.none() | st.builds(lambda name, index: PartLabel(name, index, index + 1), TEXT, st.integers(0, 2**31 - 2)),
    index=st.integers(0, 300),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    grid=st.none() | st.tuples(COUNTS, COUNTS, COUNTS),
    tokens=COUNTS,
    details=st.dictionaries(
        st.text(max_size=20), st.integers(0, 2**40) | st.floats(allow_nan=False) | st.lists(st.floats(0, 9)), max_size=3
    ),
    error=st.none() | st.tuples(st.sampled_from(ErrorCode), st.text(max_size=3000)),
)
def test_both_sides_agree(
    request_id: str,
    part: PartLabel | None,
    index: int,
    shape: tuple[int, ...],
    grid: tuple[int, int, int] | None,
    tokens: int,
    details: dict[str, Detail],
    error: tuple[ErrorCode, str] | None,
) -> None:
    values = np.arange(int(np.prod(shape)), dtype="<f2").reshape(shape)
    outcome: Any = Embedding(
        modality=Modality.IMAGE,
        kind=OutputKind.POOLED,
        shape=shape,
        dtype="float16",
        num_tokens=tokens,
        digest="sha256:1",
        data=values.tobytes(),
        grid=grid,
        details=details,
    )
    if error is not None:
        outcome = ItemFailure(error=EncoderError(*error))
    sent = ItemParcel(request_id=request_id, index=index, num_items=index + 1, outcome=outcome, part=part)
    header, array = read_frames(item_frames(sent), "numpy")
    assert (header.request_id, header.index, header.num_items) == (request_id, index, index + 1)
    assert (header.part and (header.part.id, header.part.index)) == (part and (part.id, part.index))
    if error is not None:
        assert header.error is not None and header.error.code == error[0]
        assert header.error.message == error[1][:1000]
        assert array is None
    else:
        assert (header.shape, header.grid, header.num_tokens, header.details) == (shape, grid, tokens, details)
        assert np.array_equal(array, values)


def changed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(HEADER), **fields})


def without(name: str) -> bytes:
    fields = msgspec.msgpack.decode(HEADER)
    del fields[name]
    return msgspec.msgpack.encode(fields)


def test_an_older_server_sends_no_details() -> None:
    assert read_frames([without("details"), BYTES], "numpy").header.details == {}


HOSTILE: dict[str, list[bytes]] = {
    "no frame": [],
    "no rows": [HEADER],
    "three frames": [HEADER, BYTES, b""],
    "rows cut off": [HEADER, BYTES[:-1]],
    "rows too many": [HEADER, BYTES + b"\0"],
    "no header": [b"", BYTES],
    "a pickle": [pickle.dumps({"version": 1}), BYTES],
    "json": [b'{"version": 1}', BYTES],
    "another version": [changed(version=2), BYTES],
    "an unknown dtype": [changed(dtype="int64"), BYTES],
    "an object dtype": [changed(dtype="O"), BYTES],
    "a negative size": [changed(shape=[-2, -2]), BYTES],
    "a size that overflows": [changed(shape=[2**63, 2**63]), BYTES],
    "too many dimensions": [changed(shape=[1] * 9), BYTES],
    "a shape of text": [changed(shape="22"), BYTES],
    "an index too high": [changed(index=2), BYTES],
    "a long id": [changed(request_id="x" * 129), BYTES],
    "a grid of two": [changed(grid=[1, 2]), BYTES],
    "an error with rows": [changed(error={"code": "INTERNAL", "message": "x"}), BYTES],
    "a long error": [changed(error={"code": "INTERNAL", "message": "x" * 5000})],
    "a header too large": [changed(more="x" * MAX_HEADER_BYTES), BYTES],
    "a list": [msgspec.msgpack.encode([1, 2]), BYTES],
    "nested without end": [b"\x91" * 10_000, BYTES],
    "a map of four milliards": [b"\xdf\xff\xff\xff\xff", BYTES],
    "a string of four gigabytes": [b"\xdb\xff\xff\xff\xff", BYTES],
    "no UTF-8": [HEADER.replace(b"enc-1", b"\xff\xff\xff\xff\xff"), BYTES],
    "something behind it": [HEADER + b"\0", BYTES],
    **{f"without {name}": [without(name), BYTES] for name in msgspec.msgpack.decode(HEADER) if name != "details"},
}


@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_none_of_ours_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadFrameError) as caught:
        read_frames(frames, "numpy")
    assert "x" * 20 not in str(caught.value), "quotes nothing"


def test_keys_of_later_days_are_ignored() -> None:
    assert read_frames([changed(colour="red"), BYTES], "numpy").array.shape == (2, 2)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_no_bytes_do_harm(frames: list[bytes]) -> None:
    try:
        read_frames(frames, "numpy")
    except BadFrameError:
        return


@given(st.integers(0, len(HEADER) - 1), st.integers(0, 255), st.booleans())
def test_no_changed_byte_does_harm(place: int, value: int, with_rows: bool) -> None:
    header = bytearray(HEADER)
    header[place] = value
    try:
        _, array = read_frames([bytes(header), BYTES] if with_rows else [bytes(header)], "numpy")
    except BadFrameError:
        return
    assert array is None or array.nbytes == len(BYTES)
