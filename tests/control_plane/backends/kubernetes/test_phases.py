"""How far a slot's pod is, told from conditions, containers and events; what each phase may take, and its words."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from control_plane.backends.kubernetes.backoff import FIRST_S, MOST_S, Backoff
from control_plane.backends.kubernetes.phases import (
    COMING,
    TRANSITIONS,
    WORDS,
    Phase,
    Progress,
    Seen,
    budget_s,
    can_follow,
    phase_of,
)
from control_plane.settings import KubernetesSettings

SETTINGS = KubernetesSettings(unschedulable_s=900, pulling_s=600, starting_s=60, trouble_s=30)


def pod(*, node: str = "node-1", deleted: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": "slot", **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {})}
    return {"metadata": metadata, "spec": {"nodeName": node} if node else {}, "status": status}


def container(**state: Any) -> dict[str, Any]:
    last = state.pop("last", None)
    return {"containerStatuses": [{"name": "agent", "state": state, **({"lastState": last} if last else {})}]}


def event(reason: str, message: str = "") -> dict[str, Any]:
    return {"reason": reason, "message": message}


CREATING = container(waiting={"reason": "ContainerCreating"})
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Phase, str, bool]] = {
    "not looked at": (pod(node=""), [], Phase.PENDING, "scheduler", False),
    "no node has room": (
        pod(
            node="",
            conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_GPU}],
        ),
        [],
        Phase.UNSCHEDULABLE,
        "Insufficient nvidia.com/gpu",
        False,
    ),
    "pulling": (
        pod(**CREATING),
        [event("Scheduled"), event("Pulling", 'Pulling image "x"')],
        Phase.PULLING,
        "x",
        False,
    ),
    "pulled": (pod(**CREATING), [event("Pulling"), event("Pulled")], Phase.STARTING, "starting", False),
    "no such image": (
        pod(**container(waiting={"reason": "ImagePullBackOff", "message": "manifest unknown"})),
        [],
        Phase.PULLING,
        "manifest unknown",
        True,
    ),
    "a pull that is backed off": (
        pod(**container(waiting={"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'})),
        [
            event("Failed", 'Failed to pull image "x": rpc error: code = NotFound desc = manifest unknown'),
            event("Failed", "Error: ErrImagePull"),
            event("BackOff", 'Back-off pulling image "x"'),
            event("Failed", "Error: ImagePullBackOff"),
        ],
        Phase.PULLING,
        "manifest unknown",
        True,
    ),
    "no such secret": (
        pod(**container(waiting={"reason": "CreateContainerConfigError", "message": 'secret "s3" not found'})),
        [],
        Phase.STARTING,
        'secret "s3" not found',
        True,
    ),
    "a volume that cannot be mounted": (
        pod(**CREATING),
        [event("FailedMount", 'persistentvolumeclaim "objects" not found')],
        Phase.STARTING,
        "objects",
        True,
    ),
    "runs": (pod(**container(running={})), [], Phase.STARTING, "starting", False),
    "crashed before": (
        pod(**container(running={}, last={"terminated": {"reason": "Error", "exitCode": 2, "message": "no torch"}})),
        [],
        Phase.STARTING,
        "no torch",
        True,
    ),
    "crashes": (
        pod(
            **container(
                waiting={"reason": "CrashLoopBackOff"}, last={"terminated": {"reason": "OOMKilled", "exitCode": 137}}
            )
        ),
        [],
        Phase.STARTING,
        "more memory than resources.limits.memory",
        True,
    ),
    "deleted": (pod(deleted=True, **container(running={})), [], Phase.LEAVING, "deleted", False),
    "its node is drained": (
        pod(
            deleted=True,
            conditions=[
                {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "Eviction"}
            ],
        ),
        [],
        Phase.LEAVING,
        "EvictionByEvictionAPI",
        False,
    ),
    "evicted": (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
        [],
        Phase.GONE,
        "low on resource",
        False,
    ),
    "killed for memory": (
        pod(phase="Failed", **container(terminated={"reason": "OOMKilled", "exitCode": 137})),
        [],
        Phase.GONE,
        "OOMKilled",
        False,
    ),
}


@pytest.mark.parametrize(("found", "events", "phase", "word", "trouble"), CASES.values(), ids=CASES)
def test_phases_are_told_apart_with_their_reason(
    found: dict[str, Any], events: list[dict[str, Any]], phase: Phase, word: str, trouble: bool
) -> None:
    seen = phase_of(found, events)
    assert (seen.phase, seen.trouble) == (phase, trouble)
    assert word in seen.words


def test_an_agent_that_answers_is_ready_whatever_its_conditions_say() -> None:
    assert phase_of(pod(**container(running={})), answers=True).phase is Phase.READY
    assert phase_of(pod(deleted=True), answers=True).phase is Phase.LEAVING


def test_every_phase_has_words_and_a_place_in_the_table() -> None:
    assert set(TRANSITIONS) == set(WORDS) == set(Phase)
    assert not TRANSITIONS[Phase.GONE]
    for before, after in pairwise([*COMING, Phase.READY, Phase.SPECIALISING, Phase.LOADING]):
        assert can_follow(before, after)
    for phase in Phase:
        assert not can_follow(Phase.GONE, phase)
        assert phase is Phase.GONE or can_follow(phase, Phase.GONE)
    assert not can_follow(Phase.LEAVING, Phase.READY) and not can_follow(Phase.STARTING, Phase.UNSCHEDULABLE)


def test_each_phase_has_a_budget_of_its_own_and_trouble_a_shorter_one() -> None:
    assert budget_s(Seen(Phase.UNSCHEDULABLE), SETTINGS) == 900
    assert budget_s(Seen(Phase.PULLING), SETTINGS) == 600
    assert budget_s(Seen(Phase.PULLING, "ImagePullBackOff", trouble=True), SETTINGS) == 30
    assert budget_s(Seen(Phase.STARTING), SETTINGS) == 60
    assert budget_s(Seen(Phase.STARTING, "ContainerCreating"), SETTINGS) == 600, "nobody told whether it is pulled"
    assert budget_s(Seen(Phase.READY), SETTINGS) == float("inf")


def test_a_crash_that_repeats_does_not_have_its_time_again_each_time() -> None:
    crashed = {"terminated": {"reason": "Error", "exitCode": 1}}
    progress = Progress(phase_of(pod(**container(running={}))), 0.0, 0.0)
    for now_s in range(5, 60, 5):
        state = {"waiting": {"reason": "CrashLoopBackOff"}} if now_s % 10 else {"running": {}}
        progress.note(phase_of(pod(**container(last=crashed, **state))), float(now_s))
    assert progress.since_s == 5.0 and progress.late_s(36.0, SETTINGS) > 0


def test_news_that_come_late_do_not_take_a_slot_back() -> None:
    progress = Progress(Seen(Phase.LEAVING), 0.0, 0.0)
    assert not progress.note(Seen(Phase.READY), 1.0) and progress.seen.phase is Phase.LEAVING


def test_a_class_that_fails_is_tried_less_and_less_often_until_a_slot_comes() -> None:
    backoff, now_s, tries = Backoff(), 0.0, 0
    assert backoff.pausing_s(now_s) == 0
    last_s = 0.0
    while now_s < 3600:
        if backoff.pausing_s(now_s) == 0:
            tries, last_s = tries + 1, now_s
            backoff.failed(now_s, "quota")
        now_s += 0.5
    assert tries <= 7 + 3600 / MOST_S + 1, "never a hot loop"
    assert backoff.lasted_s == last_s > 3600 - 2 * MOST_S
    backoff = Backoff()
    backoff.failed(now_s, "again")
    assert backoff.pausing_s(now_s) == FIRST_S
    backoff.failed(now_s, "busy", retry_after_s=77.0)
    assert backoff.pausing_s(now_s) == 77.0


def test_one_failure_does_not_last_however_long_ago_it_was() -> None:
    backoff = Backoff()
    backoff.failed(0.0, "no answer")
    assert backoff.lasted_s == 0.0 and backoff.is_recent(FIRST_S)
    assert not backoff.is_recent(3600.0), "nobody needed a slot since: nothing is known of now"
    backoff.failed(3600.0, "no answer")
    assert (backoff.failures, backoff.lasted_s, backoff.pausing_s(3600.0)) == (1, 0.0, FIRST_S)
