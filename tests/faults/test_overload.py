"""Three times what a world can serve, with default limits: health and control calls are answered all the while.

An SGLang language server drops an encoder whose `/health` takes longer than two seconds; that is the polls' time limit.
"""

from __future__ import annotations

import pytest

from benchmarks.overload import measure, overload_world

pytestmark = pytest.mark.timeout(280)

REFUSED = {"429", "503"}


def test_health_and_registrations_are_answered_at_three_times_the_load() -> None:
    with overload_world() as (world, grpc_port):
        measured = measure(world, grpc_port, times=3.0, warm_up_s=2.0, duration_s=8.0)
        for poll in measured["polls"].values():
            assert poll["asked"] > 5 and poll["wrong"].keys() <= {"no answer in time"}, measured
            # Other tests may have the processors for a while, which is no fault of the server's.
            assert sum(poll["wrong"].values()) <= poll["asked"] // 50, measured
        offered = measured["offered"]
        for kind in ("encodes", "parts"):
            assert offered[kind].keys() <= {"200"} | REFUSED, measured
            assert offered[kind]["200"] > 0
        # Who has registered gets the embeddings or the reason why there are none, and once.
        assert offered["registrations"].keys() <= {"200"}, measured
        assert offered["parts_without_message"] == offered["parts_with_two_messages"] == 0, measured
        info = world.info()
        assert info["ready"]["ready"] and [replica["epoch"] for replica in info["replicas"]] == [0, 0]
        assert "Traceback" not in world.log(), world.log()[-4000:]
