"""Messages between a replica's leader and its followers: numbered orders, and what comes back."""

from __future__ import annotations

from spmd_encoder.api.profiling import ProfileOptions, ProfileOutcome
from spmd_encoder.wire.messages import Message, TensorSpec

# leader -> followers (ZMQ, one ROUTER to one DEALER per follower)


class RunBatch(Message, frozen=True):
    """Take your tensors from the leader, in this order, and run the forward on them. `shards` is one that all ranks
    have, or one per rank, of which some may be empty.

    `trial`: it is one of the warm-up, and this flag bounds its size.
    """

    order: int
    shards: tuple[tuple[TensorSpec, ...], ...]
    trial: str = ""


class ProfileOrder(Message, frozen=True):
    """Start to record, or, with `start` None, stop and write the trace."""

    order: int
    start: ProfileOptions | None


class StopFollower(Message, frozen=True):
    order: int


Order = RunBatch | ProfileOrder | StopFollower


# follower -> leader


class FollowerHello(Message, frozen=True):
    tp_rank: int


class ProfileDone(Message, frozen=True):
    """The answer to the `ProfileOrder` of this number; later orders may be done before it is said."""

    order: int
    outcome: ProfileOutcome


FromFollower = FollowerHello | ProfileDone
