"""Flags and variables of SGLang's encoder server, and what becomes of each here: a table, and the reading of it.

A command line or an environment that was made for SGLang either works, or is told what to write instead.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from spmd_encoder.errors import StartupError


class Verdict(Enum):
    SAME = "the same"
    ACCEPTED = "accepted"
    REFUSED = "refused"


@dataclass(frozen=True)
class Foreign:
    """One name of SGLang's. `takes`: how many values a flag has, 0, 1 or "*". `harmless` are values of a refused flag
    that ask for nothing."""

    name: str
    verdict: Verdict
    text: str
    takes: int | str = 1
    harmless: tuple[str, ...] = ()


_SAME, _ACCEPTED, _REFUSED = Verdict.SAME, Verdict.ACCEPTED, Verdict.REFUSED
_LANGUAGE_SIDE = "belongs to the language server, not to its encoder"
_OWN_ADDRESS = "bootstraps are told the address of --host or, where that is all of them, the one that leads out"
_MOONCAKE = "names of devices; no table of them by GPU"
_NO_LANGUAGE_MODEL = "there is no language model here"

FLAGS: tuple[Foreign, ...] = (
    Foreign("--model-path", _SAME, ""),
    Foreign("--served-model-name", _SAME, ""),
    Foreign("--revision", _SAME, ""),
    Foreign("--dtype", _SAME, "`half` and `float` are written float16 and float32"),
    Foreign("--device", _SAME, ""),
    Foreign("--host", _SAME, ""),
    Foreign("--port", _SAME, ""),
    Foreign("--tp-size", _SAME, "ranks are started by torchrun, which sets how many there are"),
    Foreign("--dp-size", _SAME, "may be left out; DP and TP go together"),
    Foreign("--encoder-transfer-backend", _SAME, "`mooncake` needs the extra `[mooncake]`"),
    Foreign("--encoder-register-urls", _SAME, ""),
    Foreign("--allowed-media-domains", _SAME, ""),
    Foreign("--media-url-max-file-size-mb", _SAME, "without --allow-private-media-hosts, public addresses only"),
    Foreign("--log-level", _SAME, ""),
    Foreign("--disaggregation-ib-device", _SAME, _MOONCAKE),
    Foreign("--mooncake-ib-device", _SAME, _MOONCAKE),
    Foreign("--encoder-only", _ACCEPTED, "this server is nothing else", 0),
    Foreign("--nnodes", _ACCEPTED, "torchrun's own --nnodes says this"),
    Foreign("--node-rank", _ACCEPTED, "torchrun knows it"),
    Foreign("--dist-init-addr", _ACCEPTED, "torchrun's --rdzv-endpoint says this"),
    Foreign("--base-gpu-id", _ACCEPTED, "each rank takes the GPU of its local rank; use CUDA_VISIBLE_DEVICES"),
    Foreign("--gpu-id-step", _ACCEPTED, "each rank takes the GPU of its local rank; use CUDA_VISIBLE_DEVICES"),
    Foreign("--mm-enable-dp-encoder", _ACCEPTED, "--mm-encoder-tp-mode data is that", 0),
    Foreign("--enable-metrics", _ACCEPTED, "/metrics is always there; --metrics-names adds SGLang's names", 0),
    Foreign("--extra-metric-labels", _ACCEPTED, "let the scrape configuration add them"),
    Foreign("--enable-trace", _ACCEPTED, "no traces are sent", 0),
    Foreign("--otlp-traces-endpoint", _ACCEPTED, "no traces are sent"),
    Foreign("--trust-remote-code", _ACCEPTED, "no code from a checkpoint is ever run", 0),
    Foreign("--enable-prefix-mm-cache", _ACCEPTED, "--cache-bytes has a size for it, and is on", 0),
    Foreign("--enable-adaptive-dispatch-to-encoder", _ACCEPTED, _LANGUAGE_SIDE, 0),
    Foreign("--image-processor-backend", _ACCEPTED, "processors run on Pillow, also where torchvision is installed"),
    Foreign("--mm-attention-backend", _ACCEPTED, "the attention is chosen by the device"),
    Foreign("--attention-backend", _ACCEPTED, _NO_LANGUAGE_MODEL),
    Foreign("--tokenizer-path", _ACCEPTED, _NO_LANGUAGE_MODEL),
    Foreign("--chat-template", _ACCEPTED, _NO_LANGUAGE_MODEL),
    Foreign("--context-length", _ACCEPTED, _NO_LANGUAGE_MODEL),
    Foreign("--mem-fraction-static", _ACCEPTED, _NO_LANGUAGE_MODEL),
    Foreign("--chunked-prefill-size", _ACCEPTED, _NO_LANGUAGE_MODEL),
    Foreign("--disable-radix-cache", _ACCEPTED, _NO_LANGUAGE_MODEL, 0),
    Foreign("--disable-cuda-graph", _ACCEPTED, "there are none", 0),
    Foreign("--skip-server-warmup", _ACCEPTED, "a replica encodes a probe before it is ready", 0),
    Foreign("--random-seed", _ACCEPTED, "nothing here is random"),
    Foreign("--watchdog-timeout", _ACCEPTED, "see --stall-timeout-s and --batch-timeout-s"),
    Foreign("--log-requests", _ACCEPTED, "requests are counted, not logged", 0),
    Foreign("--disaggregation-mode", _REFUSED, "an encoder has none", harmless=("null",)),
    Foreign("--language-only", _REFUSED, _LANGUAGE_SIDE, 0),
    Foreign("--language-model-only", _REFUSED, _LANGUAGE_SIDE, 0),
    Foreign("--encoder-urls", _REFUSED, _LANGUAGE_SIDE, "*"),
    Foreign("--encoder-bootstrap-port", _REFUSED, _LANGUAGE_SIDE + "; name its address in --encoder-register-urls"),
    Foreign("--grpc-mode", _REFUSED, "--grpc-port serves gRPC beside HTTP, on a port of its own", 0),
    Foreign("--attn-cp-size", _REFUSED, "use --tp-size or more replicas", harmless=("1",)),
    Foreign("--pp-size", _REFUSED, "use --tp-size or more replicas", harmless=("1",)),
    Foreign("--quantization", _REFUSED, "weights are served in the dtype of --dtype"),
    Foreign(
        "--mm-process-config",
        _REFUSED,
        "it changes what is encoded; write such settings into the checkpoint's preprocessor_config.json",
    ),
    Foreign("--enable-mm-global-cache", _REFUSED, "it needs a Mooncake store, which is not spoken here", 0),
    Foreign("--mm-global-cache-backend", _REFUSED, "it needs a Mooncake store, which is not spoken here"),
    Foreign("--ssl-certfile", _REFUSED, "TLS is not served; put a proxy in front"),
    Foreign("--ssl-keyfile", _REFUSED, "TLS is not served; put a proxy in front"),
    Foreign("--api-key", _REFUSED, "nobody is asked for a key here (nor by SGLang's encoder); put a proxy in front"),
)

VARIABLES: tuple[Foreign, ...] = (
    Foreign("SGLANG_ENCODER_REQ_TIMEOUT", _SAME, "where --request-timeout-s is not given"),
    Foreign("SGLANG_ENCODER_SEND_TIMEOUT", _SAME, "where --send-timeout-s is not given"),
    Foreign("SGLANG_ENCODER_MAX_BATCH_SIZE", _SAME, "where --max-batch-items is not given; counts items, not requests"),
    Foreign(
        "SGLANG_ENCODER_MAX_PENDING_REQUESTS",
        _SAME,
        "where --max-queued-items is not given; counts items of the whole world",
    ),
    Foreign(
        "SGLANG_ENCODER_DP_WORKER_MAX_INFLIGHT", _ACCEPTED, "replicas are sent three batches ahead; nothing to set"
    ),
    Foreign("SGLANG_ENCODER_PREPROC_WORKERS", _ACCEPTED, "see --preparers, which counts processes"),
    Foreign("SGLANG_ENCODER_MM_LOAD_WORKERS", _ACCEPTED, "see --preparers, which counts processes"),
    Foreign("SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU", _ACCEPTED, "pictures are prepared on CPUs"),
    Foreign("SGLANG_VLM_CACHE_SIZE_MB", _ACCEPTED, "see --cache-bytes, of each replica"),
    Foreign("MOONCAKE_PROTOCOL", _SAME, "where --mooncake-protocol is not given"),
    Foreign("SGLANG_TORCH_PROFILER_DIR", _SAME, "where --profile-dir is not given"),
    Foreign("SGLANG_HOST_IP", _ACCEPTED, _OWN_ADDRESS),
    Foreign("SGLANG_LOCAL_IP_NIC", _ACCEPTED, _OWN_ADDRESS),
    Foreign("REQUEST_TIMEOUT", _ACCEPTED, "see --media-fetch-timeout-s"),
)


_CLASS = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+):([A-Za-z_]\w*)", re.ASCII)
_BOOTSTRAP = re.compile(r"https?://[^/?#@\s]+/?", re.IGNORECASE)


def class_path(text: str) -> tuple[str, str]:
    """Module and class of `package.module:Class`. Raises StartupError (exit code 2)."""
    match = _CLASS.fullmatch(text)
    if match is None:
        raise StartupError(
            f"--sglang-embedding-class must be of the form package.module:Class, not {text!r}", exit_code=2
        )
    return match[1], match[2]


def check_bootstraps(urls: Sequence[str]) -> None:
    """Raises StartupError (exit code 2) for what is no address of a bootstrap server."""
    for url in urls:
        if _BOOTSTRAP.fullmatch(url) is None:
            raise StartupError(
                f"--encoder-register-urls takes addresses such as http://host:8997, not {url!r}", exit_code=2
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message} (see docs/sglang.md)", exit_code=2)


def take_foreign(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """`argv` without the flags that are SGLang's alone, and a line for each of them, and each variable, that says what
    became of it.

    Raises StartupError (exit code 2) for one that cannot be left out without changing what is served.
    """
    table = {flag.name: flag for flag in FLAGS if flag.verdict is not Verdict.SAME}
    parser = _Parser(add_help=False, allow_abbrev=False)
    for flag in table.values():
        if flag.takes == 0:
            parser.add_argument(flag.name, dest=flag.name, action="store_true", default=None)
        else:
            parser.add_argument(flag.name, dest=flag.name, nargs="*" if flag.takes == "*" else None, default=None)
    parsed, rest = parser.parse_known_args(list(argv))
    notes = []
    for name, value in vars(parsed).items():
        flag = table[name]
        if value is None or value in flag.harmless:
            continue
        if flag.verdict is Verdict.REFUSED:
            raise StartupError(f"{name} of SGLang is not taken: {flag.text}", exit_code=2)
        notes.append(f"{name} of SGLang is accepted and does nothing: {flag.text}")
    unused = [variable for variable in VARIABLES if variable.verdict is Verdict.ACCEPTED and variable.name in environ]
    return rest, notes + [f"{variable.name} of SGLang does nothing: {variable.text}" for variable in unused]


def foreign_table(entries: Sequence[Foreign]) -> str:
    """A table of the documentation, in Markdown."""
    lines = ["| SGLang | here | |", "| --- | --- | --- |"]
    lines += [f"| `{entry.name}` | {entry.verdict.value} | {entry.text} |" for entry in entries]
    return "\n".join(lines) + "\n"
