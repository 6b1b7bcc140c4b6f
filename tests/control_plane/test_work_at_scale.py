"""Work that is done now and then, counted: once for all classes, once while nothing changes, and of those concerned."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from autoscaler import homes as autoscaler_homes
from autoscaler.homes import Device, Resident, SlotHome
from autoscaler.placement import Placement
from autoscaler.work import Work
from control_plane import moving, placing, slot_pools, upkeep
from control_plane.backends.base import SlotClass
from control_plane.backends.kubernetes.kinds import Kinds
from control_plane.fleet import KEEP_ENDED, Fleet
from control_plane.functions import ImportState
from control_plane.importing import PREPARED_FUNCTIONS, Importing
from control_plane.moving import Moves
from control_plane.placing import CPU, Placing
from control_plane.pod_spec import PodFields
from control_plane.settings import Settings
from control_plane.slot_pools import SlotPools
from control_plane.slot_scaling import SlotScaling
from control_plane.upkeep import IDLE_REPORT_S, REPORTED_AT_ONCE, Upkeep
from function_runtime.protocol import (
    EngineOptions,
    PoolEntry,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    ReplicaTime,
    SlotState,
)
from tests.control_plane.backends.kubernetes.fake_cluster import slot_pool
from tests.control_plane.gateway.fakes import FakeSlot


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def replica(replica_id: str, state: ReplicaState = ReplicaState.READY, worked_us: int = 0) -> ReplicaStatus:
    spec = ReplicaSpec(replica_id, "f", 1, "default", "", "", EngineOptions(engine="stub"))
    return ReplicaStatus(replica_id, "f", 1, state, spec, pid=7, time=ReplicaTime(9, 1, worked_us))


def state_of(slot_id: str, *identities: str, used_bytes: int = 0) -> SlotState:
    pool = tuple(PoolEntry(each, each, "ready", 1) for each in identities)
    return SlotState(slot_id, 1, "life", True, 0, 0, 1000, used_bytes, pool=pool)


# --- the fleet ---


class Books:
    async def report_replica(self, status: ReplicaStatus) -> None:
        return

    async def close_replica(self, status: ReplicaStatus) -> None:
        return


async def test_that_time_has_passed_for_a_replica_is_told_to_nobody_who_watches_its_state() -> None:
    fleet, moved, all_news = Fleet(FakeSlot(), Books()), list[str](), list[str]()
    fleet.watchers.append(lambda status, before: moved.append(status.state))
    fleet.on_replica = lambda status, before: all_news.append(status.state)
    fleet.replica_changed("slot-0", replica("r", ReplicaState.STARTING))
    for worked_us in (0, 0, 5):
        fleet.replica_changed("slot-0", replica("r", worked_us=worked_us))
    fleet.replica_changed("slot-0", replica("r", ReplicaState.ENDED))
    assert moved == [ReplicaState.STARTING, ReplicaState.READY, ReplicaState.ENDED]
    assert len(all_news) == 5


async def test_of_those_that_ended_the_last_are_remembered_and_all_that_live() -> None:
    fleet = Fleet(FakeSlot(), Books())
    for number in range(KEEP_ENDED + 10):
        fleet.replica_changed("slot-0", replica(f"r-{number}"))
    for number in range(KEEP_ENDED + 5):
        fleet.replica_changed("slot-0", replica(f"r-{number}", ReplicaState.ENDED))
    assert len(fleet.living()) == fleet.count_on("slot-0") == 5
    assert "r-4" not in fleet.replicas and "r-5" in fleet.replicas
    assert len(fleet.replicas) == KEEP_ENDED + 5


async def test_a_slot_is_asked_for_a_start_before_its_function_is_looked_at_again() -> None:
    """Or who is begun first waits for the decisions about all the others."""
    order = list[str]()

    class Slot(FakeSlot):
        async def start_replica(self, slot_id: str, spec: ReplicaSpec) -> ReplicaStatus:
            order.append("asked")
            return await super().start_replica(slot_id, spec)

    slot = Slot()
    fleet, loop = Fleet(slot, Books()), asyncio.get_running_loop()
    await fleet.start()
    fleet.on_replica = lambda status, before: loop.call_soon(order.append, "looked at") and None
    spec = msgspec.structs.replace(replica("r").spec, replica_id="new")
    fleet.start_replica(Placement("slot-0", 0.1, ""), spec)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order[:2] == ["asked", "looked at"]
    await slot.shut()


def test_a_slot_that_was_looked_at_and_is_the_same_is_not_put_in_order_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def home(free_bytes: int) -> SlotHome:
        return SlotHome("s", (Device(free_bytes, (Resident("r"),)),), pool=frozenset({"m"}))

    homes, dropped = autoscaler_homes.Homes([home(5)]), list[str]()
    drop = homes.drop
    monkeypatch.setattr(homes, "drop", lambda slot_id: (dropped.append(slot_id), drop(slot_id)))
    homes.put(home(5))
    assert not dropped
    homes.put(home(4))
    assert dropped == ["s"] and [each.devices[0].free_bytes for each in homes] == [4]


# --- classes of slots ---


def test_the_slots_are_looked_at_once_however_many_classes_there_are() -> None:
    asked: Counter[str] = Counter()

    def class_of(slot_id: str) -> str:
        asked[slot_id] += 1
        return "c-0"

    classes = tuple(SlotClass(f"c-{number}", 0, 5) for number in range(50))
    backend: Any = SimpleNamespace(class_of=class_of, coming={"new": 1.0}, leaving=frozenset(), classes=classes)
    placing = SimpleNamespace(still_unplaced=lambda now_s: {})
    slots = {f"s-{number}": state_of(f"s-{number}") for number in range(10)}
    fleet: Any = SimpleNamespace(
        slots=slots, placing=placing, in_sight=True, count_on=lambda slot_id: 1, is_closed=lambda slot_id: False
    )
    scaling = SlotScaling(fleet, backend, SimpleNamespace(), 0.0, lambda: True)  # type: ignore[arg-type]
    scaling._note(classes, 1.0)
    demands = scaling._demands(classes, 1.0)
    assert max(asked.values()) <= 5, "for each purpose, not for each class"
    assert [len(demands[name].slots) for name in ("c-0", "c-1")] == [11, 0]
    asked.clear()
    waits = [scaling.room_wait_s(each.name) for each in classes for _ in range(3)]
    assert max(asked.values()) == 1 and waits[0] == 30.0 and waits[-1] == 2.0


async def test_who_finds_no_room_while_slots_are_looked_at_has_them_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet: Any = SimpleNamespace(placing=SimpleNamespace())
    scaling = SlotScaling(fleet, SimpleNamespace(), SimpleNamespace(), 0.0, lambda: True)  # type: ignore[arg-type]
    looks, going_on = list[int](), asyncio.Event()

    async def look() -> None:
        looks.append(len(looks))
        await going_on.wait()

    monkeypatch.setattr(scaling, "_look", look)
    fleet.placing.on_no_room()
    await asyncio.sleep(0)
    for _ in range(3):
        fleet.placing.on_no_room()
    assert looks == [0]
    going_on.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert looks == [0, 1], "once for all who came meanwhile"
    await scaling.close()


class Homes:
    """Placement over a hundred slots of two classes, none of which has room, and whose homes it looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(placing, "time", self.clock)
        slots = {f"{kind}-{number}": state_of(f"{kind}-{number}") for kind in "ab" for number in range(50)}
        fleet: Any = SimpleNamespace(
            slots=slots,
            on=lambda slot_id: [replica(f"r-{slot_id}")],
            count_of=lambda key: 1,
            is_closed=lambda slot_id: True,
        )
        classes = tuple(SlotClass(kind, 0, 50, 1, 1) for kind in "ab")
        backend: Any = SimpleNamespace(
            classes=classes,
            leaving=frozenset(),
            class_of=lambda slot_id: slot_id[0],
            free_bytes=lambda slot_id: 1 << 30,
        )
        self.placing = Placing(fleet, backend)
        self.looked: Counter[str] = Counter()
        home = self.placing._home

        def looked(state: SlotState, slot_id: str, device_kind: str, *given: Any, **named: Any) -> Any:
            self.looked[slot_id] += device_kind == CPU
            return home(state, slot_id, device_kind, *given, **named)

        monkeypatch.setattr(self.placing, "_home", looked)

    def place(self, kind: str) -> set[str]:
        """Which slots are looked at for somebody who finds no room."""
        self.looked.clear()
        assert self.placing.place(Work(function="f", kind=kind)) is None
        assert max(self.looked.values(), default=0) <= 1
        return set(self.looked)


async def test_who_finds_no_room_has_the_slots_of_its_class_looked_at_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    homes = Homes(monkeypatch)
    homes.placing.homes(homes.clock.now_s)
    homes.clock.now_s += 1.0
    assert homes.place("own") == set(), "none of its class is there"
    assert homes.place("a") == {f"a-{number}" for number in range(50)}
    assert homes.place("a") == set(), "looked at so lately"
    homes.clock.now_s += 1.0
    assert homes.place("a") == {f"a-{number}" for number in range(50)}


async def test_slots_are_looked_at_in_passing_so_that_nobody_waits_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    homes = Homes(monkeypatch)
    homes.placing.homes(homes.clock.now_s)
    busy = list[str]()
    homes.placing.in_flight = lambda replica_id: int(replica_id in busy)

    async def in_a_round() -> set[str]:
        homes.looked.clear()
        for _ in range(round(placing.ROUND_S / placing.FRESHEN_S)):
            homes.clock.now_s += placing.FRESHEN_S
            before = homes.looked.total()
            await homes.placing.freshen()
            assert homes.looked.total() - before <= 2 * placing.FRESHENED_AT_ONCE, "a few at a time"
        return set(homes.looked)

    assert len(await in_a_round()) == 100
    assert await in_a_round() == set(), "nothing has moved"
    busy.append("r-a-3")
    assert await in_a_round() == {"a-3"}
    homes.placing.changed("a-3")
    homes.placing.homes(homes.clock.now_s)
    busy.clear()
    assert await in_a_round() == {"a-3"}, "as it was before, and not as it was when it was looked at"
    homes.placing.chances = {"m": 0.5}
    assert len(await in_a_round()) == 100
    homes.placing.chances = {"m": 0.5}
    assert await in_a_round() == set(), "they are the same"
    homes.placing.specs += 1
    assert len(await in_a_round()) == 100
    for _ in range(80):
        homes.clock.now_s += placing.FRESHEN_S
        await homes.placing.freshen()
        assert homes.place("own") == set(), "never so old that all would have to be looked at"


def test_a_class_is_there_for_as_long_as_a_function_needs_it() -> None:
    kinds = Kinds("rel", "image", "default")
    kinds.pool_changed("default", {**slot_pool(), "metadata": {"name": "default", "uid": "u", "generation": 1}})
    (own,) = kinds.all
    fields = PodFields(trustDomain="team")
    for name in ("one", "two"):
        kinds.function_changed(("default", name), fields)
    kinds.function_changed(("default", "plain"), None)
    assert len(kinds.all) == 2 and kinds.of(("default", "one")) == kinds.of(("default", "two")) != own
    kinds.function_gone(("default", "one"))
    assert len(kinds.all) == 2
    kinds.function_changed(("default", "two"), None)
    kinds.function_gone(("default", "plain"))
    assert list(kinds.all) == [own] == [kinds.of(("default", "two"))]


def test_a_change_of_one_function_is_no_look_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, asked = Kinds("rel", "image", "default"), 0
    kinds.pool_changed("default", {**slot_pool(), "metadata": {"name": "default", "uid": "u", "generation": 1}})
    kind = kinds._kind

    def counted(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        return kind(*given)

    monkeypatch.setattr(kinds, "_kind", counted)
    for number in range(30):
        kinds.function_changed(("default", f"f-{number}"), None)
    assert asked == 30


# --- what is done now and then ---


async def test_a_fleet_at_rest_is_reported_by_the_minute_and_what_works_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, reported = Clock(), list[list[str]]()
    monkeypatch.setattr(upkeep, "time", clock)

    class Ledger:
        async def report_replicas(self, statuses: list[ReplicaStatus]) -> None:
            reported.append([status.replica_id for status in statuses])

    living = [replica(f"r-{number}") for number in range(REPORTED_AT_ONCE + 5)]
    context: Any = SimpleNamespace(
        gateways=SimpleNamespace(leads=True), fleet=SimpleNamespace(living=lambda: living), ledger=Ledger()
    )
    keeping = Upkeep(context)
    await keeping._report()
    assert [len(batch) for batch in reported] == [REPORTED_AT_ONCE, 5]
    reported.clear()
    clock.now_s += 15.0
    living[3] = replica("r-3", worked_us=100)
    await keeping._report()
    assert reported == [["r-3"]]
    reported.clear()
    clock.now_s += IDLE_REPORT_S - 15.0
    await keeping._report()
    assert sum(map(len, reported)) == len(living) - 1, "all but the one that was told of since"


async def test_moves_are_not_looked_for_while_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, looked, turns = Clock(), 0, 0, 0
    monkeypatch.setattr(moving, "time", clock)

    def in_flight(replica_id: str) -> int:
        nonlocal looked
        looked += 1
        return int(turns == 2 and replica_id == "r-0")

    def work(spec: ReplicaSpec) -> Any:
        nonlocal asked
        asked += 1
        return SimpleNamespace(devices=1)

    living = [replica(f"r-{number}") for number in range(10)]
    placing = SimpleNamespace(
        in_flight=in_flight, changes=1, turns=lambda: turns, unplaced={}, kept=lambda key: 99, work=work,
        homes=lambda now_s, kind: [], still_unplaced=lambda now_s: {},
    )  # fmt: skip
    fleet: Any = SimpleNamespace(
        living=lambda key=None: living, watchers=[], in_sight=True, placing=placing, successors={},
        replicas={status.replica_id: status for status in living}, slots={"s-0": None, "s-1": None},
    )  # fmt: skip
    backend: Any = SimpleNamespace(classes=(SlotClass("c", 1, 2),), class_of=lambda slot_id: "c")
    moves = Moves(fleet, backend, SimpleNamespace(), lambda: True, lambda *given: True)  # type: ignore[arg-type]
    await moves.look()
    for _ in range(5):
        clock.now_s += moving.IDLE_S
        await moves.look()
    assert asked == 10, "once, when they had been idle for long enough"
    assert looked == 10, "who is idle stays so while nothing runs anywhere else than before"
    placing.changes += 1
    await moves.look()
    assert asked == 20
    clock.now_s += moving.ANEW_S
    await moves.look()
    assert asked == 30, "memory moves without a word"
    del fleet.slots["s-1"]
    placing.changes += 1
    await moves.look()
    assert asked == 30, "no slot is to spare, and nobody lacks room: nothing could be won"
    turns = 2
    await moves.look()
    assert "r-0" not in moves._idle_since_s and len(moves._idle_since_s) == 9


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, float]]] = []
        self.loaded: list[str] = []

    async def expect_pool(self, slot_id: str, chances: dict[str, float], holds_s: float) -> None:
        self.calls.append((slot_id, chances))

    async def warm_pool(self, slot_id: str, manifest_path: str, dtype: str, peers: Any) -> None:
        self.loaded.append(slot_id)

    def peers(self, slot_ids: list[str]) -> tuple[()]:
        return ()

    def class_of(self, slot_id: str) -> str:
        return "big" if slot_id == "other" else "small"


def pools_of(told: Told, *states: SlotState) -> SlotPools:
    fleet: Any = SimpleNamespace(
        slots={state.slot_id: state for state in states},
        count_on=lambda slot_id: 0,
        is_terminating=lambda slot_id: False,
        placing=SimpleNamespace(kind_of=lambda key: "small", having=lambda identity: []),
    )
    return SlotPools(fleet, told)  # type: ignore[arg-type]


async def test_a_slot_is_told_the_chances_of_what_it_holds_and_not_again_while_that_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told = Clock(), Told()
    monkeypatch.setattr(slot_pools, "time", clock)
    pools = pools_of(told, state_of("one", "a", "b"), state_of("two"))
    for _ in range(3):
        await pools.expect({"a": 0.5, "c": 1.0}, 60.0)
        clock.now_s += 10.0
    assert told.calls == [("one", {"a": 0.5})]
    await pools.expect({"a": 0.5, "c": 1.0}, 60.0)
    assert len(told.calls) == 2, "half of its time is over"
    await pools.expect({"a": 0.9}, 60.0)
    assert told.calls[-1] == ("one", {"a": 0.9})


async def test_a_new_slot_prepares_a_few_of_its_class_and_no_other_slot_is_asked(tmp_path: Path) -> None:
    told = Told()
    pools = pools_of(told, state_of("new"), state_of("known"), state_of("full", used_bytes=950), state_of("other"))
    spec = SimpleNamespace(engine="native", dtype="auto")
    functions = [
        SimpleNamespace(
            updated_us=number,
            current=SimpleNamespace(
                tenant="default", function=f"f-{number}", state=ImportState.READY, spec=spec, manifest_path="/m",
                identity=f"{number}",
            ),
        )
        for number in range(100)
    ]  # fmt: skip
    store: Any = SimpleNamespace(list=lambda: functions, subscribe=lambda subscriber: None)
    fleet: Any = SimpleNamespace(pools=pools)
    importing = Importing(Settings(data_dir=tmp_path), store, fleet, SimpleNamespace())  # type: ignore[arg-type]
    for slot_id in ("new", "full", "other"):
        importing.slot_appeared(slot_id)
    await asyncio.gather(*importing._tasks)
    assert told.loaded == ["new"] * PREPARED_FUNCTIONS


def test_of_what_stands_still_only_the_time_is_told_and_not_every_second() -> None:
    from function_runtime.agent.watch import IDLE_EVERY, Watch

    watch, told = Watch(SimpleNamespace(), 60.0), Counter[str]()  # type: ignore[arg-type]

    def slot_of(*replica_ids: str) -> list[Any]:
        def of(replica_id: str) -> Any:
            found: Any = SimpleNamespace(id=replica_id, said=replica(replica_id, worked_us=5))
            found.time = found.said.time
            found.status = lambda: msgspec.structs.replace(found.said, time=found.time)
            found.changed = lambda: told.update([replica_id])
            return found

        return [of(replica_id) for replica_id in replica_ids]

    def look() -> dict[str, ReplicaTime]:
        for each in there:
            each.time = msgspec.structs.replace(each.time, held_us=each.time.held_us + 1)
        watch._looks += 1
        return watch._tell(there)

    there = slot_of("a", "b")
    times = [look() for _ in range(2 * IDLE_EVERY + 1)]
    assert told == {"a": 1, "b": 1}, "as a whole once"
    assert [number for number, each in enumerate(times) if each] == [IDLE_EVERY, 2 * IDLE_EVERY]
    assert times[-1] == {each.id: each.time for each in there}, "both in one event"
    there[0].time = ReplicaTime(99, 1, 6)
    there[1].said = msgspec.structs.replace(there[1].said, port=9)
    assert [look() for _ in range(IDLE_EVERY)][-1] == {} and told == {"a": 2, "b": 2}, "it has worked; it is another"


async def test_that_time_has_passed_reaches_the_books_and_nobody_else() -> None:
    fleet, news = Fleet(FakeSlot(), Books()), list[str]()
    for number in range(3):
        fleet.replica_changed("slot-0", replica(f"r-{number}"))
    fleet.replica_changed("slot-0", replica("r-2", ReplicaState.ENDED))
    changes = fleet.placing.changes
    fleet.on_replica = lambda status, before: news.append(status.replica_id)
    fleet.time_passed("slot-0", {each: ReplicaTime(77) for each in ("r-0", "r-2", "stranger")})
    fleet.time_passed("elsewhere", {"r-1": ReplicaTime(77)})
    assert [status.time.held_us for status in fleet.living()] == [77, 9]
    assert fleet.replicas["r-2"].time.held_us == 9, "what has ended stands still"
    assert not news and fleet.placing.changes == changes
