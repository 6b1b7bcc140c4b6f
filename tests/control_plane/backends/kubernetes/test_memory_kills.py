"""A start that was too big is told from one that was lost with its slot."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.backends.kubernetes.memory_kills import TOLD_WITHIN_S, MemoryKills, memory_kill
from control_plane.fleet import gone_with_agent
from function_runtime.protocol import EngineOptions, ReplicaSpec, ReplicaState, ReplicaStatus


def pod(reason: str = "OOMKilled", at: str = "1", part: str = "lastState") -> dict[str, Any]:
    ended = {"terminated": {"reason": reason, "exitCode": 137, "finishedAt": at}}
    return {"metadata": {"name": "slot", "uid": "u"}, "status": {"containerStatuses": [{"name": "agent", part: ended}]}}


def dead(**fields: Any) -> ReplicaStatus:
    spec = ReplicaSpec("rep-1", "fn", 1, "default", "", "id", EngineOptions())
    return gone_with_agent(ReplicaStatus("rep-1", "fn", 1, ReplicaState.LOADING, spec, created_us=1, **fields))


@pytest.mark.parametrize("part", ["state", "lastState"])
def test_a_kill_is_known_while_it_lasts_and_after_it(part: str) -> None:
    assert memory_kill(pod(part=part)) and not memory_kill(pod("Error", part=part))


def test_agent_and_pod_tell_of_it_in_either_order_and_it_counts_once() -> None:
    kills = MemoryKills()
    kills.died("slot", dead(), 0.0)
    assert kills.blamed("slot", pod("Error"), 0.0) == []
    (status,) = kills.blamed("slot", pod(), 1.0)
    assert status.error is not None and status.error.code == "out_of_memory" and "fn" in status.error.message
    assert kills.blamed("slot", pod(), 1.0) == []
    kills.died("slot", dead(), 2.0)
    assert kills.blamed("slot", pod(), 2.0) == [], "that is the kill of before"
    assert len(kills.blamed("slot", pod(at="2"), 3.0)) == 1


def test_a_replica_that_was_ready_or_died_otherwise_is_not_held_responsible() -> None:
    kills = MemoryKills()
    kills.died("slot", dead(ready_us=5), 0.0)
    assert kills.blamed("slot", pod(), 0.0) == []
    kills.died("slot", dead(), 0.0)
    assert kills.blamed("slot", pod(), TOLD_WITHIN_S + 1.0) == [], "too long ago to be the same"
    kills.died("slot", dead(), 0.0)
    assert kills.blamed("slot", None, 0.0) == [] and kills.blamed("slot", pod(), 0.0) == [], "its pod is gone"
