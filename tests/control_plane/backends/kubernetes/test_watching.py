"""One kind of object, kept as the cluster has it over cut watches, expired versions and faults."""

from __future__ import annotations

import asyncio
from typing import Any

from control_plane.backends.kubernetes.api import SLOT_POOLS, ApiError, ApiRefused, Object
from control_plane.backends.kubernetes.watching import MOST_PAUSE_S, Watching, pause_s
from tests.control_plane.backends.kubernetes.fake_cluster import FakeApi, slot_pool
from tests.control_plane.backends.town import until


class Told:
    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, bool]] = []
        self.pauses: list[float] = []

    def changed(self, name: str, before: Object | None, now: Object | None) -> None:
        self.seen.append((name, before is not None, now is not None))

    def sleep(self, seconds: float) -> asyncio.Future[None]:
        self.pauses.append(seconds)
        return asyncio.ensure_future(asyncio.sleep(0))


def watching(api: FakeApi, told: Told) -> Watching:
    return Watching(api, SLOT_POOLS, told.changed, chance=lambda: 1.0, sleep=told.sleep)


async def test_what_is_there_and_what_comes_is_told_once() -> None:
    api, told = FakeApi(), Told()
    api.put(SLOT_POOLS, slot_pool("one"))
    watch = watching(api, told)
    watch.start()
    await watch.synced.wait()
    api.put(SLOT_POOLS, slot_pool("two"))
    api.change(SLOT_POOLS, "two", status={"ready": 1})
    api.remove(SLOT_POOLS, "one")
    await until(lambda: len(told.seen) == 4)
    assert told.seen == [("one", False, True), ("two", False, True), ("two", True, True), ("one", True, False)]
    await watch.close()


async def test_a_watch_that_was_cut_goes_on_where_it_was_without_a_list() -> None:
    api, told = FakeApi(), Told()
    watch = watching(api, told)
    watch.start()
    await watch.synced.wait()
    for number in range(5):
        api.cut_watches()
        api.put(SLOT_POOLS, slot_pool(f"pool-{number}"))
        await until(lambda number=number: len(told.seen) == number + 1)
    assert watch.lists == 1 and watch.watches >= 5
    assert told.pauses == [] or max(told.pauses) == 0
    await watch.close()


async def test_after_410_it_lists_again_and_tells_the_differences_only() -> None:
    api, told = FakeApi(), Told()
    for name in ("stays", "changes", "goes"):
        api.put(SLOT_POOLS, slot_pool(name))
    watch = watching(api, told)
    watch.start()
    await until(lambda: len(told.seen) == 3)
    told.seen.clear()
    real = api.watch
    held = asyncio.Event()

    def stalled(*args: Any, **more: Any) -> Any:
        async def wait() -> Any:
            await held.wait()
            async for event in real(*args, **more):
                yield event

        return wait()

    api.watch = stalled  # type: ignore[method-assign]
    api.cut_watches()
    await asyncio.sleep(0)
    api.remove(SLOT_POOLS, "goes")
    api.change(SLOT_POOLS, "changes", spec={"most": 9})
    api.put(SLOT_POOLS, slot_pool("comes"))
    api.expire_versions()
    held.set()
    await until(lambda: len(told.seen) == 3)
    assert set(told.seen) == {("goes", True, False), ("changes", True, True), ("comes", False, True)}
    assert watch.lists == 2 and set(watch.objects) == {"stays", "changes", "comes"}
    await watch.close()


async def test_faults_pause_longer_each_time_and_say_what_is_wrong() -> None:
    api, told = FakeApi(), Told()
    api.faults += [("list slotpools", ApiError("no route to host"))] * 6
    api.faults += [("list slotpools", ApiRefused(429, "TooManyRequests", "later", 17.0))]
    watch = watching(api, told)
    watch.start()
    await watch.synced.wait()
    assert told.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 17.0]
    assert watch.problem == ""
    await watch.close()


def test_pauses_are_bounded_and_never_alike_for_all() -> None:
    assert pause_s(0, 1.0) == 0 and pause_s(99, 1.0) == MOST_PAUSE_S
    assert pause_s(3, 0.0) == pause_s(3, 1.0) / 2


async def test_a_write_of_ours_is_not_undone_by_a_watch_that_is_behind() -> None:
    api, told = FakeApi(), Told()
    api.put(SLOT_POOLS, slot_pool("one"))
    watch = watching(api, told)
    watch.start()
    await watch.synced.wait()
    older = await api.patch(SLOT_POOLS, "one", {"status": {"ready": 1}}, "status")
    newer = await api.patch(SLOT_POOLS, "one", {"status": {"ready": 2}}, "status")
    watch.written(newer)
    watch.written(older)
    assert watch.objects["one"]["status"] == {"ready": 2}
    await until(lambda: watch._version == newer["metadata"]["resourceVersion"])
    assert watch.objects["one"]["status"] == {"ready": 2} and len(told.seen) == 2
    await watch.close()
