"""A tenant's traffic out of the journal, page by page, and as what the simulator replays."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from autoscaler.start_times import StartTimes
from control_plane import traffic
from control_plane.client import Client, Endpoint
from control_plane.errors import InvalidRequest
from control_plane.journal import Journal, Outcome, RequestState
from control_plane.simulation.formats import read
from control_plane.simulation.journal import from_journal
from control_plane.simulation.measured import beside, with_measured, write_measured
from control_plane.simulation.own_traffic import write_own_traffic
from control_plane.simulation.sizes import functions_of
from control_plane.simulation.trace import BadTrace, Trace
from control_plane.tenants import Role
from tests.control_plane.api.conftest import Service
from tests.control_plane.storage.builders import new_request, set_price, used


async def fill(service: Service, requests: int = 5) -> None:
    journal = Journal(service.database, "gw-1")
    for name in ("smol", "big"):
        await set_price(service.database, 3_600_000_000, function=name)
        values = (name,)
        await service.database.write(
            lambda c, values=values: c.execute(  # type: ignore[misc]
                """INSERT INTO functions (tenant, name, revision, created_us, updated_us) VALUES
                ('default', ?, 1, 0, 0)""",
                values,
            )
        )
    for place in range(requests):
        new = new_request(function="smol" if place % 2 == 0 else "big", created_us=time.time_ns() // 1000)
        await journal.accept(new)
        await journal.assign(new.id, "rep-1", "slot-0")
        outcome = Outcome(RequestState.DONE, input_tokens=10, output_tokens=7, device=used(1000, 2000))
        await journal.finish(new.id, 1, outcome)
    await service.database.write(lambda c: c.execute("UPDATE requests SET last_seq = 7"))


async def test_requests_come_in_order_a_page_at_a_time(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "PAGE", 2)
    await fill(service, 9)
    listed = await service.call("GET", "/api/v1/traffic")
    assert {each["name"] for each in listed["data"]} == {"smol", "big"}
    times: list[int] = []
    after: dict[str, str] = {}
    for _ in range(3):
        page = await service.call("GET", "/api/v1/traffic/smol", params=after)
        times += [row[0] for row in page["data"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert len(times) == 5
    assert times == sorted(times)
    assert (await service.call("GET", "/api/v1/traffic/smol", params={"until": "5"}))["data"] == []


async def test_only_the_tenants_own_and_only_for_admins(service: Service) -> None:
    await fill(service)
    await service.call("GET", "/api/v1/traffic", key=service.user, status=403)
    _, other = await service.keys.create("other", "admin", Role.ADMIN)
    assert (await service.call("GET", "/api/v1/traffic/smol", key=other))["data"] == []
    assert (await service.call("GET", "/api/v1/traffic", key=other))["data"] == []
    await service.call("GET", "/api/v1/traffic?tenant=default", key=other, status=403)
    await service.call("GET", "/api/v1/traffic/smol?after=x", status=400)


async def test_the_journal_is_replayed_as_it_was_and_can_be_exported(service: Service, tmp_path: Path) -> None:
    await fill(service)
    client = Client(Endpoint(service.url, service.admin))
    own = await asyncio.to_thread(from_journal, client, 1.0, lambda name: None)
    assert own.trace.requests_by_function().tolist() == [2, 3]
    assert own.trace.names == ("big", "smol") == tuple(function.name for function in own.functions)
    assert set(own.trace.output_tokens.tolist()) == {7}
    assert any("never started" in note for note in own.trace.notes)
    write_own_traffic(tmp_path / "own.csv.gz", own.trace)
    write_measured(tmp_path / "own.csv.gz", own.functions)
    back = read(tmp_path / "own.csv.gz")
    assert isinstance(back, Trace)
    assert (back.prompt_tokens == own.trace.prompt_tokens).all()
    assert back.arrival_s + back.origin_s == pytest.approx(own.trace.arrival_s + own.trace.origin_s, abs=1e-5)
    assumed = functions_of(back.names, back.tenants, (70.0,))
    measured = with_measured(tmp_path / "own.csv.gz", back, assumed)
    assert {each.name: each.service for each in measured} == {each.name: each.service for each in own.functions}
    assert with_measured(tmp_path / "other.csv", back, assumed) == assumed
    beside(tmp_path / "own.csv.gz").write_text('[{"name": "smol"}]')
    with pytest.raises(BadTrace, match=r"functions\.json: not what an export writes"):
        with_measured(tmp_path / "own.csv.gz", back, assumed)


async def test_starts_are_those_that_were_measured_by_tier(service: Service) -> None:
    await fill(service)
    times = StartTimes()
    times.note("disk", "total", 4.0)
    values = ("smol", times.to_json())
    await service.database.write(lambda c: c.execute("INSERT INTO start_times VALUES ('default', ?, 0, ?)", values))
    client = Client(Endpoint(service.url, service.admin))
    own = await asyncio.to_thread(from_journal, client, 1.0, lambda name: None)
    starts = {function.name: function.starts for function in own.functions}
    assert starts["smol"].expected_s("disk") == 4.0
    assert not any("smol: never started" in note for note in own.trace.notes)


async def test_a_journal_without_traffic_says_so(service: Service) -> None:
    client = Client(Endpoint(service.url, service.admin))
    with pytest.raises(InvalidRequest, match="nothing came"):
        await asyncio.to_thread(from_journal, client, 1.0, lambda name: None)
