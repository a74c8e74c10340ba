"""Embeddings in JSON: base64 and numbers, every dtype, nothing that is not finite."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from spmd_encoder.api.types import Embedding, ItemFailure, Modality, OutputKind
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.frontends.http.render import Rendered, as_floats, is_heavy, render_json


def embedding(data: bytes | memoryview, shape: tuple[int, ...], dtype: str = "float32") -> Embedding:
    return Embedding(
        modality=Modality.IMAGE,
        kind=OutputKind.TOKENS,
        shape=shape,
        dtype=dtype,
        num_tokens=1,
        digest="sha256:0",
        data=data,
    )


def body_of(rendered: Rendered) -> bytes:
    return b"".join(rendered.body)


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("float32", "<f4"), ("float16", "<f2"), ("bfloat16", None)])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 2, 3)])
def test_numbers_are_exact(dtype: str, numpy_dtype: str | None, shape: tuple[int, ...]) -> None:
    values = np.array([1.5, -2.0, 0.0, 3.25, 65280.0, -0.0078125], np.float32).reshape(shape)
    wide = values.view(np.uint32) >> 16
    data = values.astype(numpy_dtype).tobytes() if numpy_dtype else wide.astype("<u2").tobytes()
    item = embedding(memoryview(data), shape, dtype)
    assert json.loads(body_of(render_json("r", "m", [item], "float")))["data"][0]["embedding"] == values.tolist()
    text = json.loads(body_of(render_json("r", "m", [item], "base64")))["data"][0]["embedding"]
    assert base64.b64decode(text, validate=True) == data


def test_large_ones_are_joined_from_pieces() -> None:
    numbers = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    large = embedding(numbers.tobytes(), numbers.shape)
    assert is_heavy([large], "base64") and is_heavy([large], "float")
    assert not is_heavy([embedding(bytes(8000), (2000,))], "base64")
    reply = json.loads(body_of(render_json("r", "m", [large], "base64")))
    assert base64.b64decode(reply["data"][0]["embedding"], validate=True) == numbers.tobytes()
    reply = json.loads(body_of(render_json("r", "m", [large], "float")))
    assert reply["data"][0]["embedding"][1023][1023] == float(2**20 - 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_the_items_failure(bad: float) -> None:
    good = embedding(np.array([1, 2], np.float32).tobytes(), (2,))
    broken = embedding(np.array([bad, 2], np.float32).tobytes(), (2,))
    rendered = render_json("r", "m", [good, broken], "float")
    error = json.loads(body_of(rendered))["data"][1]["error"]
    assert (rendered.status, error["code"], error["param"]) == (200, "NON_FINITE", "items[1]")
    other = ItemFailure(error=EncoderError(ErrorCode.TOO_LARGE, "x"))
    assert render_json("r", "m", [broken, other], "float").status == 500


def test_only_floats_are_numbers() -> None:
    assert as_floats(np.array([1.5], "<f8").tobytes(), "float64").tolist() == [1.5]
    with pytest.raises(EncoderError):
        as_floats(b"", "int8")
