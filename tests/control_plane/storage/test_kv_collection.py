"""Letting stored KV go: never what is named or may be read, always what nothing leads to, and through any death."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.shares import NO_QUOTA
from control_plane.database import Database
from control_plane.journal import Journal
from control_plane.kv_collection import LOST_AT_ONCE, Collected, KvCollection
from control_plane.kv_index import KvIndex, drop
from control_plane.kv_lifetimes import OVER_QUOTA, UNREACHABLE, WORTHLESS, Limits, StoredChunk, departures
from control_plane.quotas import KvQuota, Quotas
from control_plane.settings import KvSettings
from model_loader.errors import StoreError
from model_loader.objects import DirectoryStore
from tests.control_plane.storage.builders import done as outcome
from tests.control_plane.storage.builders import new_request
from tests.control_plane.storage.test_kv_index import IDENTITY, KEEPER, chains, run_of

HOUR_US = 3600 * 10**6
QUIET = KvSettings(quota_bytes=0, grace_s=300, storage_microusd_per_gib_month=0)


class Clock:
    def __init__(self) -> None:
        self.us = 10**15

    def __call__(self) -> int:
        return self.us

    def pass_s(self, seconds: float) -> None:
        self.us += round(seconds * 1e6)


class Yard:
    """A database, a store with objects in it, and who lets them go."""

    def __init__(self, database: Database, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(database.clock, "now_us", self.clock)
        self.database = database
        self.store = DirectoryStore(root)
        self.index = KvIndex(database)
        self.journal = Journal(database, "gw-1")
        self.settings = QUIET

    def collection(self) -> KvCollection:
        """As after a restart: nothing is remembered outside database and store."""
        return KvCollection(self.database, self.journal, self.settings, self.store.root.as_uri(), self.clock)

    def put(self, *packs: str) -> None:
        for pack in packs:
            self.store.put(pack, b"x" * 100)

    @property
    def stored(self) -> set[str]:
        return {info.key for info in self.store.list("kv/packs/")}

    async def states(self) -> dict[str, str]:
        rows = await self.database.read(lambda c: c.execute("SELECT pack, state FROM kv_packs").fetchall())
        return dict(rows)


@pytest.fixture
async def yard(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    yard = Yard(database, tmp_path / "objects", monkeypatch)
    return yard


async def running(journal: Journal, request_id: str) -> int:
    await journal.accept(new_request(id=request_id))
    return await journal.assign(request_id, "rep-1", "slot-0")


async def test_a_suffix_goes_with_its_prefix_and_its_pack_after_a_grace(yard: Yard) -> None:
    one, two = run_of("a", 2, pack="kv/packs/one"), run_of("a", 4, pack="kv/packs/two", begin=2)
    await yard.index.keep(KEEPER, IDENTITY, (*one, *two))
    yard.put("kv/packs/one", "kv/packs/two")
    await yard.index.quarantine("kv/packs/one", "default", "a byte is another one")
    done = await yard.collection().collect()
    assert (done.unreachable_chunks, done.deleted_packs) == (2, 0)
    assert await yard.states() == {"kv/packs/one": "quarantined", "kv/packs/two": "retiring"}
    assert yard.stored == {"kv/packs/one", "kv/packs/two"}  # whoever was told of it may still be reading
    yard.clock.pass_s(301)
    assert (await yard.collection().collect()).deleted_packs == 1
    assert yard.stored == {"kv/packs/one"}
    yard.clock.pass_s(yard.settings.quarantine_s + 1)
    await yard.collection().collect()
    assert yard.stored == set() and await yard.states() == {}


async def test_what_an_unfinished_request_names_stays_however_it_stands(yard: Yard) -> None:
    epoch = await running(yard.journal, "cmpl-1")
    chunks = run_of("a", 2, pack="kv/packs/one")
    await yard.index.keep(KEEPER, IDENTITY, chunks)
    yard.put("kv/packs/one")
    await yard.journal.seal_kv("cmpl-1", epoch, chunks)
    await yard.index.quarantine("kv/packs/one", "default", "doubt")
    for _ in range(4):
        yard.clock.pass_s(yard.settings.quarantine_s + 1)
        await yard.collection().collect()
        assert yard.stored == {"kv/packs/one"}
    assert await yard.index.known(IDENTITY, KEEPER.scope, chains("a", 2)) == ()


async def test_the_grace_begins_anew_when_a_retired_pack_is_named(yard: Yard) -> None:
    await yard.index.keep(KEEPER, IDENTITY, run_of("a", 1, pack="kv/packs/one", begin=0))
    await yard.index.keep(KEEPER, IDENTITY, run_of("a", 1, pack="kv/packs/two"), {"kv/packs/two": 100})
    yard.put("kv/packs/one", "kv/packs/two")
    epoch = await running(yard.journal, "cmpl-1")
    await yard.journal.seal_kv("cmpl-1", epoch, run_of("a", 1, pack="kv/packs/two"))
    yard.clock.pass_s(301)
    await yard.collection().collect()
    await yard.journal.requeue("cmpl-1", epoch, "test")
    await yard.journal.finish("cmpl-1", epoch, outcome(0))
    yard.clock.pass_s(200)
    await yard.collection().collect()
    assert "kv/packs/two" in yard.stored
    yard.clock.pass_s(301)
    await yard.collection().collect()
    assert yard.stored == {"kv/packs/one"}


async def test_a_retired_pack_that_is_kept_again_comes_back(yard: Yard) -> None:
    first, second = run_of("a", 1, pack="kv/packs/one"), run_of("a", 1, pack="kv/packs/two")
    await yard.index.keep(KEEPER, IDENTITY, first)
    await yard.index.keep(KEEPER, IDENTITY, second, {"kv/packs/two": 100})
    yard.put("kv/packs/one", "kv/packs/two")
    await yard.index.quarantine("kv/packs/one", "default", "doubt")
    assert await yard.index.keep(KEEPER, IDENTITY, second) == 1
    yard.clock.pass_s(301)
    await yard.collection().collect()
    assert await yard.index.known(IDENTITY, KEEPER.scope, chains("a", 1)) == second
    assert "kv/packs/two" in yard.stored


async def test_orphans_are_found_counted_and_given_a_grace(yard: Yard) -> None:
    await yard.index.keep(KEEPER, IDENTITY, run_of("a", 1, pack="kv/packs/named"))
    epoch = await running(yard.journal, "cmpl-1")
    await yard.journal.seal_kv("cmpl-1", epoch, run_of("b", 1, pack="kv/packs/in-flight"))
    yard.put("kv/packs/named", "kv/packs/in-flight", "kv/packs/orphan")
    yard.clock.pass_s(10**9)  # long after the files were written
    done = await yard.collection().collect()
    assert (done.orphans, done.orphan_bytes) == (1, 100)
    assert (await yard.collection().collect()).orphans == 0
    assert "kv/packs/orphan" in yard.stored
    yard.clock.pass_s(301)
    await yard.collection().collect()
    assert yard.stored == {"kv/packs/named", "kv/packs/in-flight"}


async def test_a_pack_that_is_gone_from_the_store_is_not_handed_out(yard: Yard) -> None:
    await yard.index.keep(KEEPER, IDENTITY, run_of("a", 1, pack="kv/packs/lost"))
    yard.clock.pass_s(301)
    assert (await yard.collection().collect()).lost_packs == 1
    assert await yard.index.known(IDENTITY, KEEPER.scope, chains("a", 1)) == ()


async def test_packs_of_requests_that_are_over_go_unless_they_were_kept(yard: Yard) -> None:
    epoch = await running(yard.journal, "cmpl-1")
    kept, dropped = run_of("a", 1, pack="kv/packs/kept"), run_of("b", 1, pack="kv/packs/dropped")
    await yard.journal.seal_kv("cmpl-1", epoch, (*kept, *dropped))
    yard.put("kv/packs/kept", "kv/packs/dropped")
    await yard.index.keep(KEEPER, IDENTITY, kept)
    await yard.journal.finish("cmpl-1", epoch, outcome(0))
    await yard.collection().collect()
    assert len(yard.stored) == 2
    yard.clock.pass_s(301)
    await yard.collection().collect()
    assert yard.stored == {"kv/packs/kept"}


async def test_a_store_that_refuses_keeps_its_packs_until_it_does_not(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.put("kv/packs/orphan")
    yard.clock.pass_s(10**9)
    await yard.collection().collect()
    yard.clock.pass_s(301)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise StoreError("the store is read-only")

    with monkeypatch.context() as broken:
        broken.setattr(DirectoryStore, "delete", refuse)
        assert (await yard.collection().collect(orphans=False)).failures == 1
    assert yard.stored == {"kv/packs/orphan"}
    assert (await yard.collection().collect()).deleted_packs == 1 and yard.stored == set()


async def test_one_run_lets_go_of_all_that_ended_since_the_last(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy installation ends more in a minute than fits in one batch; what stays would grow without end."""
    monkeypatch.setattr("control_plane.kv_collection.BATCH", 3)
    monkeypatch.setattr("control_plane.kv_collection.ROWS", 4)
    epoch = await running(yard.journal, "cmpl-1")
    packs = [f"kv/packs/{number}" for number in range(10)]
    for pack in packs:
        await yard.journal.seal_kv("cmpl-1", epoch, run_of("a", 1, pack=pack))
    yard.put(*packs)
    await yard.journal.finish("cmpl-1", epoch, outcome(0))
    assert (await yard.collection().collect(orphans=False)).retired_packs == 10
    rows = await yard.database.read(lambda c: c.execute("SELECT COUNT(*) FROM request_kv").fetchone())
    assert rows[0] == 0
    yard.clock.pass_s(301)
    assert (await yard.collection().collect(orphans=False)).deleted_packs == 10
    assert yard.stored == set()


async def test_a_tenants_own_quota_goes_before_the_installations(yard: Yard) -> None:
    yard.settings = KvSettings(quota_bytes=1000, grace_s=300, storage_microusd_per_gib_month=0)
    for number in range(4):
        await yard.index.keep(
            KEEPER, IDENTITY, run_of(str(number), 1, pack=f"kv/packs/{number}"), {f"kv/packs/{number}": 100}
        )
    assert (await yard.collection().collect(orphans=False)).over_quota_chunks == 0
    quotas = Quotas(yard.database)
    await quotas.put(KEEPER.tenant, NO_QUOTA, kv_bytes=250)
    assert (await quotas.kv_of(KEEPER.tenant)) == KvQuota(250, 400)
    assert (await yard.collection().collect(orphans=False)).over_quota_chunks == 2
    assert (await quotas.kv_of(KEEPER.tenant)) == KvQuota(250, 200)
    await quotas.put("other", NO_QUOTA, kv_bytes=1)
    assert await quotas.drop(KEEPER.tenant)
    assert (await quotas.kv_of(KEEPER.tenant)).most_bytes is None
    assert (await yard.collection().collect(orphans=False)).over_quota_chunks == 0


async def test_what_tenants_share_stands_on_what_any_of_them_keeps(yard: Yard) -> None:
    one, two = replace(KEEPER, owner="*"), replace(KEEPER, tenant="acme", owner="*")
    await yard.index.keep(one, IDENTITY, run_of("a", 2, pack="kv/packs/one"))
    await yard.index.keep(two, IDENTITY, run_of("a", 4, pack="kv/packs/two", begin=2))
    assert (await yard.collection().collect(orphans=False)).unreachable_chunks == 0
    assert len(await yard.index.known(IDENTITY, KEEPER.scope, chains("a", 4))) == 4
    await yard.index.quarantine("kv/packs/one", "default", "doubt")
    assert (await yard.collection().collect(orphans=False)).unreachable_chunks == 2


async def test_a_store_that_shows_nothing_at_all_is_taken_for_another_one(yard: Yard) -> None:
    """A folder that is not mounted must not cost the index everything, for good."""
    for number in range(LOST_AT_ONCE + 1):
        await yard.index.keep(KEEPER, IDENTITY, run_of(str(number), 1, pack=f"kv/packs/{number}"))
    yard.clock.pass_s(301)
    assert (await yard.collection().collect()).lost_packs == 0
    assert len(await yard.index.known(IDENTITY, KEEPER.scope, chains("0", 1))) == 1
    yard.put("kv/packs/0")
    assert (await yard.collection().collect()).lost_packs == LOST_AT_ONCE


async def test_kv_of_a_deleted_key_is_named_no_more_and_goes(yard: Yard) -> None:
    kept, other = run_of("a", 2, pack="kv/packs/one"), run_of("b", 1, pack="kv/packs/two")
    await yard.index.keep(KEEPER, IDENTITY, kept)
    await yard.index.keep(replace(KEEPER, scope="another"), IDENTITY, other)
    yard.put("kv/packs/one", "kv/packs/two")
    places = await yard.index.places(KEEPER.tenant, {KEEPER.scope})
    assert [(place.identity, place.scope, place.packs) for place in places] == [
        (IDENTITY, KEEPER.scope, ("kv/packs/one",))
    ]
    assert await yard.database.write(lambda c: drop(c, places, KEEPER.tenant, "its key was deleted", 1)) == 1
    assert await yard.index.known(IDENTITY, KEEPER.scope, chains("a", 2)) == ()
    yard.clock.pass_s(301)
    await yard.collection().collect(orphans=False)
    assert yard.stored == {"kv/packs/two"}


async def test_a_store_that_cannot_be_listed_is_looked_through_with_the_next_sweep(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.settings = replace(QUIET, orphan_s=0.0)
    collection = yard.collection()
    yard.put("kv/packs/orphan")
    yard.clock.pass_s(10**9)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise StoreError("the store is away")

    with monkeypatch.context() as broken:
        broken.setattr(DirectoryStore, "list", refuse)
        assert await collection.sweep() == Collected()
    assert (await collection.sweep()).orphans == 1


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


@pytest.mark.parametrize("after", range(8))
async def test_a_death_at_any_step_leaves_what_the_next_life_carries_on(
    yard: Yard, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every effect on database and store is a step; the process dies before the one numbered `after`."""
    one, two = run_of("a", 2, pack="kv/packs/one"), run_of("a", 4, pack="kv/packs/two", begin=2)
    live = run_of("c", 2, pack="kv/packs/live")
    await yard.index.keep(KEEPER, IDENTITY, (*one, *two, *live))
    yard.put("kv/packs/one", "kv/packs/two", "kv/packs/live", "kv/packs/orphan")
    await yard.index.quarantine("kv/packs/one", "default", "doubt")
    yard.clock.pass_s(10**9)
    steps = 0
    write, delete = Database.write, DirectoryStore.delete

    def step() -> None:
        nonlocal steps
        if steps == after:
            raise Killed
        steps += 1

    async def dying_write(self: Database, fn: Any, **options: Any) -> Any:
        step()
        return await write(self, fn, **options)

    def dying_delete(self: DirectoryStore, key: str, **options: Any) -> None:
        step()
        delete(self, key, **options)

    with monkeypatch.context() as mortal:
        mortal.setattr(Database, "write", dying_write)
        mortal.setattr(DirectoryStore, "delete", dying_delete)
        try:
            for _ in range(3):
                await yard.collection().collect()
                yard.clock.pass_s(yard.settings.quarantine_s + 301)
        except Killed:
            pass
    assert await yard.index.known(IDENTITY, KEEPER.scope, chains("a", 4)) == ()
    for _ in range(3):
        await yard.collection().collect()
        yard.clock.pass_s(yard.settings.quarantine_s + 301)
        assert await yard.index.known(IDENTITY, KEEPER.scope, chains("c", 2)) == live
        assert "kv/packs/live" in yard.stored
    assert yard.stored == {"kv/packs/live"} and await yard.states() == {"kv/packs/live": "live"}


# --- what goes: pure ---------------------------------------------------------------------------------------------


def chunk(
    name: str, parent: str, at: int, pack: str, uses: int = 0, created_us: int = 0, saved_us: int = 10**6
) -> StoredChunk:
    return StoredChunk(("i", "s", name), parent, at, pack, 100, saved_us, 3_600_000_000, uses, created_us)


def test_over_quota_the_least_worth_per_byte_goes_first() -> None:
    used, unused = chunk("a", "", 0, "p1", uses=9), chunk("b", "", 0, "p2")
    going = departures([used, unused], {"p1": 100, "p2": 100}, Limits(quota_bytes=150), HOUR_US)
    assert going.packs == {"p2": OVER_QUOTA} and going.chunks == {unused.name: OVER_QUOTA}


def test_a_prefix_is_worth_what_continues_it() -> None:
    root, leaf = chunk("a", "", 0, "p1"), chunk("b", "a", 32, "p2", uses=50)
    other = chunk("c", "", 0, "p3", uses=5)
    going = departures([root, leaf, other], {"p1": 100, "p2": 100, "p3": 100}, Limits(quota_bytes=250), HOUR_US)
    assert going.packs == {"p3": OVER_QUOTA}


def test_a_chunk_that_costs_more_than_it_saves_goes_in_time() -> None:
    cheap = Limits(storage_microusd_per_gib_month=24_700)
    idle = chunk("a", "", 0, "p1", saved_us=1)
    assert not departures([idle], {"p1": 100}, cheap, 0).chunks
    dear = Limits(storage_microusd_per_gib_month=10**15)
    assert departures([idle], {"p1": 100}, dear, 1000 * HOUR_US).chunks == {idle.name: WORTHLESS}


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_whatever_goes_nothing_is_left_without_its_prefix(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 14))
    chunks: list[StoredChunk] = []
    for number in range(count):
        earlier = [c for c in chunks if c.first_token < 96]
        parent = data.draw(st.sampled_from([None, *earlier])) if earlier else None
        missing = data.draw(st.integers(0, 9)) == 0
        at = parent.first_token + 32 if parent else (32 if missing else 0)
        above = parent.name[2] if parent else ("gone" if missing else "")
        pack = f"p{data.draw(st.integers(0, 4))}"
        chunks.append(chunk(f"c{number}", above, at, pack, uses=data.draw(st.integers(0, 3))))
    packs = {pack: 100 * sum(c.pack == pack for c in chunks) for pack in {c.pack for c in chunks}}
    quota = data.draw(st.integers(1, 1500))
    limits = Limits(quota, data.draw(st.sampled_from([0.0, 24_700.0, 1e15])))
    going = departures(chunks, packs, limits, data.draw(st.integers(0, 100)) * HOUR_US)
    staying = {c.name: c for c in chunks if c.name not in going.chunks}
    for left in staying.values():
        assert left.first_token == 0 or ("i", "s", left.parent) in staying
        assert left.pack not in going.packs
    assert sum(packs[p] for p in packs if p not in going.packs) <= quota
    assert all(p in going.packs or any(c.pack == p for c in staying.values()) for p in packs)
    assert all(reason in (UNREACHABLE, WORTHLESS, OVER_QUOTA) for reason in going.chunks.values())
