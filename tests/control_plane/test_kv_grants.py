"""KV memory of replicas that share a device, from their models' shapes, and where a replica starts with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from autoscaler.device_sharing import HEADROOM
from autoscaler.placement import Placement
from control_plane.backends.base import SlotClass
from control_plane.kv_grants import CUDA_CONTEXT_BYTES, Holder, KvGrants, KvShape
from control_plane.placing import Placing
from function_runtime.protocol import (
    DeviceState,
    EngineOptions,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    SlotState,
)
from tests.control_plane.gateway.conftest import checkpoint

__all__ = ["checkpoint"]

GB = 10**9
VALUES = 4096
"""Per token: 8 KB in half precision."""


def spec(name: str = "rep", device: str = "cuda", **options: Any) -> ReplicaSpec:
    made = EngineOptions(device=device, max_requests=options.pop("max_requests", 32), **options)
    return ReplicaSpec(name, "fn", 1, "default", "", "model", made)


def grants(max_context: int = 32_768) -> KvGrants:
    made = KvGrants()
    made._shapes["model"] = KvShape(VALUES, max_context)
    return made


def test_a_replica_needs_two_long_requests_and_wants_its_places_with_typical_ones() -> None:
    least, wanted = grants().needs(spec()) or (0, 0)
    assert least == 2 * (32_768 // 16 + 1) * 16 * VALUES * 2
    assert wanted == max(least, 32 * (1024 // 16 + 1) * 16 * VALUES * 2)
    longer = grants().needs(spec(), tokens=16_384)
    assert longer is not None and longer[1] == 32 * (16_384 // 16 + 1) * 16 * VALUES * 2
    assert KvGrants().needs(spec()) is None, "nothing is known of its model yet"


def test_one_alone_on_a_gpu_gets_what_it_wants_and_leaves_the_rest_to_others() -> None:
    book, alone = grants(), Holder(spec(), 2 * GB)
    least, wanted = book.needs(alone.spec) or (0, 0)
    assert book.grant(alone, [], 80 * GB) == wanted
    assert book.grant(alone, [], 2 * GB + CUDA_CONTEXT_BYTES + wanted // 2) == least, (
        "what does not fit is not promised"
    )


def test_the_next_gets_its_part_of_what_the_first_leaves() -> None:
    book = grants()
    first = Holder(spec("one", kv_bytes=20 * GB), 10 * GB)
    second = Holder(spec("two", max_requests=4096), 10 * GB, tokens=16_384)
    given = book.grant(second, [first], 80 * GB)
    left = int(80 * GB * (1 - HEADROOM)) - 2 * (10 * GB + CUDA_CONTEXT_BYTES) - 20 * GB
    assert given == pytest.approx(left, rel=1e-6)


def test_what_a_spec_says_itself_is_kept_and_a_cpu_is_its_engines_until_it_is_shared() -> None:
    book = grants()
    assert book.grant(Holder(spec(kv_bytes=7), GB), [], 80 * GB) == 7
    assert book.grant(Holder(spec(device="cpu"), GB), [], 80 * GB) == 0
    assert book.grant(Holder(spec(device="cpu"), GB), [Holder(spec("other", "cpu"), GB)], 80 * GB) > 0


def test_who_has_more_than_its_part_gives_up_what_the_next_one_needs_and_no_more() -> None:
    book = grants()
    first = Holder(spec("one", max_requests=4096), 10 * GB, tokens=16_384, has_bytes=60 * GB, yields=True)
    second = Holder(spec("two", max_requests=4096), 10 * GB, tokens=16_384)
    least, _ = book.needs(second.spec) or (0, 0)
    together = int(80 * GB * (1 - HEADROOM)) - 2 * (10 * GB + CUDA_CONTEXT_BYTES)
    given = book.grant(second, [first], 80 * GB)
    assert given == pytest.approx(together / 2, rel=1e-3), "alike, they get the same"
    started = replace(second, has_bytes=given)
    shares = book.shares([first, started], 80 * GB)
    assert shares.keys() == {"one"}, "who is starting has what it was granted"
    assert least < shares["one"] <= together - given
    small = Holder(spec("two", kv_bytes=GB), 2 * GB)
    assert book.shares([first, small], 80 * GB)["one"] >= 60 * GB, "there is room beside it"


def test_what_cannot_be_changed_or_is_not_known_is_left_alone() -> None:
    book = grants()
    fixed = Holder(spec("fixed", kv_bytes=30 * GB), 10 * GB)
    yields = Holder(spec("yields", max_requests=4096), 10 * GB, tokens=16_384, has_bytes=2 * GB, yields=True)
    unknown = Holder(msgspec.structs.replace(spec("unknown"), identity="?"), GB, has_bytes=GB, yields=True)
    shares = book.shares([fixed, yields, unknown], 80 * GB)
    assert shares.keys() == {"yields"}
    left = int(80 * GB * (1 - HEADROOM)) - 30 * GB - GB - 21 * GB - 3 * CUDA_CONTEXT_BYTES
    assert shares["yields"] == pytest.approx(left, rel=1e-6)
    assert book.shares([fixed, yields], 20 * GB) == {}, "what nobody can explain is nobody's to divide"


# --- where it starts ---


class Site:
    """A slot with two GPUs, the first of them with a replica."""

    def __init__(self) -> None:
        running = ReplicaStatus("old", "fn", 1, ReplicaState.READY, spec("old", "cuda:0", kv_bytes=50 * GB))
        devices = (
            DeviceState("cpu", 0, 64 * GB, 32 * GB),
            DeviceState("cuda", 0, 80 * GB, 12 * GB),
            DeviceState("cuda", 1, 80 * GB, 79 * GB),
        )
        state = SlotState("s", 1, "i", True, 1, 1, 0, 0, devices=devices)
        self.slots = {"s": state}
        self.there = [running]
        backend: Any = SimpleNamespace(
            classes=(SlotClass(),), leaving=frozenset(), class_of=lambda slot_id: "", free_bytes=lambda slot_id: GB
        )
        fleet: Any = self
        self.placing = Placing(fleet, backend)
        self.placing.grants = grants()
        self.placing.measured.weights_bytes["model"] = 10 * GB
        self.placing.changed("s")

    def on(self, slot_id: str) -> list[ReplicaStatus]:
        return self.there

    def count_of(self, key: Any) -> int:
        return len(self.there)

    def is_closed(self, slot_id: str) -> bool:
        return False

    def place(self, wanted: ReplicaSpec) -> tuple[Placement | None, ReplicaSpec]:
        placement = self.placing.place(self.placing.work(wanted), 1, wanted.options.device)
        return placement, wanted if placement is None else self.placing.fitted(wanted, placement)


def test_a_replica_starts_on_the_gpu_that_has_room_with_the_kv_it_is_granted() -> None:
    placement, started = Site().place(spec("new"))
    assert placement is not None and placement.devices == (1,)
    assert started.options.device == "cuda:1"
    assert started.options.kv_bytes == (grants().needs(spec()) or (0, 0))[1]


def test_what_is_only_just_starting_has_its_memory_already() -> None:
    site = Site()
    large = spec("starting", "cuda:1", kv_bytes=60 * GB)
    site.there.append(ReplicaStatus("starting", "fn", 1, ReplicaState.STARTING, large))
    placement, _ = site.place(spec("new", kv_bytes=20 * GB))
    assert placement is None, "79 GB are free, 71 of them promised"


def test_a_function_on_the_cpu_is_placed_by_the_machines_memory() -> None:
    site = Site()
    placement, started = site.place(spec("new", "cpu"))
    assert placement is not None and placement.devices == (0,)
    assert (started.options.device, started.options.kv_bytes) == ("cpu", 0)


def test_a_slot_that_tells_of_no_devices_has_one() -> None:
    site = Site()
    site.slots["s"] = msgspec.structs.replace(site.slots["s"], devices=())
    placement, started = site.place(spec("new", "cuda", kv_bytes=1))
    assert placement is None, "a gigabyte is free"
    placement, started = site.place(spec("new", "cpu"))
    assert placement is not None and started == spec("new", "cpu")


def test_room_that_others_can_give_up_is_room() -> None:
    site = Site()
    (old,) = site.there
    site.there = [msgspec.structs.replace(old, kv_bytes=50 * GB)]
    other = ReplicaStatus("busy", "fn", 1, ReplicaState.READY, spec("busy", "cuda:1", kv_bytes=78 * GB))
    site.there.append(other)
    site.slots["s"] = msgspec.structs.replace(
        site.slots["s"], devices=(*site.slots["s"].devices[:2], DeviceState("cuda", 1, 80 * GB, GB))
    )
    site.placing.grants._shapes["model"] = KvShape(16 * VALUES, 32_768)
    placement, started = site.place(spec("new"))
    assert placement is not None and placement.devices == (0,) and started.options.device == "cuda:0"
    site.placing.own_kv = lambda key: True
    site.placing.changed("s")
    assert site.place(spec("new"))[0] is None, "its own spec says what it has"


async def test_shapes_are_read_from_manifests_beside_the_loop(tmp_path: Path, checkpoint: tuple[str, str, str]) -> None:
    book = KvGrants()
    book.learn("model", checkpoint[2])
    book.learn("broken", str(tmp_path / "no manifest"))
    for task in list(book._reading.values()):
        await task
    assert book.needs(spec()) is not None
    assert book.needs(msgspec.structs.replace(spec(), identity="broken")) is None
    await book.close()
