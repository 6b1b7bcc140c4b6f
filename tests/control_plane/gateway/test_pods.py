"""A whole control plane whose slots are pods: from zero to an answer, what a waiting client is told, and what it costs
in calls. Cluster and agents are stand-ins; everything between them is real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane import starts
from control_plane.backends import link
from control_plane.backends.base import SlotRefused, SlotUnavailable
from control_plane.backends.kubernetes import home
from control_plane.backends.kubernetes.api import FUNCTIONS, LEASES, PODS, SLOT_POOLS, ApiRefused, ClusterApi
from control_plane.doctor import UNPLACED_S, examine
from control_plane.settings import KubernetesSettings, Settings, SlotSettings
from function_runtime.protocol import AgentInfo, ReplicaSpec, ReplicaStatus, ReplicaTime, SlotEvent, SlotState
from tests.control_plane.backends.kubernetes.fake_cluster import FakeApi, Kubelet, listening, running, slot_pool
from tests.control_plane.backends.town import Machine
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import Behaviour, FakeSlot

QUOTA = ApiRefused(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: gpus, used: 2, limited: 2')


class PodKubelet(Kubelet):
    """Pods with a `FakeSlot` as their agent."""

    def __init__(self, api: FakeApi, behaviour: Behaviour) -> None:
        super().__init__(api, Machine())
        self.behaviour = behaviour
        self.slots: dict[str, FakeSlot] = {}

    def run(self, name: str) -> None:
        self.slots[name] = FakeSlot(self.behaviour, name)
        super().run(name)

    def _end(self, name: str) -> None:
        slot = self.slots.pop(name, None)
        if slot is not None:
            task = asyncio.get_running_loop().create_task(slot.vanish())
            task.add_done_callback(lambda done: Kubelet._end(self, name))
        else:
            super()._end(name)


class _Queue:
    def __init__(self) -> None:
        self.events: asyncio.Queue[SlotEvent | None] = asyncio.Queue()

    def slot_state(self, slot_id: str, state: SlotState) -> None:
        self.events.put_nowait(SlotEvent(state=state))

    def replica_changed(self, slot_id: str, status: ReplicaStatus) -> None:
        self.events.put_nowait(SlotEvent(replica=status))

    def time_passed(self, slot_id: str, times: Mapping[str, ReplicaTime]) -> None:
        self.events.put_nowait(SlotEvent(times=dict(times)))

    def slot_lost(self, slot_id: str, reason: str, *, agent_gone: bool) -> None:
        self.events.put_nowait(None)


def agent_client(slots: dict[str, FakeSlot]) -> Any:
    class Client:
        def __init__(self, info: AgentInfo) -> None:
            self.info = info

        @property
        def slot(self) -> FakeSlot:
            slot = slots.get(self.info.slot_id)
            if slot is None or not slot.in_reach:
                raise SlotUnavailable("connection refused")
            return slot

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            return

        async def events(self) -> AsyncIterator[SlotEvent]:
            slot, queue = self.slot, _Queue()
            slot.listen(id(self), queue)
            try:
                while (event := await queue.events.get()) is not None:
                    yield event
            finally:
                slot.leave(id(self))

        async def start_replica(self, spec: ReplicaSpec) -> ReplicaStatus:
            return await self.slot.start_replica(self.info.slot_id, spec)

        async def end_replica(self, replica_id: str, grace_s: float, reason: str) -> None:
            await self.slot.end_replica(self.info.slot_id, replica_id, grace_s, reason)

        async def warm(self, workers: int) -> None:
            return

        async def expect_pool(self, chances: Any, holds_s: float) -> None:
            return

        async def shutdown(self, grace_s: float, *, if_idle: bool = False) -> None:
            if if_idle and self.slot.living:
                raise SlotRefused("slot_busy", "a replica is here")

    return Client


class Town:
    def __init__(self, plane: Plane, api: FakeApi, kubelet: PodKubelet) -> None:
        self.plane, self.api, self.kubelet = plane, api, kubelet

    @property
    def pods(self) -> list[str]:
        return list(self.api.objects.get("pods", {}))

    async def deploy(self, **fields: Any) -> None:
        await self.plane.deploy(**fields)
        await until(lambda: self.plane.context.cluster is not None and self.plane.context.cluster.backend.synced)


@pytest.fixture
async def town(
    settings: Settings, tmp_path: Path, checkpoint: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Town]:
    api = FakeApi()
    kubelet = PodKubelet(api, Behaviour())

    async def connect(settings: KubernetesSettings) -> Any:
        return api

    monkeypatch.setattr(ClusterApi, "connect", connect)
    monkeypatch.setattr(link, "AgentClient", agent_client(kubelet.slots))
    monkeypatch.setattr(home, "listens", listening(lambda: bool(kubelet.slots)))
    secret = tmp_path / "agent-secret"
    secret.write_text("a secret of thirty-two characters\n")
    settings = replace(
        settings,
        kubernetes=KubernetesSettings(backend="kubernetes", release="rel", trouble_s=0.3, unschedulable_s=30),
        slot=SlotSettings(agent_secret_file=str(secret), hold_s=0.05),
    )
    plane = Plane(settings, FakeSlot(), checkpoint)
    plane.backend = None  # type: ignore[assignment]
    api.put(SLOT_POOLS, slot_pool())
    await plane.start()
    yield Town(plane, api, kubelet)
    await plane.stop()


async def test_a_request_at_zero_makes_a_pod_and_is_answered_and_the_slot_goes_again(town: Town) -> None:
    await town.deploy()
    assert town.pods == []
    async with town.plane.post(body()) as response:
        assert response.status == 200, await response.text()
    assert town.api.calls["create pods"] == 1, "a burst of events is one slot"
    async with town.plane.get("/metrics") as told:
        metrics = await told.text()
    assert 'phase="ready"} 1.0' in metrics and 'stoker_cluster_writes_total{what="pod_create"} 1.0' in metrics
    context = town.plane.context
    (status,) = context.fleet.living()
    context.loop.end_replica(status.replica_id, "the test is done with it")
    await until(lambda: not context.fleet.living())
    context.slot_scaling._led_since_s = -1000.0  # it has watched for long

    def looked() -> bool:
        context.slot_scaling.poke()  # as it does every second
        return not town.pods

    await until(looked)


async def test_who_waits_is_told_what_for(town: Town) -> None:
    town.kubelet.stops_at = "schedule"
    await town.deploy()
    async with town.plane.post(body(stream=True)) as response:
        stream = Stream(response)
        reading = asyncio.create_task(stream.all())
        await until(lambda: any("Insufficient nvidia.com/gpu" in comment for comment in stream.comments))
        async with town.plane.get("/api/v1/slots") as told:
            slots = await told.json()
        ((coming,), cluster) = slots["coming"], slots["cluster"]
        assert coming["phase"] == "unschedulable" and cluster["problem"] is None
        async with town.plane.get("/api/v1/why/fn") as told:
            why = await told.json()
        assert "no node has room" in why["slots"]["coming"][0]["message"]
        checks = {check.name: check for check in examine(town.plane.context)}
        assert checks["cluster"].ok, "a node may be on its way"
        assert town.plane.context.cluster is not None
        town.plane.context.cluster.backend.progress[coming["slot_id"]].since_s -= UNPLACED_S
        (check,) = [check for check in examine(town.plane.context) if check.name == "cluster"]
        assert not check.ok and "Insufficient nvidia.com/gpu" in check.says and "SlotPool" in check.do
        town.kubelet.stops_at = ""
        town.kubelet.bring_up(coming["slot_id"])
        events = await reading
    assert text_of(events) and events[-1][1] == "[DONE]"


async def test_a_client_that_does_not_wait_is_told_how_far_it_is(town: Town) -> None:
    town.kubelet.stops_at = "start"
    await town.deploy()
    async with town.plane.post(body(), x_stoker_no_wait="1") as response:
        assert response.status in (200, 503)
    await until(lambda: town.pods)
    assert "a slot is starting" in town.plane.context.dispatcher.why_waiting(("default", "fn"))


async def test_what_the_cluster_refuses_for_long_ends_the_wait_with_its_reason(town: Town) -> None:
    town.api.faults += [("create pods", QUOTA)] * 50
    await town.deploy()
    async with town.plane.post(body()) as response:
        told = await response.json()
    assert response.status == 503, told
    assert told["error"]["code"] == "slot_unavailable" and "exceeded quota" in told["error"]["message"]
    assert town.api.calls["create pods"] < 6
    (event,) = town.api.objects["events"].values()
    assert event["involvedObject"]["kind"] == "SlotPool" and "exceeded quota" in event["message"]


async def test_without_a_slot_pool_the_wait_ends_with_that(town: Town) -> None:
    cluster = town.plane.context.cluster
    assert cluster is not None
    await until(lambda: cluster.body()["problem"] is None)
    checks = {check.name: check for check in examine(town.plane.context)}
    assert checks["cluster"].ok and "slot pools: default" in checks["cluster"].says
    town.api.remove(SLOT_POOLS, "default")
    await town.deploy(timeouts={"cold_start_s": 0.3})
    (check,) = [check for check in examine(town.plane.context) if check.name == "cluster"]
    assert not check.ok and "fn: there is no SlotPool default" in check.says
    async with town.plane.post(body()) as response:
        told = await response.json()
    assert response.status == 503 and "there is no SlotPool default" in told["error"]["message"], told


async def test_a_pod_that_is_deleted_under_a_stream_costs_no_token(town: Town) -> None:
    await town.deploy()
    town.kubelet.behaviour.pause_s = 0.02
    async with town.plane.post(body(stream=True, max_tokens=30)) as response:
        stream, places = Stream(response), list[int]()
        async for place, event in stream.events():
            if event != "[DONE]":
                assert "error" not in event, event
                places.append(place)
            if len(places) == 5:
                await town.api.delete(PODS, town.pods[0])
    assert places == sorted(set(places)) and len(places) >= 30


async def test_a_model_that_never_fits_into_memory_is_an_error_that_says_so_and_not_a_loop(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot comes back each time, and would be killed again each time."""
    monkeypatch.setattr(starts, "TRANSIENT_FIRST_S", 0.0)
    monkeypatch.setattr(link, "AGAIN_S", (0.0,))
    town.kubelet.behaviour.never_ready = True
    await town.deploy()
    fleet = town.plane.context.fleet

    async def killed_whenever_it_loads() -> None:
        for number in range(1, 50):
            await until(lambda: any(slot.started for slot in town.kubelet.slots.values()))
            (name,) = town.pods
            await town.kubelet.slots.pop(name).vanish()
            ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": f"2026-01-01T00:00:{number:02d}Z"}
            status = running(ready=False)
            status["containerStatuses"][0]["lastState"] = {"terminated": ended}
            town.api.change(PODS, name, status=status)
            await until(lambda: not fleet.living())
            town.kubelet.slots[name] = FakeSlot(town.kubelet.behaviour, name)

    killing = asyncio.create_task(killed_whenever_it_loads())
    async with town.plane.post(body()) as response:
        told = await response.json()
    killing.cancel()
    assert response.status == 503, told
    assert "out_of_memory" in told["error"]["message"] and "resources.limits.memory" in told["error"]["message"]
    assert town.plane.context.loop.starting.record(("default", "fn"), 1).failures == starts.PATIENCE


async def test_functions_have_objects_that_say_how_they_are_and_the_lead_has_a_lease(town: Town) -> None:
    town.api.put(FUNCTIONS, {"metadata": {"name": "fn"}, "spec": {"model": town.plane.checkpoint[0], "engine": "stub"}})
    await until(lambda: town.plane.context.functions.find("fn", "default"))
    await until(lambda: town.api.objects["functions"]["fn"].get("status", {}).get("state") == "Importing")
    await town.deploy()
    await until(lambda: town.api.objects["functions"]["fn"]["status"]["state"] == "AtZero")
    async with town.plane.post(body()) as response:
        assert response.status == 200
    await until(lambda: town.api.objects["functions"]["fn"]["status"]["replicas"] == 1)
    await until(lambda: town.api.objects["slotpools"]["default"].get("status", {}).get("ready") == 1)
    await until(lambda: town.api.objects.get(LEASES.plural))
    writes = town.api.writes
    await asyncio.sleep(0.6)  # longer than any writer lets a change settle
    assert town.api.writes == writes, "nothing is written while nothing changes"


async def test_a_new_control_plane_finds_the_slots_and_what_runs_there(town: Town) -> None:
    await town.deploy()
    async with town.plane.post(body()) as response:
        assert response.status == 200
    creates = town.api.calls["create pods"]
    await town.plane.restart()
    await until(lambda: town.plane.context.fleet.in_sight and town.plane.context.fleet.living())
    async with town.plane.post(body()) as response:
        assert response.status == 200
    assert town.api.calls["create pods"] == creates
