"""The server's configuration: one frozen dataclass per owner, filled from flags and environment.

Every field is a flag (`--max-batch-items`) with an environment twin (`SPMD_ENCODER_MAX_BATCH_ITEMS`); the flag
wins. This module is the only reader of `os.environ`. The flags table of the README is generated from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from spmd_encoder import __version__
from spmd_encoder.destination_flags import DestinationConfig, check_hosts
from spmd_encoder.errors import StartupError
from spmd_encoder.flags import ARITY, READERS, ZERO, check_host_names, check_number, flag, value_text
from spmd_encoder.media_flags import MediaConfig
from spmd_encoder.sglang_config import SglangConfig
from spmd_encoder.sglang_flags import check_bootstraps, class_path

ENV_PREFIX = "SPMD_ENCODER_"
DEFAULT_MODEL = "demo:dinov2-small"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model_path: str = flag(
        DEFAULT_MODEL,
        "checkpoint folder or hub id; `demo:dinov2-small` (real weights from the package index) or "
        "`demo:qwen2.5-vl-tiny` (random weights)",
        alias=("--model",),
    )
    revision: str | None = flag(None, "hub revision of the model")
    served_model_name: str | None = flag(None, "name in replies and `/v1/models` (default: the model path)")
    dtype: str = flag(
        "auto",
        "dtype of weights and output; auto is the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = flag("auto", "auto takes cuda where there is one", choices=("auto", "cpu", "cuda"))
    fast_linears: bool = flag(
        False,
        "on a CPU in float32, matrix products by oneDNN: 10 to 50 % faster, within 1e-5 of transformers' numbers "
        "instead of equal to them, and each rank holds its weights in memory of its own",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tp_size: int = flag(1, "ranks that share one copy of the model", alias=("--tp", "--tensor-parallel-size"))
    dp_size: int | None = flag(
        None, "copies of the model; must be world size / tp size", alias=("--dp", "--data-parallel-size")
    )
    mm_encoder_tp_mode: str = flag(
        "weights",
        "what the ranks of a copy share: the weights, or (data) the items of a batch, with whole weights on each rank; "
        "the latter is faster for small towers",
        choices=("weights", "data"),
    )
    frontend: str = flag(
        "node0",
        "who may host HTTP and gRPC: only node 0's lowest leader, or the lowest leader of any node whose port is free",
        choices=("node0", "any"),
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = flag("127.0.0.1", "address that HTTP and gRPC listen on")
    port: int = flag(30000, "port that HTTP listens on", least=ZERO)
    grpc_port: int | None = flag(
        None, "port that gRPC listens on, too; needs the extra `[grpc]`; off without it", least=ZERO
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "host names that HTTP may be asked by, besides localhost and addresses; empty allows any, but none where it "
        "listens on a loopback address",
    )
    max_body_bytes: int = flag(256 * 2**20, "largest request body; over gRPC the largest message, either way")
    grpc_max_message_bytes: int | None = flag(
        None,
        "largest message to gRPC, which takes each in one piece, outside of --max-inflight-bytes and with everything "
        "else held up (default: that of --max-body-bytes)",
    )
    max_items_per_request: int = flag(256, "most items in one request")
    max_image_pixels: int = flag(100_000_000, "most pixels of one picture, read from its header")
    max_image_bytes: int = flag(64 * 2**20, "largest media file, after base64")

    @property
    def grpc_message_bytes(self) -> int:
        return self.max_body_bytes if self.grpc_max_message_bytes is None else self.grpc_max_message_bytes


@dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    max_queued_items: int = flag(
        1024,
        "most items accepted and not yet answered, in the whole world; then 429",
        fallback="SGLANG_ENCODER_MAX_PENDING_REQUESTS",
    )
    max_queued_tokens: int | None = flag(
        None,
        "most encoder tokens of these items, by their headers (default: --max-queued-items times --max-batch-tokens); "
        "then 429; 0 is no limit",
        least=ZERO,
    )
    max_inflight_bytes: int = flag(2**30, "most media bytes held at once by the dispatcher; then 503")
    request_timeout_s: float = flag(
        180.0, "time after which a request is answered with 504", fallback="SGLANG_ENCODER_REQ_TIMEOUT"
    )
    preparers: int | None = flag(
        None, "processes per replica that decode and preprocess (default: half of the leader's share of cores, 1 to 8)"
    )
    preprocess_timeout_s: float = flag(20.0, "an item that takes longer to decode and preprocess fails")
    preparer_memory_bytes: int | None = flag(
        None,
        "most memory that a preparer takes for an item, beside what it takes by itself; 0: no limit (default: what "
        "items within the other limits may need, for pictures with the default ones 3 GB)",
        least=ZERO,
    )
    cache_bytes: int = flag(
        256 * 2**20,
        "bytes of results that each replica keeps, to answer equal items without a forward; 0 is off",
        least=ZERO,
    )
    max_batch_items: int = flag(8, "most items in one forward", fallback="SGLANG_ENCODER_MAX_BATCH_SIZE")
    max_batch_tokens: int = flag(16384, "most encoder tokens (patches) in one forward; a larger item runs alone")

    @property
    def queued_tokens(self) -> int:
        """0 is no limit."""
        derived = self.max_queued_items * self.max_batch_tokens
        return derived if self.max_queued_tokens is None else self.max_queued_tokens


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    worker_start: str = flag(
        "auto",
        "how workers start: fork from the nursery, or spawn a fresh interpreter (auto: fork on Linux)",
        choices=("auto", "fork", "spawn"),
    )
    warm_up: bool = flag(
        True,
        "before a replica takes work its tower runs small items and then batches up to --max-batch-tokens, as far as "
        "half a second reaches (on GPUs 20 s), so that first requests are not slow and memory that is too small shows",
    )
    start_deadline_s: float = flag(
        600.0, "after this a world with at least one replica counts as started", alias=("--start-deadline",)
    )
    drain_deadline_s: float = flag(
        25.0,
        "longest drain after SIGTERM; torchrun kills after 30 s, where its own `--shutdown-timeout` says nothing else",
    )
    stall_timeout_s: float = flag(
        5.0,
        "a worker that shows no sign of life for this long is replaced; at least 1",
        least=(1.0, "ranks report once a second that they live"),
    )
    load_timeout_s: float = flag(600.0, "the same, while a worker starts and loads")
    batch_timeout_s: float = flag(60.0, "a batch that runs longer has its replica replaced")
    collective_timeout_s: float = flag(60.0, "timeout of every collective")
    probe_interval_s: float = flag(10.0, "an idle replica encodes a probe this often")


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    log_level: str = flag("info", "least level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "text or one JSON object per line", choices=("text", "json"))
    metrics_names: str = flag(
        "own", "sglang adds what is measured under the names that SGLang's encoder has", choices=("own", "sglang")
    )
    profile_dir: str | None = flag(
        None,
        "folder for the traces of `/start_profile`, which may name another one inside it; without it each profile goes "
        "to a new temporary folder",
        fallback="SGLANG_TORCH_PROFILER_DIR",
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    media: MediaConfig = dataclasses.field(default_factory=MediaConfig)
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    destinations: DestinationConfig = dataclasses.field(default_factory=DestinationConfig)
    sglang: SglangConfig = dataclasses.field(default_factory=SglangConfig)
    lifecycle: LifecycleConfig = dataclasses.field(default_factory=LifecycleConfig)
    observability: ObservabilityConfig = dataclasses.field(default_factory=ObservabilityConfig)
    faults: str = ""
    """Fault injection for drills and tests, from `SPMD_ENCODER_FAULTS` only; see `worker.faults`."""

    def flat(self) -> dict[str, Any]:
        """All flags by their field name."""
        out: dict[str, Any] = {}
        for section in _sections():
            out.update(dataclasses.asdict(getattr(self, section.name)))
        return out | {"faults": self.faults}

    def digest(self) -> str:
        """Equal on all ranks of one world."""
        return hashlib.sha256(json.dumps(self.flat(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self.flat(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Config:
        return _build(json.loads(text))

    @property
    def served_name(self) -> str:
        return self.model.served_model_name or self.model.model_path


def process_environ() -> Mapping[str, str]:
    """This process's environment, for those who read the launcher's variables from it."""
    return os.environ


def worker_environ(**changes: str) -> dict[str, str]:
    """A child's environment: this process's with `changes`."""
    return {**os.environ, **changes}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message} (see --help)", exit_code=2)


def _sections() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(Config) if f.name != "faults"]


_hints = functools.cache(typing.get_type_hints)  # they are evaluated from text, and asked for per flag


def _section_type(section: dataclasses.Field[Any]) -> Any:
    return _hints(Config)[section.name]


def _value_type(cls: Any, field: dataclasses.Field[Any]) -> type:
    """One of str, int, float, bool, or tuple (of str)."""
    hint = _hints(cls)[field.name]
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return typing.cast(type, typing.get_origin(hint) or hint)


def flag_fields() -> list[tuple[str, Any, dataclasses.Field[Any]]]:
    """(section name, section class, field) of every flag, in order."""
    out = []
    for section in _sections():
        cls = _section_type(section)
        out += [(section.name, cls, field) for field in dataclasses.fields(cls)]
    return out


def flag_name(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def env_name(field: dataclasses.Field[Any]) -> str:
    return ENV_PREFIX + field.name.upper()


def _parser() -> _Parser:
    parser = _Parser(
        prog="spmd_encoder",
        description="Multimodal encoder server. Start it with torchrun --nproc-per-node N -m spmd_encoder, "
        "or alone with python -m spmd_encoder. Every flag has an environment twin SPMD_ENCODER_<FLAG>.",
        allow_abbrev=False,
    )
    for _, cls, field in flag_fields():
        names = [flag_name(field), *field.metadata["alias"]]
        kind = _value_type(cls, field)
        default = "none" if field.default in (None, ()) else value_text(field.default)
        parser.add_argument(
            *names,
            dest=field.name,
            type=READERS.get(kind, kind),
            choices=field.metadata["choices"] or None,
            default=None,
            help=f"{field.metadata['help']} (default: {default}; env {env_name(field)})".replace("%", "%%"),
            **ARITY.get(kind, {}),
        )
    parser.add_argument("--check", action="store_true", help="validate, print the resolved configuration, load nothing")
    parser.add_argument("--version", action="version", version=f"spmd_encoder {__version__}")
    return parser


def parse_config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[Config, bool]:
    """(configuration, whether `--check` was given). Raises StartupError with exit code 2, one sentence."""
    env = os.environ if environ is None else environ
    parsed = vars(_parser().parse_args(list(argv)))
    values: dict[str, Any] = {"faults": env.get(ENV_PREFIX + "FAULTS", "")}
    for _, cls, field in flag_fields():
        value = parsed[field.name]
        if _value_type(cls, field) is tuple and value is not None:
            value = tuple(word for words in value for word in words)
        for name in (env_name(field), field.metadata["fallback"]):
            if value is None and name and (raw := env.get(name)) is not None:
                value = _from_env(name, raw, _value_type(cls, field), field.metadata["choices"])
        values[field.name] = field.default if value is None else value
    config = _build(values)
    _validate(config)
    return config, bool(parsed["check"])


def _from_env(name: str, raw: str, kind: type, choices: tuple[str, ...]) -> Any:
    try:
        value = READERS.get(kind, kind)(raw)
    except ValueError:
        expected = "true or false" if kind is bool else f"a {kind.__name__}"
        raise StartupError(f"{name}: {raw!r} is not {expected}", exit_code=2) from None
    if choices and value not in choices:
        raise StartupError(f"{name}: {raw!r} is not one of {', '.join(choices)}", exit_code=2)
    return value


def _build(values: Mapping[str, Any]) -> Config:
    sections = {}
    for section in _sections():
        cls = _section_type(section)
        given = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        # JSON has no tuples.
        sections[section.name] = cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})
    return Config(**sections, faults=values.get("faults", ""))


LEAST_PREPARER_BYTES = 2**28


def _validate(config: Config) -> None:
    for section, _, field in flag_fields():
        value = getattr(getattr(config, section), field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            check_number(flag_name(field), value, field.metadata["least"])
    port, grpc_port = config.server.port, config.server.grpc_port
    for name, number in (("--port", port), ("--grpc-port", grpc_port)):
        if number is not None and number > 65535:
            raise StartupError(f"{name} must be 0 to 65535, not {number}", exit_code=2)
    if port and port == grpc_port:
        raise StartupError(f"--port and --grpc-port are both {port}, but HTTP and gRPC need a port each", exit_code=2)
    if 0 < (config.limits.preparer_memory_bytes or 0) < LEAST_PREPARER_BYTES:
        raise StartupError(f"--preparer-memory-bytes must be 0 or at least {LEAST_PREPARER_BYTES}", exit_code=2)
    class_path(config.sglang.sglang_embedding_class)
    check_bootstraps(config.sglang.encoder_register_urls)
    check_hosts(config.destinations.push_allowed_hosts)
    for flagged, names in (
        ("--allowed-media-domains", config.media.allowed_media_domains),
        ("--allowed-hosts", config.server.allowed_hosts),
    ):
        check_host_names(flagged, names)


def validate_layout(config: Config, world_size: int) -> tuple[int, int]:
    """(dp size, tp size) of a world of `world_size` ranks. Raises StartupError with exit code 2."""
    tp, dp = config.parallel.tp_size, config.parallel.dp_size
    if world_size % tp:
        raise StartupError(f"--tp-size {tp} does not divide the {world_size} ranks of this world", exit_code=2)
    if dp is not None and dp * tp != world_size:  # layout-branch: validation
        raise StartupError(
            f"--dp-size {dp} times --tp-size {tp} is {dp * tp}, but this world has {world_size} ranks; "
            "leave --dp-size out, or start that many ranks",
            exit_code=2,
        )
    return world_size // tp, tp


def flags_table() -> str:
    """The README's flags table, in Markdown."""
    lines = ["| flag | default | environment | meaning |", "| --- | --- | --- | --- |"]
    for _, _, field in flag_fields():
        names = ", ".join(f"`{n}`" for n in (flag_name(field), *field.metadata["alias"]))
        text = field.metadata["help"]
        if field.metadata["choices"]:
            text += " (" + ", ".join(field.metadata["choices"]) + ")"
        default = "" if field.default in (None, ()) else f"`{value_text(field.default)}`"
        lines.append(f"| {names} | {default} | `{env_name(field)}` | {text} |")
    return "\n".join(lines) + "\n"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where made and fetched files are kept: `$XDG_CACHE_HOME/spmd_encoder`, or `~/.cache/spmd_encoder`."""
    env = os.environ if environ is None else environ
    base = env.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path there is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "spmd_encoder"
