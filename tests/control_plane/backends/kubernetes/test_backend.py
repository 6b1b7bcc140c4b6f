"""Slots as pods: watched, linked, asked for, given up, and told to whoever waits. Cluster and agents are stand-ins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from control_plane.backends import link
from control_plane.backends.base import SlotUnavailable
from control_plane.backends.kubernetes import backend as backend_module
from control_plane.backends.kubernetes import home
from control_plane.backends.kubernetes.api import EVENTS, PODS, SLOT_POOLS, ApiError, ApiRefused
from control_plane.backends.kubernetes.backend import UNSEEN, KubernetesBackend
from control_plane.backends.kubernetes.phases import SILENT_S, Phase
from control_plane.backends.kubernetes.tending import Tending
from control_plane.pod_spec import PodFields
from tests.control_plane.backends.kubernetes.fake_cluster import (
    FakeApi,
    Kubelet,
    backend_of,
    listening,
    pod_client_of,
    running,
    slot_pool,
)
from tests.control_plane.backends.town import Agent, Listener, Machine, until

KEY = ("default", "f")
QUOTA = ApiRefused(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: gpus, requested: 1, used: 2, limited: 2')


class Town:
    def __init__(self) -> None:
        self.api = FakeApi()
        self.machine = Machine()
        self.kubelet = Kubelet(self.api, self.machine)
        self.listener = Listener()
        self.backend = backend_of(self.api, unschedulable_s=60, trouble_s=30)
        self.replicas: dict[str, list[str]] = {}
        self.in_flight: dict[str, int] = {}
        self.failed: list[tuple[str, str]] = []
        self.tending = Tending(
            self.backend, lambda: True, lambda slot_id: self.replicas.get(slot_id, []), lambda: self.in_flight
        )
        self.tending.on_failed = lambda class_name, words: self.failed.append((class_name, words))

    async def start(self, **spec: Any) -> None:
        self.api.put(SLOT_POOLS, slot_pool(**spec))
        await self.backend.start(self.listener)
        await until(lambda: bool(self.backend.classes) and self.backend.synced)

    @property
    def class_name(self) -> str:
        return self.backend.classes[0].name

    @property
    def pods(self) -> list[str]:
        return list(self.api.objects.get("pods", {}))

    async def one(self) -> str:
        known = set(self.pods)
        assert await self.backend.add_slots(self.class_name, 1) == 1
        await until(lambda: len(set(self.pods) - known) == 1)
        (name,) = set(self.pods) - known
        return name

    async def ready(self) -> str:
        name = await self.one()
        await until(lambda: name in self.listener.slots)
        return name

    def later(self, seconds: float) -> None:
        """As if so much time had passed."""
        for progress in self.backend.progress.values():
            progress.since_s -= seconds
        for backoff in self.backend.backoffs.values():
            backoff.since_s -= seconds
            backoff.last_s -= seconds
            backoff.until_s -= seconds
        self.tending._tried_s.clear()


@pytest_asyncio.fixture
async def town(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Town]:
    made = Town()
    monkeypatch.setattr(link, "AgentClient", pod_client_of(made.machine))
    monkeypatch.setattr(home, "listens", listening(lambda: bool(made.machine.living)))
    yield made
    await made.backend.close(end_agents=False, grace_s=0)


async def test_nothing_is_in_sight_until_the_cluster_has_been_read(town: Town) -> None:
    assert town.backend.slot_ids == (UNSEEN,)
    with pytest.raises(SlotUnavailable):
        await town.backend.add_slots("any", 1)
    await town.start()
    await until(lambda: (UNSEEN, True) in town.listener.lost)
    assert town.backend.slot_ids == ()


async def test_a_cluster_that_cannot_be_reached_is_said_and_tried_again(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "CONNECT_AGAIN_S", 0.0)
    tries: list[int] = []

    async def connect() -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise ApiError("no route to host")
        return town.api

    town.backend._connect = connect
    await town.start()
    await until(lambda: town.backend.problem == "")
    assert len(tries) == 3


async def test_a_create_call_is_made_before_anybody_could_wait_for_it(town: Town) -> None:
    await town.start()
    assert await town.backend.add_slots(town.class_name, 2) == 2
    assert len(town.backend.coming) == 2 and town.api.calls["create pods"] == 0
    await asyncio.sleep(0)
    assert town.api.calls["create pods"] == 2, "in the next turn of the event loop"


async def test_a_new_slot_that_is_ready_at_once_keeps_nobody_waiting_to_see_what_runs_there(town: Town) -> None:
    await town.start()
    ours = await town.ready()
    assert (ours, True) in town.listener.lost, "known to be empty"
    pod = {**town.api.objects["pods"][ours], "metadata": {**town.api.objects["pods"][ours]["metadata"]}}
    pod["metadata"] |= {"name": "another-copy-s", "uid": "u2"}
    town.machine.spawn("another-copy-s")
    town.api.put(PODS, pod)
    await until(lambda: "another-copy-s" in town.listener.slots)
    assert ("another-copy-s", True) not in town.listener.lost, "whoever made it may have placed something there"
    town.kubelet.stops_at = "start"
    made = await town.one()
    town.backend.leads_for_s = lambda: 0.0
    town.kubelet.run(made)
    await until(lambda: made in town.listener.slots)
    assert (made, True) not in town.listener.lost, "another may lead meanwhile"


async def test_a_slot_that_finds_no_node_is_told_of_in_words_and_given_up_after_its_budget(town: Town) -> None:
    town.kubelet.stops_at = "schedule"
    await town.start()
    name = await town.one()
    await until(lambda: town.backend.progress[name].seen.phase is Phase.UNSCHEDULABLE)
    assert "Insufficient nvidia.com/gpu" in town.backend.words(town.class_name)
    (wait,) = town.backend.waits
    assert (wait.slot_id, wait.phase) == (name, "unschedulable")
    await town.tending.look()
    assert town.pods == [name] and town.failed == []
    town.later(61.0)
    await town.tending.look()
    await until(lambda: town.pods == [])
    ((class_name, words),) = town.failed
    assert class_name == town.class_name and "Insufficient nvidia.com/gpu" in words and "60 s" in words
    with pytest.raises(SlotUnavailable, match="Insufficient"):
        await town.backend.add_slots(town.class_name, 1)


async def test_events_tell_that_an_image_is_pulled(town: Town) -> None:
    town.kubelet.stops_at = "start"
    await town.start()
    name = await town.one()
    await until(lambda: town.backend.progress[name].seen.phase is Phase.STARTING)
    for about, event in ((name, "e1"), ("somebody-else", "e2")):
        town.api.put(
            EVENTS,
            {
                "metadata": {"name": event},
                "involvedObject": {"kind": "Pod", "name": about},
                "reason": "Pulling",
                "message": 'Pulling image "stoker@sha256:abc"',
                "lastTimestamp": "2026-01-01T00:00:01Z",
            },
        )
    await until(lambda: town.backend.progress[name].seen.phase is Phase.PULLING)
    assert "pulling its image" in town.backend.words(town.class_name)
    assert set(town.backend._events) == {name}, "what others' pods do is not kept"


async def test_a_quota_is_said_and_tried_again_ever_less_often(town: Town) -> None:
    await town.start()
    tries = 0
    for _ in range(200):
        town.api.faults.append(("create pods", QUOTA))
        try:
            await town.backend.add_slots(town.class_name, 1)
            tries += 1
            await until(lambda: not town.backend.asked)
        except SlotUnavailable as error:
            assert "quota" in str(error)
        town.later(1.0)
        await town.tending.look()
    assert tries < 12, "200 seconds of a demand that repeats each second"
    assert town.failed and "exceeded quota" in town.failed[0][1], "whoever waits learns why, after trouble_s"
    town.api.faults.clear()
    town.later(200.0)
    await town.ready()
    assert town.backend.backoffs == {}, "a slot that came ends the row"


@pytest.mark.parametrize("heard", [True, False])
async def test_a_create_call_without_an_answer_is_made_again_and_makes_one_pod(town: Town, heard: bool) -> None:
    await town.start()
    real, names = town.api.create, list[str]()

    async def create(resource: Any, body: Any) -> Any:
        names.append(body["metadata"]["name"])
        if len(names) == 1:
            if heard:
                await real(resource, body)
            raise ApiError("connection reset")
        return await real(resource, body)

    town.api.create = create  # type: ignore[method-assign]
    await town.backend.add_slots(town.class_name, 1)
    await until(lambda: len(town.listener.slots) == 1)
    assert len(town.pods) == 1 and town.backend.coming == {} and set(names) == set(town.pods)
    await town.tending.look()
    assert town.failed == [], "what was missed once is no reason to send anybody away"


async def test_a_cluster_that_failed_once_is_tried_again_by_the_next_who_waits(town: Town) -> None:
    await town.start()
    town.api.faults.append(("create pods", ApiRefused(500, "InternalError", "etcd has no leader")))
    await town.backend.add_slots(town.class_name, 1)
    await until(lambda: town.class_name in town.backend.backoffs)
    town.later(3600.0)
    await town.tending.look()
    assert town.failed == [] and town.backend.trouble(town.class_name) == ""
    await town.ready()


async def test_a_slot_whose_agent_crashes_at_its_start_is_collected_and_not_repeated_hot(town: Town) -> None:
    town.kubelet.stops_at = "start"
    await town.start()
    for number in range(3):
        name = await town.one()
        await until(lambda name=name: name in town.backend.progress)
        town.kubelet.kill(name, "Error")
        await until(lambda name=name: town.backend.progress[name].seen.phase is Phase.GONE)
        await town.tending.look()
        await until(lambda: town.pods == [])
        backoff = town.backend.backoffs[town.class_name]
        assert backoff.failures == number + 1 and backoff.pausing_s(time.monotonic()) > 2**number - 0.5
        town.later(60.0)


@pytest.mark.parametrize("how", ["deleted", "killed", "evicted"])
async def test_the_end_of_a_pod_is_told_with_its_reason_and_its_replicas_are_lost(town: Town, how: str) -> None:
    await town.start()
    name = await town.ready()
    town.listener.lost.clear()
    reasons: list[str] = []
    told = town.listener.slot_lost

    def lost(slot_id: str, reason: str, *, agent_gone: bool) -> None:
        reasons.append(reason)
        told(slot_id, reason, agent_gone=agent_gone)

    town.listener.slot_lost = lost  # type: ignore[method-assign]
    if how == "deleted":
        await town.api.delete(PODS, name)
        await until(lambda: town.pods == [])
        word = "deleted"
    elif how == "killed":
        town.kubelet.kill(name, "OOMKilled")
        word = "more memory than"
    else:
        status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        agent = town.machine.of(name)
        assert agent is not None
        agent.ended.set()
        town.api.change(PODS, name, status=status)
        word = "low on resource"
    await until(lambda: (name, True) in town.listener.lost and name not in town.backend.slot_ids)
    assert any(word in reason for reason in reasons), reasons
    await town.tending.look()
    await until(lambda: town.pods == [])


async def test_a_slot_that_has_fallen_silent_is_not_taken_for_one_that_comes(town: Town) -> None:
    await town.start()
    name = await town.ready()
    town.backend.answers(name, False, "its events broke off")
    assert name in town.backend.coming, "its agent may only be starting anew"
    town.later(SILENT_S + 0.1)
    assert name not in town.backend.coming, "who waits is given another"
    (wait,) = town.backend.waits
    assert (wait.slot_id, wait.words) == (name, "a slot is starting (its events broke off)")
    town.backend.answers(name, True)
    assert town.backend.progress[name].seen.phase is Phase.READY


async def test_a_slot_that_is_going_gets_nothing_new_and_is_heard_to_the_end(town: Town) -> None:
    town.kubelet.api.on_change.clear()
    await town.start()
    name = await town.one()
    town.kubelet.run(name)
    await until(lambda: name in town.listener.slots)
    await town.api.delete(PODS, name)
    await until(lambda: town.backend.leaving == {name})
    assert name in town.listener.slots and name in town.backend.slot_ids, "streams finish there"
    assert town.backend.coming == {}
    town.api.remove(PODS, name)
    await until(lambda: (name, True) in town.listener.lost)


async def test_an_agent_that_comes_up_after_its_pod_was_deleted_is_told_to_go(town: Town) -> None:
    town.kubelet.api.on_change.clear()
    await town.start()
    name = await town.one()
    town.api.change(PODS, name, status=running(ready=False))
    await town.api.delete(PODS, name)
    await until(lambda: town.backend.leaving == {name})
    agent = town.machine.spawn(name)  # it has not heard the SIGTERM that came before it listened for one
    await until(lambda: not agent.lives)


async def test_an_agent_that_died_in_its_pod_is_heard_again_where_its_pool_still_is(town: Town) -> None:
    await town.start()
    name = await town.ready()
    agent = town.machine.of(name)
    assert agent is not None
    agent.ended.set()
    await until(lambda: name not in town.listener.slots)
    last = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    status = running(ready=False)
    status["containerStatuses"][0]["lastState"] = last
    town.api.change(PODS, name, status=status)
    await until(lambda: any("more memory" in wait.words for wait in town.backend.waits))
    assert town.backend.progress[name].seen.phase is Phase.STARTING
    town.machine.spawn(name)
    town.api.change(PODS, name, status={**status, "conditions": running(ready=True)["conditions"]})
    await until(lambda: name in town.listener.slots)
    assert town.backend.progress[name].seen.phase is Phase.READY and len(town.pods) == 1


async def test_a_pod_that_moved_on_is_still_deleted_and_its_namesake_is_not(town: Town) -> None:
    await town.start()
    name = await town.ready()
    stale = town.backend.pod(name)
    assert stale is not None
    town.api.change(PODS, name, status={**running(ready=True), "note": "moved on"})
    await town.backend.delete(stale)
    await until(lambda: town.pods == [])
    other = await town.ready()
    found = town.api.objects["pods"][other]
    await town.backend.delete({**found, "metadata": {**found["metadata"], "uid": "of another life"}})
    assert town.pods == [other]


async def test_pods_say_when_they_are_busy_and_nothing_is_written_while_nothing_changes(town: Town) -> None:
    await town.start()
    name = await town.ready()
    await town.tending.look()
    annotations = town.api.objects["pods"][name]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "true"
    town.replicas[name], town.in_flight["rep-1"] = ["rep-1"], 4
    await town.tending.look()
    annotations = town.api.objects["pods"][name]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["stoker.dev/in-flight"] == "4"
    writes = town.api.writes
    for count in (4, 5, 3, 5, 4):
        town.in_flight["rep-1"] = count
        await town.tending.look()
    assert town.api.writes == writes
    town.replicas.clear()
    await town.tending.look()
    assert town.api.writes == writes + 1


async def test_a_slot_at_rest_is_not_looked_at_until_something_of_it_changes(town: Town) -> None:
    await town.start()
    slots = [await town.ready() for _ in range(2)]
    town.replicas = {name: [f"r-{name}"] for name in slots}
    first = slots[0]

    async def looked() -> set[str]:
        facts = town.tending.facts
        seen = set[str]()

        def noted(now_s: float) -> Any:
            found = facts(now_s)
            seen.update(each.name for each in found)
            return found

        town.tending.facts = noted  # type: ignore[method-assign]
        await town.tending.look()
        town.tending.facts = facts  # type: ignore[method-assign]
        return seen

    for _ in range(2):
        await town.tending.look()  # each is marked, which is news of its pod
    assert await looked() == set()
    town.in_flight = {f"r-{first}": 1}
    assert await looked() == {first} and await looked() == {first}, "as long as it works"
    town.in_flight = {}
    for _ in range(2):
        await town.tending.look()
    assert await looked() == set()
    town.replicas[first] = []
    assert await looked() == {first}
    (pod,) = [each for each in town.api.objects["pods"].values() if each["metadata"]["name"] == first]
    assert pod["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "true"


async def test_who_leaves_is_looked_for_when_something_moved_and_not_at_every_placement(town: Town) -> None:
    await town.start()
    name, looks, look = await town.ready(), list[int](), town.backend._look_who_leaves

    def counted() -> frozenset[str]:
        looks.append(1)
        return look()

    town.backend._look_who_leaves = counted  # type: ignore[method-assign]
    assert [town.backend.leaving for _ in range(5)] == [frozenset()] * 5
    assert len(looks) <= 1
    await town.backend.remove_slot(name)
    assert name in town.backend.leaving
    await until(lambda: not town.backend.leaving)
    other = await town.ready()
    town.api.put(SLOT_POOLS, slot_pool(image="stoker@sha256:new"))
    await until(lambda: other in town.backend.leaving)


async def test_when_a_pool_changes_its_slots_make_way_for_those_of_the_new_class(town: Town) -> None:
    await town.start()
    idle, busy = await town.ready(), await town.ready()
    town.replicas[busy] = ["rep-1"]
    moved: list[str] = []
    town.tending.on_outdated = lambda slot_id, replicas: moved.extend(replicas)
    before = town.class_name
    town.api.change(SLOT_POOLS, "default", spec={"image": "stoker@sha256:newer", "most": 3})
    await until(lambda: town.class_name != before)
    assert town.backend.leaving == {idle, busy}
    await town.tending.look()
    await until(lambda: town.pods == [busy])
    assert moved == ["rep-1"]
    newer = await town.ready()
    assert town.backend.class_of(newer) == town.class_name
    agent = town.machine.of(busy)
    assert agent is not None
    town.replicas.clear()
    await town.tending.look()
    await until(lambda: town.pods == [newer])


async def test_bounds_of_a_pool_change_without_touching_its_slots(town: Town) -> None:
    await town.start()
    name = await town.ready()
    town.api.change(SLOT_POOLS, "default", spec={"image": "stoker@sha256:abc", "most": 9, "least": 1})
    await until(lambda: town.backend.classes[0].most == 9)
    assert town.backend.leaving == frozenset() and town.backend.class_of(name) == town.class_name


async def test_a_function_with_fields_of_its_own_has_a_class_of_its_own_while_it_is_there(town: Town) -> None:
    await town.start()
    kinds = town.backend.kinds
    kinds.function_changed(KEY, None)
    assert kinds.of(KEY) == town.class_name and len(town.backend.classes) == 1
    kinds.function_changed(KEY, PodFields(devices={"nvidia.com/gpu": 1}))
    assert len(town.backend.classes) == 2 and kinds.of(KEY) != town.class_name
    assert await town.backend.add_slots(kinds.of(KEY), 2) == 2
    await until(lambda: len(town.listener.slots) == 2)
    assert await town.backend.add_slots(town.class_name, 5) == 1, "all classes of a pool share its bound"
    kinds.function_gone(KEY)
    assert len(town.backend.classes) == 1 and len(town.backend.outdated()) == 2


async def test_a_pool_that_is_not_there_or_cannot_be_is_said_to_whoever_needs_it(town: Town) -> None:
    await town.start()
    kinds = town.backend.kinds
    kinds.function_changed(KEY, PodFields(slotPool="gpus"))
    assert "no SlotPool gpus" in kinds.why_none(KEY)
    town.api.put(SLOT_POOLS, slot_pool("gpus", least=5, most=1))
    await until(lambda: "gpus" in kinds.refused)
    assert "least (5) is above most (1)" in kinds.why_none(KEY)
    town.api.change(SLOT_POOLS, "gpus", spec={"most": 1, "image": "x"})
    await until(lambda: kinds.why_none(KEY) == "")
    other = slot_pool("other")
    other["metadata"]["labels"] = {"app.kubernetes.io/instance": "another-release"}
    town.api.put(SLOT_POOLS, other)
    await until(lambda: town.backend.pools is not None and "other" in town.backend.pools.objects)
    assert "other" not in kinds.pools, "it is another release's"


async def test_a_function_on_gpus_is_told_that_its_pool_has_none_instead_of_getting_slots_that_never_fit(
    town: Town,
) -> None:
    await town.start()
    kinds = town.backend.kinds
    kinds.function_changed(KEY, None, on_devices=True)
    assert "slots of the SlotPool default have none" in kinds.why_none(KEY)
    with pytest.raises(SlotUnavailable):
        await town.backend.add_slots(kinds.of(KEY), 1)
    kinds.function_changed(KEY, PodFields(devices={"nvidia.com/gpu": 1}), on_devices=True)
    assert kinds.why_none(KEY) == "" and await town.backend.add_slots(kinds.of(KEY), 1) == 1


async def test_slots_of_a_pool_take_different_seats(town: Town) -> None:
    await town.start(perNode=2, most=4)
    await town.backend.add_slots(town.class_name, 4)
    await until(lambda: len(town.listener.slots) == 4)
    seats = [pod["metadata"]["labels"]["stoker.dev/seat"] for pod in town.api.objects["pods"].values()]
    assert sorted(seats) == ["0", "0", "1", "1"]


async def test_an_agent_that_speaks_another_language_is_said_and_given_up_after_its_budget(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of slots that is too far from the control plane's."""
    whole = Agent.state.fget
    monkeypatch.setattr(Agent, "state", property(lambda agent: msgspec.structs.replace(whole(agent), protocol=9)))
    await town.start()
    name = await town.one()
    await until(lambda: "speaks version 9" in town.backend.words(town.class_name))
    assert name not in town.listener.slots and town.backend.progress[name].seen.phase is Phase.STARTING
    town.later(200.0)
    await town.tending.look()
    await until(lambda: town.pods == [])
    ((_, words),) = town.failed
    assert "at most one version apart" in words and "given up after 180 s" in words


async def test_other_gateways_see_the_same_slots_and_write_nothing(town: Town) -> None:
    await town.start()
    name = await town.ready()
    second: KubernetesBackend = backend_of(town.api)
    heard = Listener()
    await second.start(heard)
    await until(lambda: name in heard.slots)
    writes = town.api.writes
    follower = Tending(second, lambda: False, lambda slot_id: [], dict)
    await follower.look()
    assert town.api.writes == writes and second.class_of(name) == town.class_name
    await second.close(end_agents=False, grace_s=0)
