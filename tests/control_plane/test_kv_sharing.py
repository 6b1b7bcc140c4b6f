"""KV memory of a shared GPU is divided anew as replicas come to it and leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from autoscaler.device_sharing import HEADROOM
from autoscaler.placement import Placement
from control_plane.backends.base import SlotClass, SlotUnavailable
from control_plane.fleet import Fleet
from control_plane.kv_grants import CUDA_CONTEXT_BYTES, KvShape
from control_plane.kv_sharing import KvSharing
from function_runtime.protocol import (
    DeviceState,
    EngineOptions,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    SlotState,
)

GB = 10**9
TOTAL = 80 * GB
WEIGHTS = 10 * GB
BUDGET = int(TOTAL * (1 - HEADROOM))
SHAPE = KvShape(64 * 4096, 8192)


class Backend:
    """One slot with one GPU. Replicas change their KV when `give` says so."""

    classes = (SlotClass(),)
    leaving: frozenset[str] = frozenset()
    slot_ids = ("s",)

    def __init__(self) -> None:
        self.told: list[dict[str, int]] = []
        self.started: list[str] = []
        self.any_started = asyncio.Event()
        self.deaf = False

    def class_of(self, slot_id: str) -> str:
        return ""

    def free_bytes(self, slot_id: str) -> int:
        return TOTAL

    def peers(self, slot_ids: Any) -> tuple[()]:
        return ()

    async def resize_kv(self, slot_id: str, kv_bytes: Mapping[str, int]) -> None:
        if self.deaf:
            raise SlotUnavailable("nobody is there")
        self.told.append(dict(kv_bytes))

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        self.started.append(spec.replica_id)
        self.any_started.set()
        return ReplicaStatus(spec.replica_id, spec.function, 1, ReplicaState.STARTING, spec, pid=1)


class Device:
    def __init__(self) -> None:
        self.backend = Backend()
        backend: Any = self.backend
        self.fleet = Fleet(backend, books=None)  # type: ignore[arg-type]
        self.fleet.keeps_books = False
        self.leads = True
        self.sharing = KvSharing(self.fleet, backend, lambda: self.leads)
        placing = self.fleet.placing
        placing.grants._shapes["model"] = SHAPE
        placing.measured.weights_bytes["model"] = WEIGHTS
        placing.context_tokens = lambda key: 8000.0
        self.fleet.slot_state(
            "s", SlotState("s", 1, "i", True, 1, 1, 0, 0, devices=(DeviceState("cuda", 0, TOTAL, 0),))
        )

    def spec(self, name: str, requests: int = 64, kv_bytes: int = 0) -> ReplicaSpec:
        options = EngineOptions(device="cuda:0", max_requests=requests, kv_bytes=kv_bytes)
        return ReplicaSpec(name, name, 1, "default", "", "model", options)

    def ready(self, name: str, kv_bytes: int, **options: int) -> None:
        self.has(ReplicaStatus(name, name, 1, ReplicaState.READY, self.spec(name, **options), pid=1), kv_bytes)

    def has(self, status: ReplicaStatus, kv_bytes: int) -> None:
        self.fleet.replica_changed("s", msgspec.structs.replace(status, kv_bytes=kv_bytes))

    def give(self, name: str, kv_bytes: int) -> None:
        self.has(self.fleet.replicas[name], kv_bytes)

    def start(self, name: str, **options: int) -> ReplicaSpec:
        self.fleet.start_replica(Placement("s", 0.0, "", devices=(0,)), self.spec(name, **options))
        return self.fleet.replicas[name].spec

    async def settled(self) -> None:
        """What was begun has come as far as it comes by itself."""
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def device() -> Device:
    return Device()


async def test_a_start_waits_until_who_is_there_has_made_room(device: Device) -> None:
    device.ready("one", 60 * GB)
    await device.settled()
    assert device.backend.told == []
    second = device.start("two")
    await device.settled()
    both = BUDGET - 2 * (WEIGHTS + CUDA_CONTEXT_BYTES)
    assert second.options.kv_bytes == pytest.approx(both / 2, rel=1e-3)
    (told,) = device.backend.told
    assert told.keys() == {"one"} and told["one"] == pytest.approx(both / 2, rel=1e-3)
    assert device.backend.started == [], "what it is to have is still another's"
    device.give("one", told["one"])
    await device.settled()
    assert device.backend.started == ["two"]


async def test_a_start_that_finds_room_waits_for_nobody(device: Device) -> None:
    device.ready("one", 20 * GB, requests=2)
    await device.settled()
    device.start("two", requests=2)
    await device.settled()
    assert (device.backend.started, device.backend.told) == (["two"], [])


async def test_what_one_leaves_goes_to_who_has_less_than_it_needs(device: Device) -> None:
    device.ready("one", 25 * GB)
    device.ready("two", 25 * GB)
    await device.settled()
    device.backend.told.clear()
    device.has(msgspec.structs.replace(device.fleet.replicas["two"], state=ReplicaState.ENDED), 0)
    await device.settled()
    (told,) = device.backend.told
    assert told == {"one": pytest.approx(BUDGET - WEIGHTS - CUDA_CONTEXT_BYTES, rel=1e-6)}
    assert device.sharing.told["more"] >= 1


async def test_nobody_gets_what_another_has_not_given_up_yet(device: Device) -> None:
    device.leads = False
    device.ready("large", 48 * GB, requests=64)
    device.ready("small", 6 * GB, requests=64)
    device.leads = True
    await device.sharing.look()
    (told,) = device.backend.told
    assert told.keys() == {"large"}, "the small one hears of it later"
    device.give("large", told["large"])
    await device.settled()
    assert device.backend.told[1].keys() == {"small"}
    assert told["large"] + device.backend.told[1]["small"] <= BUDGET - 2 * (WEIGHTS + CUDA_CONTEXT_BYTES)
    device.give("small", device.backend.told[1]["small"])
    await device.settled()
    assert len(device.backend.told) == 2, "now everybody has its part"


async def test_more_that_could_not_be_taken_is_told_again_only_when_something_has_changed(device: Device) -> None:
    device.ready("one", 25 * GB)
    device.ready("two", 25 * GB)
    device.has(msgspec.structs.replace(device.fleet.replicas["two"], state=ReplicaState.ENDED), 0)
    await device.settled()
    told = len(device.backend.told)
    assert told and device.backend.told[-1].keys() == {"one"}
    await device.sharing.look()
    await device.sharing.look()
    assert len(device.backend.told) == told, "somebody who is not ours has the rest"
    device.ready("three", 9 * GB, requests=2)
    device.has(msgspec.structs.replace(device.fleet.replicas["three"], state=ReplicaState.ENDED), 0)
    await device.settled()
    assert len(device.backend.told) > told


async def test_an_agent_out_of_reach_holds_up_no_start_for_good(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.kv_sharing.ROOM_S", 0.01)
    device.ready("one", 60 * GB)
    device.backend.deaf = True
    device.start("two")
    await asyncio.wait_for(device.backend.any_started.wait(), 10)


async def test_only_the_leader_divides(device: Device) -> None:
    device.leads = False
    device.ready("one", 25 * GB)
    await device.sharing.look()
    await device.settled()
    assert device.backend.told == []
