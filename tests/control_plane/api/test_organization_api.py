"""Usage and costs as OpenAI's own client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.admin.organization import UsageCompletionsResponse, UsageCostsResponse

from control_plane.journal import Journal, Outcome, RequestState
from control_plane.ledger import Ledger
from function_runtime.protocol import ReplicaTime
from tests.control_plane.api.conftest import Service
from tests.control_plane.storage.builders import new_request, replica_status, set_price, used

DAY_S = 86400
START_S = 1_700_006_400 // DAY_S * DAY_S


@pytest.fixture
async def openai(service: Service) -> AsyncIterator[AsyncOpenAI]:
    client = AsyncOpenAI(
        api_key=service.admin, admin_api_key=service.admin, base_url=f"{service.url}/v1", max_retries=0
    )
    yield client
    await client.close()


async def fill(service: Service) -> None:
    """Three requests and two replicas over two days: 30 s of device time at 3600 dollars an hour is 30 dollars."""
    await set_price(service.database, 3_600_000_000)
    await set_price(service.database, 3_600_000_000, function="big")
    journal, ledger = Journal(service.database, "gw-1"), Ledger(service.database)

    async def serve(key_id: str, function: str, model: str, replica_id: str, decode_us: int, **given: Any) -> None:
        new = new_request(key_id=key_id, function=function, model=model, **given)
        await journal.accept(new)
        await journal.assign(new.id, replica_id, "slot-0")
        outcome = Outcome(
            RequestState.DONE, input_tokens=100, cached_tokens=40, output_tokens=7, device=used(0, decode_us)
        )
        await journal.finish(new.id, 1, outcome)

    await serve("key_a", "smol", "gpt-4o", "rep-1", 1_000_000)
    await serve("key_b", "smol", "smol", "rep-1", 2_000_000)
    refused = new_request()
    await journal.accept(refused)
    await journal.finish(refused.id, 0, Outcome(RequestState.REFUSED))
    await ledger.close_replica(
        replica_status("rep-1", time=ReplicaTime(10_000_000, 1_000_000, 3_000_000, 5_000_000, 1_000_000))
    )
    await service.database.write(lambda c: c.execute("UPDATE ledger SET at_us = ?", ((START_S + 10) * 1_000_000,)))
    await serve("key_a", "big", "big", "rep-2", 5_000_000)
    await ledger.close_replica(
        replica_status("rep-2", function="big", time=ReplicaTime(20_000_000, 0, 4_000_000, 10_000_000, 0))
    )
    await service.database.write(
        lambda c: c.execute(
            "UPDATE ledger SET at_us = ? WHERE at_us > ?", ((START_S + DAY_S) * 1_000_000, (START_S + 20) * 1_000_000)
        )
    )


def results(page: UsageCompletionsResponse | UsageCostsResponse) -> list[Any]:
    return [result for bucket in page.data for result in bucket.results]


async def test_usage_is_summed_by_day(service: Service, openai: AsyncOpenAI) -> None:
    await fill(service)
    page = await openai.admin.organization.usage.completions(start_time=START_S, end_time=START_S + 3 * DAY_S)
    assert isinstance(page, UsageCompletionsResponse)
    assert [(bucket.start_time, bucket.end_time) for bucket in page.data] == [
        (START_S + number * DAY_S, START_S + (number + 1) * DAY_S) for number in range(3)
    ]
    first, second, third = (bucket.results for bucket in page.data)
    assert third == [] and (page.has_more, page.next_page) == (False, None)
    result: Any = first[0]
    assert result.object == "organization.usage.completions.result"
    assert (result.input_tokens, result.input_cached_tokens, result.output_tokens, result.num_model_requests) == (
        200, 80, 14, 2,
    )  # fmt: skip
    assert (result.model, result.project_id, result.api_key_id) == (None, None, None)
    other: Any = second[0]
    assert other.num_model_requests == 1


async def test_usage_is_grouped_and_filtered(service: Service, openai: AsyncOpenAI) -> None:
    await fill(service)
    span = {"start_time": START_S, "end_time": START_S + 2 * DAY_S}
    usage = openai.admin.organization.usage
    by_model = results(await usage.completions(**span, group_by=["model", "api_key_id", "project_id"]))
    assert {(each.model, each.api_key_id, each.project_id, each.num_model_requests) for each in by_model} == {
        ("gpt-4o", "key_a", "default", 1), ("smol", "key_b", "default", 1), ("big", "key_a", "default", 1),
    }  # fmt: skip
    assert len(results(await usage.completions(**span, models=["smol", "big"]))) == 2
    assert sum(each.num_model_requests for each in results(await usage.completions(**span, api_key_ids=["key_b"]))) == 1
    assert results(await usage.completions(**span, project_ids=["other"])) == []
    assert results(await usage.completions(**span, user_ids=["u"])) == []
    assert results(await usage.completions(**span, batch=True)) == []
    untracked = await usage.completions(**span, batch=False, group_by=["batch", "user_id", "service_tier"])
    assert [each.batch for each in results(untracked)] == [False, False]
    extra = await usage.completions(**span, extra_query={"group_by": "function"})
    assert [each.function for each in results(extra)] == ["smol", "big"]


async def test_pages_follow_each_other_and_count_nothing_twice(service: Service, openai: AsyncOpenAI) -> None:
    await fill(service)
    span = {"start_time": START_S - 7200, "end_time": START_S + 2 * DAY_S + 1800}
    whole = await openai.admin.organization.usage.completions(**span, bucket_width="1h", limit=168)
    starts, found, page = list[int](), 0, None
    for _ in range(100):
        given = {} if page is None else {"page": page}
        answer = await openai.admin.organization.usage.completions(**span, bucket_width="1h", limit=7, **given)
        starts += [bucket.start_time for bucket in answer.data]
        found += sum(each.num_model_requests for each in results(answer))
        page = answer.next_page
        if not answer.has_more:
            break
    assert starts == [bucket.start_time for bucket in whole.data] and len(set(starts)) == len(starts)
    assert found == sum(each.num_model_requests for each in results(whole)) == 3


async def test_a_range_that_cuts_a_bucket_counts_only_what_lies_inside(service: Service, openai: AsyncOpenAI) -> None:
    await fill(service)
    page = await openai.admin.organization.usage.completions(start_time=START_S + 11, end_time=START_S + DAY_S)
    assert results(page) == [] and page.data[0].start_time == START_S + 11


async def test_costs_by_line_item_sum_to_what_the_devices_cost(service: Service, openai: AsyncOpenAI) -> None:
    await fill(service)
    span = {"start_time": START_S, "end_time": START_S + 2 * DAY_S}
    page = await openai.admin.organization.usage.costs(**span, group_by=["line_item"])
    assert isinstance(page, UsageCostsResponse)
    sums: dict[str, float] = {}
    for each in results(page):
        assert each.object == "organization.costs.result" and each.amount.currency == "usd"
        assert each.quantity_unit == "duration_seconds" and each.quantity == each.amount.value
        sums[each.line_item] = sums.get(each.line_item, 0) + each.amount.value
    assert sums == {"active": 8.0, "cold_start": 1.0, "idle": 15.0, "overhead": 1.0, "unreported": 5.0}
    whole = results(await openai.admin.organization.usage.costs(**span))
    assert sum(each.amount.value for each in whole) == 30.0
    assert whole[0].line_item is None and whole[0].quantity is None


async def test_costs_are_grouped_and_filtered(service: Service, openai: AsyncOpenAI) -> None:
    await fill(service)
    span = {"start_time": START_S, "end_time": START_S + 2 * DAY_S}
    costs = openai.admin.organization.usage.costs
    by_key = results(await costs(**span, group_by=["api_key_id", "project_id"]))
    active: dict[str | None, float] = {}
    for each in by_key:
        active[each.api_key_id] = active.get(each.api_key_id, 0) + each.amount.value
    assert active == {None: 22.0, "key_a": 6.0, "key_b": 2.0}
    assert {each.project_id for each in by_key} == {"default"}
    only = results(await costs(**span, line_items=["idle"]))
    assert sum(each.amount.value for each in only) == 15.0
    by_function = await costs(**span, extra_query={"group_by": "function", "bucket_width": "1h"}, limit=48)
    assert {each.function: each.amount.value for each in results(by_function)} == {"smol": 10.0, "big": 20.0}


async def test_a_living_replica_holds_the_watermark_of_costs_back(service: Service) -> None:
    await Ledger(service.database).report_replica(replica_status("rep-9", time=ReplicaTime(5, 5, 0, 0, 0)))
    rows = await service.database.read(lambda c: c.execute("SELECT reported_us FROM replica_accounts").fetchone())
    await asyncio.sleep(0)
    path = f"/v1/organization/costs?start_time={START_S}&end_time={START_S + 5}"
    assert (await service.call("GET", path))["x_complete_until"] <= rows[0] // 1_000_000


async def test_tenants_see_their_own_usage_only(service: Service) -> None:
    await fill(service)
    made = await service.call("POST", "/api/v1/keys", json={"name": "x", "role": "admin", "tenant": "acme"}, status=201)
    for path in ("usage/completions", "costs"):
        page = await service.call(
            "GET", f"/v1/organization/{path}?start_time={START_S}&end_time={START_S + 2 * DAY_S}&project_ids=default",
            key=made["key"],
        )  # fmt: skip
        assert all(bucket["results"] == [] for bucket in page["data"])


async def test_usage_needs_an_admin(service: Service) -> None:
    for path in ("usage/completions", "costs"):
        await service.call("GET", f"/v1/organization/{path}?start_time=1", key=service.user, status=403)


@pytest.mark.parametrize("path", ["usage/completions", "costs"])
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=x", "start_time"),
        ("start_time=-1", "start_time"),
        ("start_time=1e9", "start_time"),
        ("start_time=1_0", "start_time"),
        ("start_time=%C2%B2", "start_time"),
        ("start_time=99999999999999999999999999", "start_time"),
        ("start_time=10&end_time=10", "end_time"),
        ("start_time=10&bucket_width=2d", "bucket_width"),
        ("start_time=10&limit=0", "limit"),
        ("start_time=10&limit=2000", "limit"),
        ("start_time=10&group_by=password", "group_by"),
        ("start_time=10&group_by[]=id;drop", "group_by"),
        ("start_time=10&page=abc", "page"),
        ("start_time=10&page=page_5", "page"),
    ],
)
async def test_a_bad_query_is_refused_by_parameter(service: Service, path: str, query: str, param: str) -> None:
    error = (await service.call("GET", f"/v1/organization/{path}?{query}", status=400))["error"]
    assert error["param"] == param


async def test_the_calls_of_openais_own_test_suite_are_taken(service: Service, openai: AsyncOpenAI) -> None:
    await openai.admin.organization.usage.completions(
        start_time=0, api_key_ids=["string"], batch=True, bucket_width="1m", end_time=0 + 60, group_by=["project_id"],
        limit=0 + 1, models=["string"], project_ids=["string"], user_ids=["string"],
    )  # fmt: skip
    await openai.admin.organization.usage.costs(
        start_time=0, api_key_ids=["string"], bucket_width="1d", end_time=60, group_by=["project_id"], limit=1,
        project_ids=["string"],
    )  # fmt: skip
