"""Runs in a virtual environment of its own, beside SGLang and without this package: SGLang's own `MMReceiverHTTP`.

It asks an encoder for items' embeddings as a language server does, and writes down what it put together. Usage:
`python receiver.py BACKEND URL OUT MODALITY FILE...`, where MODALITY is image, video or audio, and BACKEND is
zmq_to_tokenizer, zmq_to_scheduler or mooncake; with the latter two, two scheduler ranks receive. OUT is a folder:
`rows-<rank>.npy`, `grid-<rank>.json`, or `error-<rank>.json`.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import importlib.machinery
import json
import multiprocessing
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RANKS = 2
WAIT_S = 60.0
POOL_BYTES = 2**22


def stand_in_for_torchvision() -> None:
    """SGLang imports it everywhere; a CPU build of torch has none that fits. Nothing here calls it."""
    from transformers import AutoProcessor  # noqa: F401, it looks for the real one

    class InterpolationMode(enum.Enum):
        NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(7)

    def module(name: str, **names: Any) -> Any:
        made: Any = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        made.__path__ = []
        made.__dict__.update(names)
        sys.modules[name] = made
        return made

    kinds = dict.fromkeys(("Compose", "Normalize", "ToTensor", "Resize", "Lambda"), object)
    functional = module("torchvision.transforms.functional", InterpolationMode=InterpolationMode)
    second = module("torchvision.transforms.v2.functional", InterpolationMode=InterpolationMode)
    v2 = module("torchvision.transforms.v2", functional=second)
    transforms = module(
        "torchvision.transforms", InterpolationMode=InterpolationMode, functional=functional, v2=v2, **kinds
    )
    io = module("torchvision.io", decode_jpeg=None, ImageReadMode=None, read_image=None)
    module("torchvision", __version__="0.28.0", transforms=transforms, io=io)


class Inputs:
    """What SGLang's processor makes; the receiver gives its memory back when this is gone."""

    def __init__(self) -> None:
        self.mm_items: list[Any] = []
        self.input_ids = [1, 2, 3]


class Processor:
    """Stands in for the model's processor: keeps what the receiver puts together."""

    prefer_tokenized_input = False

    def __init__(self) -> None:
        self.rows: Any = None
        self.told: dict[str, Any] = {}

    def get_validated_mm_data(self, prompt: Any, embeddings: dict[Any, Any], **meta: Any) -> Any:
        ((modality, self.rows),) = embeddings.items()
        grids = {"IMAGE": "img_grid_thw", "VIDEO": "video_grid_thw", "AUDIO": "audio_feature_lens"}
        assert {name for name in grids.values() if meta[name] is not None} == {grids[modality.name]}
        times = {name: meta[name] for name in ("video_timestamps", "second_per_grid_ts") if name in meta}
        self.told = {"modality": modality.name, "grid": meta[grids[modality.name]].tolist(), **times}
        return Inputs()

    def save(self, out: Path, rank: int) -> None:
        import numpy as np

        np.save(out / f"rows-{rank}.npy", self.rows.float().numpy())
        (out / f"grid-{rank}.json").write_text(json.dumps({**self.told, "dtype": str(self.rows.dtype)}))


def receiver(backend: str, urls: list[str], processor: Processor) -> Any:
    """The receiver without the server around it: the attributes that its methods read."""
    import zmq.asyncio
    from sglang.srt.disaggregation.encoder.receiver import MMReceiverHTTP

    made = MMReceiverHTTP.__new__(MMReceiverHTTP)
    made.context = zmq.asyncio.Context(2)
    made.scheduler_context = zmq.Context()
    made.encoder_transfer_backend = backend
    made.encode_urls = urls
    made.recv_timeout = made.wait_timeout = WAIT_S
    made.host = made.hostname = "127.0.0.1"
    made.model_type = "qwen2_5_vl"
    made.mm_processor = processor
    made.embedding_pool = None
    made.waiting_list, made.waiting_by_rid = [], {}
    return made


def request(modality: str, items: list[str]) -> Any:
    data = {f"{name}_data": items if name == modality else None for name in ("image", "video", "audio")}
    return SimpleNamespace(**data, mm_content_hashes=None, rid=None)


def to_tokenizer(urls: list[str], wanted: Any, out: Path) -> None:
    processor = Processor()
    made = receiver("zmq_to_tokenizer", urls, processor)
    result = asyncio.run(made.recv_mm_data(wanted, processor, "prompt"))
    if result is None:
        (out / "error-0.json").write_text(json.dumps({"message": "no embeddings", "code": None}))
    else:
        processor.save(out, 0)


def with_memory(made: Any) -> None:
    """SGLang's own engine and pool, with host memory in the place of a GPU's, which its constructor asks for."""
    import torch
    from sglang.srt.disaggregation.encoder.receiver import EmbeddingPool
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

    made.dtype, made.gpu_id = torch.float32, 0
    made.embeddings_engine = engine = MooncakeTransferEngine(hostname="127.0.0.1")
    pool = made.embedding_pool = EmbeddingPool.__new__(EmbeddingPool)
    pool.gpu_id, pool.size_bytes, pool.engine = 0, POOL_BYTES, engine
    pool.buffer = torch.zeros(POOL_BYTES, dtype=torch.uint8)
    pool.base = pool.buffer.data_ptr()
    engine.register(pool.base, POOL_BYTES)
    pool._segments_free, pool._inflight = [(0, POOL_BYTES)], {}
    pool._next_slot_id = pool._total_inflight = 0
    pool._lock = threading.Lock()
    pool._cond = threading.Condition(pool._lock)


def scheduler_rank(rank: int, backend: str, urls: list[str], wanted: Any, out: Path) -> None:
    """One rank of a language server's scheduler; rank 0 plays its tokenizer, too."""
    stand_in_for_torchvision()
    import msgspec
    import torch.distributed as dist
    import zmq
    from sglang.srt.disaggregation.encoder.receiver import _ReceiveRegistrationRunner
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.utils.network import get_zmq_socket_on_host

    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=RANKS)
    group = SimpleNamespace(cpu_group=dist.group.WORLD, all_gather_object=gather)
    processor = Processor()
    made = receiver(backend, urls, processor)
    if backend == "mooncake":
        with_memory(made)
    made.tp_rank, made.tp_size, made.tp_group = rank, RANKS, group
    made.registration_runner = _ReceiveRegistrationRunner(f"registration-{rank}")
    made.scheduler_embedding_port = made.scheduler_recv_socket = None
    if backend == "zmq_to_scheduler":
        made.scheduler_embedding_port, made.scheduler_recv_socket = get_zmq_socket_on_host(
            made.scheduler_context, zmq.PULL, host=made.hostname
        )
    made.create_req = lambda received: received.rid

    told: list[Any] = []
    if rank == 0:
        ready = made._send_encode_request(wanted, on_dispatch_error=told.append)
        ready.set()
    shared = [vars(wanted) if rank == 0 else None]
    dist.broadcast_object_list(shared, 0)
    fields = shared[0]
    required = {field.name: None for field in msgspec.structs.fields(TokenizedGenerateReqInput) if field.required}
    received = TokenizedGenerateReqInput(**required)
    received.rid = fields["rid"]
    received.need_wait_for_mm_inputs = True
    received.num_items_assigned = fields["num_items_assigned"]
    received.encoder_urls = fields["encoder_urls"]
    received.input_text = "prompt"
    received.input_ids = [1]

    new: list[Any] = [received]
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        done, aborted = made.process_waiting_requests(new)
        # What a tokenizer sends to its schedulers; the ranks agree on failures among themselves.
        new = [told.pop()] if told else []
        if done:
            return processor.save(out, rank)
        if aborted:
            ((_, message, code),) = aborted
            (out / f"error-{rank}.json").write_text(json.dumps({"message": message, "code": int(code)}))
            return None
        time.sleep(0.01)
    raise TimeoutError("nothing came")


def gather(value: Any) -> list[Any]:
    import torch.distributed as dist

    values = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def main() -> int:
    backend, url, folder, modality, *files = sys.argv[1:]
    out = Path(folder)
    # Twice the same encoder: the receiver makes two parts of the request.
    urls = [url, url]
    items = [f"data:{modality}/x;base64," + base64.b64encode(Path(file).read_bytes()).decode() for file in files]
    wanted = request(modality, items)
    if backend == "zmq_to_tokenizer":
        stand_in_for_torchvision()
        to_tokenizer(urls, wanted, out)
        return 0
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=scheduler_rank, args=(rank, backend, urls, wanted, out)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(3 * WAIT_S)
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
