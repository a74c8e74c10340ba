"""Flags of what is spoken with SGLang's language servers, and of finished embeddings on their way."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_encoder.flags import flag


@dataclass(frozen=True, kw_only=True)
class SglangConfig:
    encoder_transfer_backend: str = flag(
        "auto",
        "how embeddings reach an SGLang language server, which must have the same value; auto is zmq_to_scheduler",
        choices=("auto", "zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"),
    )
    send_timeout_s: float = flag(
        180.0,
        "longest wait of finished embeddings for their receivers, and longest delivery to one",
        fallback="SGLANG_ENCODER_SEND_TIMEOUT",
    )
    max_staged_bytes: int = flag(
        4 * 2**30, "most bytes of embeddings that wait for receivers or are on their way to them; then 503"
    )
    encoder_register_urls: tuple[str, ...] = flag(
        (), "language servers' bootstrap addresses (http://host:8997) that are told of this encoder while it is ready"
    )
    sglang_embedding_class: str = flag(
        "sglang.srt.disaggregation.encoder.receiver:EmbeddingData",
        "the receiver's class of a part of embeddings, which older releases of SGLang have elsewhere",
    )
    mooncake_protocol: str = flag(
        "rdma",
        "how Mooncake reaches receivers' memory, with `--encoder-transfer-backend mooncake`, which needs the extra "
        "`[mooncake]`; where it finds no RDMA device it takes TCP",
        choices=("rdma", "tcp", "efa"),
        fallback="MOONCAKE_PROTOCOL",
    )
    mooncake_ib_device: str | None = flag(
        None,
        "RDMA devices that Mooncake may use, by their names and separated by commas; without it Mooncake chooses",
        alias=("--disaggregation-ib-device",),
    )
