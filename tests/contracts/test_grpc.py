"""The gRPC messages in Python are what their .proto files say, SGLang's have its names and numbers, and the README is
true."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from spmd_encoder.config import Config
from spmd_encoder.frontends.grpc.errors import STATUS
from spmd_encoder.frontends.grpc.protos import sglang_pb2
from spmd_encoder.frontends.grpc.server import GrpcFrontEnd
from tests.harness.fake_service import FakeService, picture_file

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PROTOS = ROOT / "spmd_encoder" / "frontends" / "grpc" / "protos"

STRING, U32, U64 = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64
# (number, type, repeated) by message and field, of the package smg-grpc-proto 0.4.28.
THEIRS = {
    "EncodeRequest": {
        "mm_items": (1, STRING, True),
        "req_id": (2, STRING, False),
        "num_parts": (3, U32, False),
        "part_idx": (4, U32, False),
        "prefill_host": (5, STRING, False),
        "embedding_port": (6, U32, True),
    },
    "EncodeResponse": {
        "embedding_size": (1, U64, False),
        "embedding_len": (2, U64, False),
        "embedding_dim": (3, U64, False),
    },
    "SendRequest": {
        "req_id": (1, STRING, False),
        "prefill_host": (2, STRING, False),
        "embedding_port": (3, U32, False),
        "session_id": (4, STRING, False),
        "buffer_address": (5, U64, False),
    },
    "SendResponse": {},
    "SchedulerReceiveUrlRequest": {
        "req_id": (1, STRING, False),
        "receive_url": (2, STRING, False),
        "receive_count": (3, U32, False),
    },
    "SchedulerReceiveUrlResponse": {},
}


@pytest.mark.parametrize("name", sorted(path.stem for path in PROTOS.glob("*.proto")))
def test_generated_files_are_current(name: str, tmp_path: Path) -> None:
    source = str((PROTOS / f"{name}.proto").relative_to(ROOT))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*command, source], cwd=ROOT, check=True)
    for ending in ("_pb2.py", "_pb2.pyi"):
        made = tmp_path / PROTOS.relative_to(ROOT) / f"{name}{ending}"
        assert made.read_text() == (PROTOS / made.name).read_text(), "run `make protos`"


def test_sglangs_service_has_their_names_and_numbers() -> None:
    service = sglang_pb2.DESCRIPTOR.services_by_name["SglangEncoder"]
    assert service.full_name == "sglang.grpc.encoder.SglangEncoder"
    assert {m.name: (m.input_type.name, m.output_type.name) for m in service.methods} == {
        name: (f"{name}Request", f"{name}Response") for name in ("Encode", "Send", "SchedulerReceiveUrl")
    }
    ours = {
        message.name: {field.name: (field.number, field.type, field.is_repeated) for field in message.fields}
        for message in sglang_pb2.DESCRIPTOR.message_types_by_name.values()
    }
    assert ours == THEIRS


def test_the_readme_has_every_status() -> None:
    section = re.search(r"## The gRPC interface\n(.*?)\n## ", README.read_text(), re.DOTALL)
    assert section is not None
    rows = dict(re.findall(r"^\| ([A-Z_]+) \| (.*) \|$", section[1], re.MULTILINE))
    told = {code: status for status, codes in rows.items() for code in re.findall(r"`([A-Z_]+)`", codes)}
    assert told == {code.value: status.name for code, status in STATUS.items()}


async def test_the_readmes_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = re.search(r"```python\n(import grpc\n.*?)```", README.read_text(), re.DOTALL)
    assert source is not None
    (tmp_path / "photo.jpg").write_bytes(picture_file(7))
    monkeypatch.chdir(tmp_path)
    sock = socket.create_server(("127.0.0.1", 0))
    code = compile(source[1].replace("30001", str(sock.getsockname()[1])), str(README), "exec")
    front_end = GrpcFrontEnd(FakeService(), Config(), sock)
    serving = asyncio.create_task(front_end.serve())
    names: dict[str, Any] = {}
    await asyncio.to_thread(exec, code, names)
    assert [result.WhichOneof("outcome") for result in names["results"]] == ["embedding"]
    front_end.stop(1)
    await serving
