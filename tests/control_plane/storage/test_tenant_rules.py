"""How long a tenant's requests are kept: its own rule, its functions', the installation's; and a change of it."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane import tenant_rules
from control_plane.database import Database
from control_plane.journal import Journal
from control_plane.records import Outcome, RequestState
from control_plane.settings import RetentionSettings
from control_plane.tenant_rules import Kept
from tests.control_plane.storage.builders import new_request, query

HOUR_US = 3_600_000_000
DEFAULT = RetentionSettings(log_s=3600.0, request_s=86400.0)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us = 1_800_000_000_000_000
        monkeypatch.setattr("control_plane.database.clock.time.time_ns", lambda: self.now_us * 1000)

    def pass_h(self, hours: float) -> None:
        self.now_us += round(hours * HOUR_US)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def journal(database: Database) -> Journal:
    return Journal(database, "gw-1", DEFAULT)


async def ended(journal: Journal, tenant: str, kept_s: float | None = None) -> str:
    new = new_request(tenant=tenant)
    await journal.accept(new)
    assert await journal.finish(new.id, 0, Outcome(RequestState.CANCELLED, kept_s=kept_s))
    return new.id


async def is_there(database: Database, request_id: str) -> tuple[bool, bool]:
    """(its input, its row)"""
    found = []
    for table, column in (("request_inputs", "request_id"), ("requests", "id")):
        rows: Any = await database.read(query(f"SELECT 1 FROM {table} WHERE {column} = ?", request_id))
        found.append(bool(rows))
    return found[0], found[1]


async def sweep(journal: Journal) -> None:
    while await journal.sweep():
        pass


async def test_each_tenant_is_kept_by_its_own_rule_and_a_functions_goes_before_it(
    journal: Journal, database: Database, clock: Clock
) -> None:
    await journal.rules.keep("short", Kept(60.0, 7200.0))
    await journal.rules.keep("long", Kept(48 * 3600.0, 72 * 3600.0))
    ids = {
        "default": await ended(journal, "default"),
        "short": await ended(journal, "short"),
        "long": await ended(journal, "long"),
        "of a function": await ended(journal, "short", kept_s=12 * 3600.0),
        "of a function that keeps nothing": await ended(journal, "long", kept_s=0.0),
    }

    async def left() -> dict[str, tuple[bool, bool]]:
        await sweep(journal)
        return {name: await is_there(database, request_id) for name, request_id in ids.items()}

    clock.pass_h(0.5)
    whole, row, gone = (True, True), (False, True), (False, False)
    assert list((await left()).values()) == [whole, row, whole, whole, row]
    clock.pass_h(1.0)
    assert list((await left()).values()) == [row, row, whole, whole, row]
    clock.pass_h(1.0)
    assert list((await left()).values()) == [row, gone, whole, whole, row]
    clock.pass_h(10.0)
    assert (await left())["of a function"] == gone  # no longer than its log, where that is longer than the row's rule
    clock.pass_h(13.0)
    assert list((await left()).values()) == [gone, gone, whole, gone, row]
    clock.pass_h(48.0)
    assert list((await left()).values()) == [gone] * 5


async def test_a_change_is_carried_out_on_what_has_ended_before(
    journal: Journal, database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_rules, "WALK_ROWS", 3)
    mine = [await ended(journal, "acme") for _ in range(5)]
    others = [await ended(journal, "other") for _ in range(5)]
    functions = await ended(journal, "acme", kept_s=7200.0)
    clock.pass_h(0.1)
    await sweep(journal)
    await journal.rules.keep("acme", Kept(60.0, 600.0))
    await sweep(journal)
    assert [await is_there(database, each) for each in mine] == [(False, True)] * 5
    clock.pass_h(0.2)
    await sweep(journal)
    assert [await is_there(database, each) for each in mine] == [(False, False)] * 5
    assert [await is_there(database, each) for each in others] == [(True, True)] * 5
    assert await is_there(database, functions) == (True, True)
    assert await journal.rules.apply() == 0, "what is carried out is not walked again"


async def test_a_longer_rule_keeps_what_is_still_there(journal: Journal, database: Database, clock: Clock) -> None:
    request_id = await ended(journal, "acme")
    clock.pass_h(0.9)
    await journal.rules.keep("acme", Kept(24 * 3600.0, None))
    await sweep(journal)
    clock.pass_h(10.0)
    await sweep(journal)
    assert await is_there(database, request_id) == (True, True)
    await journal.rules.keep("acme", Kept())
    await sweep(journal)
    assert await is_there(database, request_id) == (False, True)


async def test_a_change_made_while_another_is_carried_out_is_carried_out_too(
    journal: Journal, database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_rules, "WALK_ROWS", 2)
    ids = [await ended(journal, tenant) for tenant in ("a", "b") * 3]
    await journal.rules.keep("a", Kept(60.0))
    assert await journal.rules.apply() == 2
    await journal.rules.keep("b", Kept(60.0))
    await journal.rules.keep("a", Kept(60.0))
    clock.pass_h(0.1)
    await sweep(journal)
    assert [await is_there(database, each) for each in ids] == [(False, True)] * 6
    assert await journal.rules.kept("a") == Kept(60.0, None)
