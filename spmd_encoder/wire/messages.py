"""Every message between our own processes, as typed structs: one union per direction (within a replica `wire.orders`,
to processes that decode `wire.preparing`, to the one that writes into receivers' memory `wire.writing`).

A message travels as one header frame (msgpack of the struct, see `wire.codec`) and, where it says so, raw
frames after it: media bytes of `Encode`, one tensor of `Completed`. Nothing is ever pickled.
"""

from __future__ import annotations

import msgspec

from spmd_encoder.api.cost import CostTable
from spmd_encoder.api.profiling import ProfileOptions, ProfileOutcome
from spmd_encoder.api.types import (
    NO_OPTIONS,
    Detail,
    ItemOptions,
    Modality,
    ModelInfo,
    OutputKind,
    ProcessInfo,
    StageTimes,
)
from spmd_encoder.errors import ErrorCode

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


# dispatcher -> scheduler (ZMQ, one ROUTER to one DEALER per replica)


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item as the dispatcher sends it. `budget_s`: time left, relative because clocks differ between nodes.

    `alone`: it was in flight when a worker died, so it runs in a batch of one with nothing beside it. `held`: its media
    frame is empty, and it is answered from the cache or with NOT_FOUND.
    """

    job_id: int
    request_id: str
    modality: Modality
    output: OutputKind | None
    digest: str
    cost_tokens: int
    budget_s: float
    options: ItemOptions = NO_OPTIONS
    alone: bool = False
    probe: bool = False
    held: bool = False


class Encode(Message, frozen=True):
    """Followed by one media frame per job, in order."""

    jobs: tuple[Job, ...]


class Cancel(Message, frozen=True):
    """Forget these jobs; one that has not begun its forward never will."""

    job_ids: tuple[int, ...]


class Profile(Message, frozen=True):
    """Start the profilers of the replica's ranks, or, with `start` None, stop them. It has no part in the load."""

    call_id: int
    start: ProfileOptions | None


ToScheduler = Encode | Cancel | Profile


# scheduler -> dispatcher


class Hello(Message, frozen=True):
    """A replica's leader is up."""

    protocol: int
    config_digest: str
    replica: int
    epoch: int
    model: ModelInfo
    cost: CostTable
    load_s: float
    tower_bytes: int
    start_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds of each phase of the leader's start, in order; `load_s` is one of them."""
    decoders: dict[str, str | list[str]] = msgspec.field(default_factory=dict)
    """What this replica decodes, and with what, for `/info`."""


class Completed(Message, frozen=True):
    """Followed by one frame: the embedding's little-endian C-order bytes."""

    job_id: int
    kind: OutputKind
    shape: tuple[int, ...]
    dtype: str
    num_tokens: int
    grid: tuple[int, int, int] | None
    times: StageTimes
    details: dict[str, Detail] = msgspec.field(default_factory=dict)
    cached: bool = False


class Failed(Message, frozen=True):
    job_id: int
    code: ErrorCode
    message: str


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts since this epoch's start (monotone within an epoch), and gauges of now."""

    queue_items: int = 0
    running_items: int = 0
    batches: int = 0
    batch_items: int = 0
    batch_tokens: int = 0
    completed: int = 0
    failed: int = 0
    dropped: int = 0
    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0
    idle_empty_s: float = 0.0
    idle_preparation_s: float = 0.0
    idle_delivery_s: float = 0.0
    loop_cpu_s: float = 0.0
    compute_cpu_s: float = 0.0
    batch_size_counts: tuple[tuple[int, int], ...] = ()
    cache_hits: int = 0
    cache_misses: int = 0
    cache_evictions: int = 0
    cache_entries: int = 0
    cache_bytes: int = 0


class Heartbeat(Message, frozen=True):
    """Twice a second, also under load. `evicted`: (digest, output) of the results that the cache has dropped since."""

    stats: SchedulerStats
    evicted: tuple[tuple[str, str], ...] = ()


class Profiled(Message, frozen=True):
    """One outcome per rank of the replica, by TP rank."""

    call_id: int
    outcomes: tuple[ProfileOutcome, ...]


FromScheduler = Hello | Completed | Failed | Heartbeat | Profiled


# dispatcher -> keeper (a stream connection)


class Reform(Message, frozen=True):
    """End this rank's worker whatever its state and start the one of `epoch` after `pause_s`."""

    replica: int
    epoch: int
    pause_s: float = 0.0


class Stop(Message, frozen=True):
    """End this rank with `exit_code`; `reason` goes into the log and torchrun's report when it is not 0."""

    exit_code: int
    reason: str = ""


ToKeeper = Reform | Stop


# keeper -> dispatcher


class KeeperHello(Message, frozen=True):
    protocol: int
    token: str
    rank: int
    process: ProcessInfo
    nursery: ProcessInfo | None
    versions: dict[str, str]


class WorkerStarted(Message, frozen=True):
    rank: int
    epoch: int
    process: ProcessInfo
    preparers: tuple[ProcessInfo, ...] = ()


class WorkerExited(Message, frozen=True):
    """`suspects`: jobs that the leader's worker had begun and not ended (empty from followers).

    `fatal`: trying again cannot help (for example an unsupported model); `reason` is then one sentence.
    `last_lines`: the end of the worker's output, for the case that it never came up.
    """

    rank: int
    epoch: int
    code: int
    suspects: tuple[int, ...] = ()
    fatal: bool = False
    reason: str = ""
    last_lines: tuple[str, ...] = ()


class Progress(Message, frozen=True):
    """Once a second. `last_order`: the newest order that the rank has finished, -1 for none.

    `beat_age_s`: time since the worker's loop last gave a sign; `busy_s`: how long its present order runs.
    """

    rank: int
    epoch: int
    last_order: int
    beat_age_s: float
    busy_s: float


class NurseryStarted(Message, frozen=True):
    process: ProcessInfo


FromKeeper = KeeperHello | WorkerStarted | WorkerExited | Progress | NurseryStarted


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


# keeper -> its child (the first frame on their socket pair)


class WorldRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the election decided: where the dispatcher listens and the secret that members show."""

    start_name: str
    elected_rank: int
    work_address: str
    control_address: str
    token: str


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a front-end candidate offers to the election."""

    bound: bool
    work_address: str
    control_address: str
    token: str


class WorkerSpec(Message, frozen=True):
    """Everything that a worker needs to know. `world` None: take part in the roll call first.

    `host`: this node's address for TCP between nodes, "" in a world of one node (then ipc under `run_dir`).
    `asked_at`: when it was asked for, by the monotonic clock that the node's processes share.
    """

    config: str
    rank: int
    local_rank: int
    local_world_size: int
    dp_size: int
    tp_size: int
    store_host: str
    store_port: int
    run_dir: str
    host: str
    keeper_id: str
    attempt: int
    epoch: int
    world: WorldRecord | None
    endpoint: Endpoint | None
    asked_at: float


class StoreSpec(Message, frozen=True):
    """Host the rendezvous store."""

    host: str
    port: int


class PreparerSpec(Message, frozen=True):
    """Decode and preprocess items for the leader of a replica; `folder` holds the checkpoint."""

    config: str
    folder: str
    rank: int
    dp_rank: int
    tp_rank: int
    epoch: int


class WriterSpec(Message, frozen=True):
    """Write rows into receivers' memory with Mooncake, as `host` and over its `protocol` and `device`."""

    host: str
    protocol: str
    device: str


ChildSpec = WorkerSpec | StoreSpec | PreparerSpec | WriterSpec


# worker -> keeper (the same socket pair)


class Joined(Message, frozen=True):
    """The world has agreed; from here on the dispatcher is the authority over this rank's worker."""

    world: WorldRecord


class Beat(Message, frozen=True):
    """The worker's loop is alive. `preparers`: pids of the processes that prepare items for it."""

    last_order: int
    busy_s: float
    preloaded: bool
    preparers: tuple[int, ...] = ()


class WorkerFailing(Message, frozen=True):
    """The worker is about to end because of this."""

    reason: str
    exit_code: int
    fatal: bool


class StoreReady(Message, frozen=True):
    """From the process that hosts the rendezvous store."""

    port: int


FromWorker = Joined | Beat | WorkerFailing | StoreReady


# keeper -> worker


class StopWorker(Message, frozen=True):
    """Finish and end with exit code 0."""


ToWorker = StopWorker
