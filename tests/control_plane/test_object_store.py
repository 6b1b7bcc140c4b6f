"""The gateway's view of the object store: what a check makes of it, who is told, and whom it refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from control_plane.errors import ObjectStoreUnavailable
from control_plane.object_store import AGAIN_S, AGAIN_UNUSABLE_S, StoreState, StoreWatch
from model_loader.errors import OutOfSpace, StoreProblem, StoreRefused
from model_loader.objects import DirectoryStore, ObjectStore
from tests.support.faulty_store import FaultyStore


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyStore:
    return FaultyStore(DirectoryStore(tmp_path / "objects"), sleep=lambda _: None)


@pytest.fixture
def watch(faulty: FaultyStore) -> StoreWatch:
    return StoreWatch(faulty.uri, lambda uri: faulty)


async def test_before_the_first_check_nobody_has_to_wait(watch: StoreWatch) -> None:
    assert watch.state is StoreState.CHECKING and watch.usable and watch.use is None
    watch.require("f")


async def test_a_store_that_works_is_usable(watch: StoreWatch) -> None:
    await watch.check()
    assert watch.state is StoreState.USABLE
    assert watch.body()["reason"] is None
    assert watch.use is not None and watch.use.kinds["put"].requests == 1


async def test_a_store_that_is_away_refuses_only_who_needs_it_with_its_own_words(
    watch: StoreWatch, faulty: FaultyStore
) -> None:
    faulty.fail("reset")
    await watch.check()
    assert watch.state is StoreState.UNUSABLE and watch.problem == StoreProblem.UNREACHABLE
    with pytest.raises(ObjectStoreUnavailable, match=r"f needs the object store.*Connection reset by peer") as refused:
        watch.require("f")
    assert refused.value.http_status == 503 and refused.value.headers()["Retry-After"] == "15"
    faulty.heal()
    await watch.check()
    assert watch.state is StoreState.USABLE
    watch.require("f")


async def test_a_store_that_cannot_even_be_opened_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    watch = StoreWatch((tmp_path / "file" / "objects").as_uri())
    await watch.check()
    assert watch.problem == StoreProblem.UNWRITABLE and "cannot write" in watch.reason
    (tmp_path / "file").unlink()
    await watch.check()
    assert watch.state is StoreState.USABLE


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (StoreRefused("no", StoreProblem.WRONG_REGION), "wrong_region"),
        (OutOfSpace("no space left"), "full"),
        (OSError("broken"), "other"),
    ],
)
async def test_each_kind_of_trouble_has_its_name(tmp_path: Path, error: Exception, problem: str) -> None:
    def fails(uri: str) -> ObjectStore:
        raise error

    watch = StoreWatch("file:///x", fails)
    await watch.check()
    assert (watch.problem, watch.reason) == (problem, str(error))


async def test_changes_are_told_once_and_a_store_in_trouble_is_looked_at_more_often(
    watch: StoreWatch, faulty: FaultyStore
) -> None:
    told: list[str] = []
    pauses: list[float] = []
    watch.on_change = lambda changed: told.append(changed.state.value)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            faulty.fail("503")
        if len(pauses) == 4:
            faulty.heal()
        if len(pauses) == 5:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await watch.watch(sleep)
    assert told == ["usable", "unusable", "usable"]
    assert pauses == [AGAIN_S, AGAIN_S, AGAIN_UNUSABLE_S, AGAIN_UNUSABLE_S, AGAIN_S]


async def test_a_fault_that_nobody_foresaw_is_told_and_does_not_end_the_watch() -> None:
    pauses: list[float] = []

    def fails(uri: str) -> ObjectStore:
        raise RuntimeError("a library's own")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise asyncio.CancelledError

    watch = StoreWatch("file:///x", fails)
    with pytest.raises(asyncio.CancelledError):
        await watch.watch(sleep)
    assert (watch.state, watch.problem) == (StoreState.UNUSABLE, "other")
    assert watch.reason == "RuntimeError: a library's own" and pauses == [AGAIN_UNUSABLE_S] * 2


async def test_who_needs_the_store_waits_for_the_first_look_at_it(watch: StoreWatch, faulty: FaultyStore) -> None:
    faulty.fail("reset")
    checking = asyncio.ensure_future(watch.watch())
    await asyncio.sleep(0)
    assert watch.state is StoreState.CHECKING
    await watch.first_look()
    with pytest.raises(ObjectStoreUnavailable):
        watch.require("f")
    checking.cancel()
