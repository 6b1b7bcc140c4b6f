"""The second level: slots that are asked for, held, given back, and that vanish with what ran on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from control_plane import slot_scaling
from control_plane.backends.base import SlotClass, SlotListener, SlotRefused, SlotUnavailable
from control_plane.placing import Unplaced
from control_plane.settings import Settings
from function_runtime.protocol import EngineOptions, Peer, ReplicaSpec, ReplicaState, ReplicaStatus
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until, until_read
from tests.control_plane.gateway.fakes import Behaviour, FakeReplica, FakeSlot, token_text


class FakeSlots:
    """A backend whose slots come and go."""

    def __init__(self, behaviour: Behaviour, least: int = 0, most: int = 2, most_replicas: int = 1) -> None:
        self.behaviour = behaviour
        self.classes: tuple[SlotClass, ...] = (SlotClass("", least, most, 1, most_replicas),)
        self.slots: dict[str, FakeSlot] = {}
        self.comes_s = 0.0
        self.asked: list[int] = []
        self.given_back: list[str] = []
        self.refuses = False
        self._listener: SlotListener | None = None
        self._coming: dict[str, float] = {}
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def slot_ids(self) -> tuple[str, ...]:
        return (*self.slots, *self._coming)

    def class_of(self, slot_id: str) -> str:
        return ""

    @property
    def coming(self) -> Mapping[str, float]:
        return {slot_id: time.monotonic() - since_s for slot_id, since_s in self._coming.items()}

    @property
    def leaving(self) -> frozenset[str]:
        return frozenset()

    async def start(self, listener: SlotListener) -> None:
        self._listener = listener
        for slot in self.slots.values():
            await slot.start(listener)
        await self.add_slots("", self.classes[0].least - len(self.slots))

    async def add_slots(self, class_name: str, count: int) -> int:
        if self.refuses:
            raise SlotUnavailable("the cloud is sold out")
        await asyncio.sleep(0.005)  # as one that has to ask somebody
        count = min(count, self.classes[0].most - len(self.slots) - len(self._coming))
        self.asked += [count] if count > 0 else []
        for _ in range(count):
            slot_id = f"slot-{self._number}"
            self._number += 1
            self._coming[slot_id] = time.monotonic()
            assert self._listener is not None
            self._listener.slot_lost(slot_id, "it is coming up", agent_gone=True)
            self._tasks.append(asyncio.get_running_loop().create_task(self._come(slot_id)))
        return max(count, 0)

    async def _come(self, slot_id: str) -> None:
        await asyncio.sleep(self.comes_s)
        del self._coming[slot_id]
        slot = self.slots[slot_id] = FakeSlot(self.behaviour, slot_id)
        assert self._listener is not None
        await slot.start(self._listener)

    async def remove_slot(self, slot_id: str) -> None:
        slot = self.slots[slot_id]
        if slot.living or any(s.state not in (ReplicaState.ENDED, ReplicaState.FAILED) for s in slot.statuses.values()):
            raise SlotRefused("slot_busy", "a replica is here")
        del self.slots[slot_id]
        self.given_back.append(slot_id)
        await slot.vanish()

    async def look(self) -> None:
        return

    async def close(self, *, end_agents: bool, grace_s: float) -> None:
        for slot in self.slots.values():
            slot.leave(0)

    async def shut(self) -> None:
        for task in self._tasks:
            task.cancel()
        for slot in self.slots.values():
            await slot.shut()

    def free_bytes(self, slot_id: str) -> int:
        return 1 << 40

    async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
        if slot_id not in self.slots:
            raise SlotUnavailable("there is no such slot")
        return await self.slots[slot_id].start_replica(slot_id, spec)

    async def end_replica(self, slot_id: str, replica_id: str, grace_s: float, reason: str) -> None:
        await self.slots[slot_id].end_replica(slot_id, replica_id, grace_s, reason)

    async def warm(self, slot_id: str, workers: int) -> None:
        return

    def peers(self, slot_ids: Sequence[str]) -> tuple[Peer, ...]:
        return ()

    async def warm_pool(self, slot_id: str, manifest_path: str, dtype: str, peers: Sequence[Peer] = ()) -> None:
        return

    async def evict_pool(self, slot_id: str, key: str) -> None:
        return

    async def forget_checkpoint(self, slot_id: str, identity: str) -> None:
        return

    async def expect_pool(self, slot_id: str, chances: Mapping[str, float], holds_s: float) -> None:
        return

    async def replica_log(self, slot_id: str, replica_id: str, tail_lines: int) -> str:
        return ""

    @property
    def living(self) -> list[FakeReplica]:
        return [replica for slot in self.slots.values() for replica in slot.living]


class City(Plane):
    slots: FakeSlots

    async def look(self) -> None:
        await self.context.slot_scaling.look()


@pytest.fixture
async def city(settings: Settings, slot: FakeSlot, checkpoint: tuple[str, str, str]) -> AsyncIterator[City]:
    made = City(settings, slot, checkpoint)
    made.slots = FakeSlots(slot.behaviour)
    made.backend = made.slots
    await made.start()
    yield made
    await made.stop()
    await made.slots.shut()


def answer_of(tokens: int) -> str:
    return "".join(token_text(7, 0, position) for position in range(tokens))


async def ask(city: City, **fields: Any) -> str:
    async with city.post(body(**fields)) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


async def test_a_request_that_finds_no_slot_gets_one_and_is_answered(city: City) -> None:
    await city.deploy()
    assert city.context.fleet.slots == {}
    assert await ask(city) == answer_of(5)
    assert city.slots.asked == [1], "one request asks once"
    async with city.get("/api/v1/slots") as response:
        told = await response.json()
    assert [each["reason"] for each in told["scaling"]] == ["no_room: 1 replicas with 1 devices find no room"]
    assert [slot["slot_id"] for slot in told["data"]] == ["slot-0"]


async def test_what_does_not_fit_on_the_slots_there_are_gets_more_up_to_the_bound(city: City) -> None:
    for name in ("fn", "other", "third"):
        await city.deploy(name)
    city.slots.behaviour.token_s = 0.05
    streams = [asyncio.ensure_future(ask(city, model=name, max_tokens=20)) for name in ("fn", "other", "third")]
    await until(lambda: len(city.slots.slots) == 2)
    await asyncio.gather(*streams[:2])
    # The third waits until an idle one has made room, since there may be no third slot.
    assert await streams[2] == answer_of(20)
    assert sum(city.slots.asked) == 2


async def test_another_slot_may_come_until_the_bound_a_refusal_or_one_that_finds_no_room(city: City) -> None:
    scaling = city.context.slot_scaling
    assert scaling.may_grow("") and not scaling.may_grow("of another class")
    scaling.is_stuck = lambda class_name: True
    assert not scaling.may_grow("")
    scaling.is_stuck = lambda class_name: False
    city.slots.refuses = True
    await city.deploy()
    asked = asyncio.ensure_future(ask(city))
    await until(lambda: bool(scaling._pause_until_s))
    assert scaling.may_grow(""), "once may have been a call that got lost"
    scaling._pause_until_s.clear()
    await city.look()
    assert not scaling.may_grow("")
    scaling._pause_until_s.clear()
    city.slots.refuses = False
    await city.look()
    await asked
    await city.look()
    assert scaling.may_grow("")
    await city.slots.add_slots("", 1)
    assert not scaling.may_grow("")


async def test_a_wish_from_before_a_slot_came_asks_for_no_second_one(city: City) -> None:
    await city.deploy()
    context = city.context
    await city.slots.add_slots("", 1)
    await until(lambda: "slot-0" in context.fleet.slots)
    work = context.fleet.placing.work(ReplicaSpec("rep-1", "fn", 1, "default", "", "", EngineOptions(engine="stub")))
    context.fleet.placing.unplaced["default", "fn"] = Unplaced(work, 1, time.monotonic() - 1, time.monotonic() - 1)
    await city.look()
    assert city.slots.asked == [1]


async def idle_slot(city: City) -> None:
    """One that has run something and does not any more."""
    await city.deploy(scaling={"keep_alive": 1})
    await ask(city)
    await city.look()
    assert city.slots.given_back == [], "it runs something"
    await until(lambda: not city.context.fleet.living())
    await city.look()
    assert city.slots.given_back == [], "it has only just become empty"


def time_passes(city: City, seconds: float) -> None:
    """For the slots, and for those who watch them."""
    scaling = city.context.slot_scaling
    assert scaling._led_since_s is not None
    scaling._led_since_s -= seconds
    for since in (scaling._empty_since_s, scaling._since_s):
        for slot_id in since:
            since[slot_id] -= seconds
    for peaks in scaling._peaks.values():
        peaks._steps = [(at_s - seconds, demand) for at_s, demand in peaks._steps]


async def test_a_slot_is_given_back_when_it_was_empty_for_what_getting_one_costs_and_not_before(city: City) -> None:
    await idle_slot(city)
    time_passes(city, 59.0)
    await city.look()
    assert city.slots.given_back == []
    time_passes(city, 20.0)
    await city.look()
    assert city.slots.given_back == ["slot-0"] and city.context.fleet.slots == {}
    assert await ask(city) == answer_of(5)


async def test_a_slot_that_turned_out_busy_stays(city: City) -> None:
    await idle_slot(city)
    spec = city.slots.slots["slot-0"].started[0]
    stranger = ReplicaStatus("rep-stranger", "fn", 1, ReplicaState.READY, spec)
    city.slots.slots["slot-0"].statuses["rep-stranger"] = stranger
    time_passes(city, 80.0)
    await city.look()
    assert city.slots.given_back == [] and "slot-0" in city.context.fleet.slots


async def test_what_is_expected_is_there_before_it_is_needed_and_is_not_given_back(city: City) -> None:
    scaling = city.context.slot_scaling
    scaling.expected = lambda class_name: ((time.monotonic(), 2.0),)
    await city.look()
    await until(lambda: len(city.context.fleet.slots) == 2)
    await city.look()
    time_passes(city, 1000.0)
    await city.look()
    assert city.slots.given_back == []
    scaling.expected = lambda class_name: ()
    await city.look()
    assert len(city.slots.given_back) == 2


async def test_slots_that_cannot_be_had_are_asked_for_again_later(city: City, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_scaling, "AGAIN_S", 0.0)
    city.slots.refuses = True
    await city.deploy()
    asking = asyncio.ensure_future(ask(city))
    await until(lambda: bool(city.context.fleet.placing.unplaced))
    await city.look()
    assert city.slots.slots == {}
    city.slots.refuses = False
    await city.look()
    assert await asking == answer_of(5)


async def test_only_the_leader_asks_for_slots(city: City) -> None:
    scaling = city.context.slot_scaling
    scaling._leads = lambda: False
    await city.deploy()
    asking = asyncio.ensure_future(ask(city))
    await until(lambda: bool(city.context.fleet.placing.unplaced))
    await city.look()
    assert city.slots.asked == []
    scaling._leads = lambda: True
    await city.look()
    assert await asking == answer_of(5)


async def test_a_slot_that_vanishes_takes_its_replicas_and_its_requests_go_on_elsewhere(city: City) -> None:
    """Its replicas are gone and closed in the books, its leases void, its requests placed again: no gap, no double."""
    city.slots.behaviour.token_s = 0.01
    await city.deploy()
    async with city.post(body(stream=True, max_tokens=40)) as response:
        stream = Stream(response)
        events = []
        async for event in stream.events():
            events.append(event)
            if len(events) == 10:
                gone = city.slots.slots.pop("slot-0")
                first = gone.started[0].replica_id
                await gone.vanish()
    assert text_of(events) == answer_of(40)
    places = [place for place, event in events if event != "[DONE]" and event.get("choices")]
    assert places == list(range(1, 41))
    fleet = city.context.fleet
    assert "slot-0" not in fleet.slots and fleet.on("slot-0") == []
    status = fleet.replicas[first]
    assert (status.state, status.error and status.error.code) == (ReplicaState.FAILED, "agent_gone")
    assert list(city.slots.slots) == ["slot-1"] and city.slots.slots["slot-1"].started
    assert fleet.in_sight, "what is gone holds nothing up"

    async def closed() -> bool:
        rows = await city.context.db.read(
            lambda c: c.execute(
                "SELECT closed_us FROM replica_accounts WHERE replica_id = :id", {"id": first}
            ).fetchall()
        )
        return bool(rows) and rows[0][0] is not None

    await until_read(closed)


async def test_a_slot_that_vanishes_while_it_starts_something_is_replaced_at_once(city: City) -> None:
    city.slots.behaviour.never_ready = True
    await city.deploy()
    asking = asyncio.ensure_future(ask(city))
    await until(lambda: "slot-0" in city.slots.slots and city.slots.slots["slot-0"].started)
    city.slots.behaviour.never_ready = False
    await city.slots.slots.pop("slot-0").vanish()
    assert await asking == answer_of(5)


# --- moves ---


def idle_for(city: City, seconds: float) -> None:
    for replica_id in city.context.moves._idle_since_s:
        city.context.moves._idle_since_s[replica_id] -= seconds


async def apart(city: City) -> None:
    """Two functions that are kept, each on a slot of its own though there is room for both on one."""
    city.slots.classes = (SlotClass("", 0, 2, 1, 1),)
    for name in ("fn", "other"):
        await city.deploy(name, scaling={"min_replicas": 1})
    await until(lambda: len(city.slots.living) == 2)
    await until(lambda: all(s.state is ReplicaState.READY for s in city.context.fleet.living()))
    assert [len(slot.living) for slot in city.slots.slots.values()] == [1, 1]
    city.slots.classes = (SlotClass("", 0, 2, 1, 2),)
    city.context.fleet.placing._made_s = float("-inf")


async def test_idle_replicas_that_are_kept_are_moved_together_and_the_slot_they_leave_is_given_back(city: City) -> None:
    await apart(city)
    moves, fleet = city.context.moves, city.context.fleet
    await moves.look()
    assert len(fleet.living()) == 2, "they may only just have been used"
    idle_for(city, 10.0)
    await moves.look()
    await until(lambda: sorted(len(slot.living) for slot in city.slots.slots.values()) == [0, 2])
    await until(lambda: len(fleet.living()) == 2)
    decisions = await city.context.decisions._query("kind", "move", 10)
    assert len(decisions) == 1 and decisions[0].reason == "1 idle replicas elsewhere empty slot-0"
    first = city.slots.slots["slot-0"].started[0].replica_id
    assert [reason.split(":")[0] for known, reason in city.slots.slots["slot-0"].ended if known == first] == ["moved"]
    await city.look()
    time_passes(city, 80.0)
    await city.look()
    assert city.slots.given_back == ["slot-0"]
    assert await ask(city) == await ask(city, model="other") == answer_of(5)


async def test_what_works_is_not_moved(city: City) -> None:
    await apart(city)
    city.slots.behaviour.token_s = 0.02
    streams = [asyncio.ensure_future(ask(city, model=name, max_tokens=20)) for name in ("fn", "other")]
    await until(lambda: sum(lane.in_flight for lane in city.context.dispatcher.lanes) == 2)
    moves = city.context.moves
    await moves.look()
    idle_for(city, 10.0)
    await moves.look()
    assert not moves._under_way
    assert await asyncio.gather(*streams) == [answer_of(20)] * 2
