"""The index of stored KV: what is handed out has no gap, is of one scope, and is never of a pack that is not live."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.database import Database
from control_plane.kv_desk import PRIOR, PRIOR_KEYED, probability
from control_plane.kv_index import Counts, Keeper, KvIndex, _gapless
from function_runtime.protocol import KvChunk

IDENTITY = "1" * 64
KEEPER = Keeper("default", "fn", "scope-a", "", 1_000_000)


def name(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def run_of(text: str, count: int, size: int = 32, pack: str = "", begin: int = 0) -> tuple[KvChunk, ...]:
    """`count` chunks of a sequence called `text`."""
    return tuple(
        KvChunk(
            0,
            at * size,
            (at + 1) * size,
            pack or f"kv/packs/{text}",
            at * 4096,
            4096,
            name("digest", text, at),
            name("chain", text, (at + 1) * size),
            name("chain", text, at * size),
        )
        for at in range(begin, count)
    )


def chains(text: str, count: int, size: int = 32) -> list[str]:
    return [name("chain", text, (at + 1) * size) for at in range(count)]


@pytest.fixture
def index(database: Database) -> KvIndex:
    return KvIndex(database)


async def test_what_was_kept_is_known_to_its_scope_and_identity_only(index: KvIndex) -> None:
    kept = run_of("a", 3)
    assert await index.keep(KEEPER, IDENTITY, kept) == 3
    assert await index.known(IDENTITY, "scope-a", chains("a", 5)) == kept
    assert await index.known(IDENTITY, "scope-b", chains("a", 5)) == ()
    assert await index.known("2" * 64, "scope-a", chains("a", 5)) == ()
    assert await index.known(IDENTITY, "scope-a", chains("b", 5)) == ()


async def test_a_run_longer_than_a_query_is_found_whole(index: KvIndex) -> None:
    kept = run_of("long", 200)
    await index.keep(KEEPER, IDENTITY, kept)
    assert await index.known(IDENTITY, "scope-a", chains("long", 220)) == kept


async def test_nothing_behind_a_gap_is_handed_out(index: KvIndex) -> None:
    kept = run_of("a", 5)
    await index.keep(KEEPER, IDENTITY, (*kept[:2], *kept[3:]))
    assert await index.known(IDENTITY, "scope-a", chains("a", 5)) == kept[:2]
    await index.keep(KEEPER, IDENTITY, kept[1:][:0] or kept[2:3])
    assert await index.known(IDENTITY, "scope-a", chains("a", 5)) == kept


async def test_a_known_chunk_keeps_its_place_and_the_second_copy_goes(index: KvIndex, database: Database) -> None:
    first, second = run_of("a", 2, pack="kv/packs/one"), run_of("a", 2, pack="kv/packs/two")
    await index.keep(KEEPER, IDENTITY, first, {"kv/packs/one": 9000})
    assert await index.keep(KEEPER, IDENTITY, second, {"kv/packs/two": 9000}) == 0
    assert await index.known(IDENTITY, "scope-a", chains("a", 2)) == first
    states = {pack["pack"]: (pack["state"], pack["nbytes"]) for pack in await index.packs("default")}
    assert states["kv/packs/one"] == ("live", 9000)
    # Nothing names it: it is on its way out, whoever it belongs to.
    assert states["kv/packs/two"] == ("retiring", 9000)


async def test_a_quarantined_pack_is_never_handed_out_again_and_a_new_copy_is(index: KvIndex) -> None:
    bad, good = run_of("a", 2, pack="kv/packs/bad"), run_of("a", 2, pack="kv/packs/good")
    await index.keep(KEEPER, IDENTITY, bad)
    found = await index.quarantine("kv/packs/bad", "default", "a byte is another one")
    assert found is not None and (found.function, found.chunks) == ("fn", 2)
    assert await index.quarantine("kv/packs/bad", "default", "again") is None
    assert await index.known(IDENTITY, "scope-a", chains("a", 2)) == ()
    assert await index.keep(KEEPER, IDENTITY, bad) == 0
    assert await index.known(IDENTITY, "scope-a", chains("a", 2)) == ()
    assert await index.keep(KEEPER, IDENTITY, good) == 2
    assert await index.known(IDENTITY, "scope-a", chains("a", 2)) == good


async def test_a_pack_of_a_request_in_flight_can_be_quarantined_before_the_index_knows_it(index: KvIndex) -> None:
    assert await index.quarantine("kv/packs/a", "default", "gone") is not None
    assert await index.keep(KEEPER, IDENTITY, run_of("a", 1)) == 0
    assert await index.known(IDENTITY, "scope-a", chains("a", 1)) == ()


async def test_uses_are_counted_once_per_chunk_that_came_to_use(index: KvIndex, database: Database) -> None:
    await index.keep(KEEPER, IDENTITY, run_of("a", 4))
    for _ in range(3):
        await index.known(IDENTITY, "scope-a", chains("a", 2))
    await database.write(lambda connection: None)
    assert await index.reuse() == {("default", "fn", False): Counts(kept=4, reused=2)}
    (pack,) = await index.packs("default")
    assert (pack["chunks"], pack["uses"]) == (4, 6)


async def test_another_tenants_packs_are_not_shown(index: KvIndex) -> None:
    await index.keep(KEEPER, IDENTITY, run_of("a", 1))
    assert await index.packs("other") == [] and await index.pack_of("other", "a") is None
    assert await index.pack_of("default", "a") == "kv/packs/a"
    assert await index.pack_of("default", chains("a", 1)[0]) == "kv/packs/a"


def test_reuse_that_was_observed_outweighs_the_prior() -> None:
    assert probability(Counts(), False) == PRIOR and probability(Counts(), True) == PRIOR_KEYED
    assert probability(Counts(10_000, 9_000), False) > 0.85
    assert probability(Counts(10_000, 0), True) < 0.01


@settings(deadline=None, max_examples=200)
@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 6)), st.integers(0, 2))
def test_a_run_is_gapless_whatever_is_stored(small: set[int], large: set[int], begin: int) -> None:
    """Chunks of two sizes over one sequence, as a changed spec leaves them."""
    rows = [(f"c{(i + 1) * 16}", f"c{i * 16}", i * 16, (i + 1) * 16) for i in small]
    rows += [(f"c{(i + 1) * 32}", f"c{i * 32}", i * 32, (i + 1) * 32) for i in large]
    last = (f"c{begin * 32}", "", 0, begin * 32) if begin else None
    run = _gapless(rows, last)
    position = begin * 32
    for chain, parent, start, end in run:
        assert (start, parent, chain) == (position, f"c{position}", f"c{end}")
        position = end
    assert not [row for row in rows if row[2] == position and row[3] > position]
