"""What every modality in `media.registry` keeps. A new one adds a sample here."""

import io
import random
import subprocess
import sys

import pytest
from PIL import Image

from spmd_encoder.api.types import Modality
from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.registry import KINDS, media_kind


def _picture() -> bytes:
    out = io.BytesIO()
    Image.frombytes("RGB", (40, 30), random.Random(3).randbytes(3600)).save(out, "PNG")
    return out.getvalue()


SAMPLES = {Modality.IMAGE: _picture}


@pytest.fixture(params=sorted(KINDS))
def modality(request: pytest.FixtureRequest) -> Modality:
    return Modality(request.param)


def test_probe_agrees_with_decode(modality: Modality) -> None:
    kind, data = media_kind(modality), SAMPLES[modality]()
    header = kind.probe(data)
    decoded = kind.decode(data)
    assert decoded.size == (header.width, header.height)
    assert decoded.mode == "RGB"


def test_limits_refuse_before_decoding(modality: Modality) -> None:
    kind, data = media_kind(modality), SAMPLES[modality]()
    header = kind.probe(data)
    for action in (kind.probe, kind.decode):
        action(data, header.width * header.height)
        with pytest.raises(EncoderError, match="--max-") as caught:
            action(data, header.width * header.height - 1)
        assert caught.value.code is ErrorCode.TOO_LARGE


def test_garbage_is_the_callers_fault(modality: Modality) -> None:
    kind, data = media_kind(modality), SAMPLES[modality]()
    half = data[: len(data) // 2]
    with pytest.raises(EncoderError) as caught:
        kind.decode(half)
    assert caught.value.code is ErrorCode.MEDIA_CORRUPT
    with pytest.raises(EncoderError) as caught:
        kind.probe(data[:16] + bytes(64))
    assert caught.value.code is ErrorCode.MEDIA_CORRUPT
    for noise in (b"", bytes(100), random.Random(5).randbytes(1000)):
        with pytest.raises(EncoderError) as caught:
            kind.probe(noise)
        assert caught.value.code in (ErrorCode.MEDIA_CORRUPT, ErrorCode.MEDIA_UNSUPPORTED)


def test_a_modality_without_a_reader_is_unsupported() -> None:
    for modality in set(Modality) - set(KINDS):
        with pytest.raises(EncoderError) as caught:
            media_kind(modality)
        assert caught.value.code is ErrorCode.MEDIA_UNSUPPORTED


def test_reading_headers_needs_no_torch() -> None:
    script = (
        "import sys; from spmd_encoder.media.registry import KINDS, media_kind; "
        "[media_kind(m) for m in KINDS]; import spmd_encoder.media.data_uri, spmd_encoder.media.pool; "
        "print(sorted({'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
