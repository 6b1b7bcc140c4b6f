"""Tokens and requests by time bucket, from the ledger, in OpenAI's shape (`organization.usage.completions`).

Buckets are aligned to UTC and cut at the asked range, so that no row is counted twice over pages. A request counts when
it ends, however it ends, unless it was refused. Limits: what is not kept (user, batch, tier) is null when grouped by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from control_plane.database import Connection, Database
from control_plane.errors import InvalidRequest

WIDTHS_S: Final = {"1m": 60, "1h": 3600, "1d": 86400}
_PAGE_PREFIX: Final = "page_"


@dataclass(frozen=True, slots=True)
class RangeQuery:
    """A range of buckets of one tenant's rows, filtered and grouped. Times are unix seconds."""

    tenant: str
    start_s: int
    end_s: int
    width_s: int
    limit: int
    group_by: tuple[str, ...] = ()
    filters: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(column, values): rows with any of the values."""
    page: str | None = None

    def first_s(self) -> int:
        """Where this page begins."""
        if self.page is None:
            return self.start_s
        begin = self.page.removeprefix(_PAGE_PREFIX)
        if not self.page.startswith(_PAGE_PREFIX) or not begin.isdecimal() or len(begin) > 12:
            raise InvalidRequest("page is not a `next_page` of this API", param="page")
        if not self.start_s <= int(begin) <= self.end_s:
            raise InvalidRequest("page lies outside start_time and end_time", param="page")
        return int(begin)

    def buckets(self) -> tuple[list[tuple[int, int]], int | None]:
        """[begin, end) of this page's buckets, and where the next page begins."""
        begin, found = self.first_s(), list[tuple[int, int]]()
        while begin < self.end_s and len(found) < self.limit:
            end = min(begin - begin % self.width_s + self.width_s, self.end_s)
            found.append((begin, end))
            begin = end
        return found, begin if begin < self.end_s else None


def grouped(
    connection: Connection,
    query: RangeQuery,
    columns: Mapping[str, str],
    sums: Sequence[str],
    where: str,
    render: Callable[[Mapping[str, Any], Sequence[Any]], dict[str, Any]],
    complete_until_us: int,
) -> dict[str, Any]:
    """The page OpenAI's clients read. `columns`: field that may be grouped by -> its SQL, a literal of this package."""
    buckets, next_s = query.buckets()
    values: dict[str, Any] = {
        "tenant": query.tenant,
        "start": buckets[0][0] * 1_000_000 if buckets else 0,
        "end": buckets[-1][1] * 1_000_000 if buckets else 0,
        "width": query.width_s * 1_000_000,
    }
    conditions = [where, "tenant = :tenant", "at_us >= :start", "at_us < :end"]
    for number, (column, wanted) in enumerate(query.filters):
        names = [f"f{number}_{place}" for place in range(len(wanted))]
        values.update(zip(names, wanted, strict=True))
        listed = ", ".join(f":{name}" for name in names)
        conditions.append(f"{column} IN ({listed})" if names else "1 = 0")
    keys = ["at_us / :width", *(columns[field] for field in query.group_by)]
    places = ", ".join(str(place + 1) for place in range(len(keys)))
    rows = connection.execute(
        f"SELECT {', '.join([*keys, *sums])} FROM ledger WHERE {' AND '.join(conditions)} "
        f"GROUP BY {places} ORDER BY {places}",
        values,
    ).fetchall()
    results: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        group = dict(zip(query.group_by, row[1:], strict=False))
        results.setdefault(row[0], []).append(render(group, row[len(keys) :]))
    return {
        "object": "page",
        "data": [
            {
                "object": "bucket",
                "start_time": begin,
                "end_time": end,
                "results": results.get(begin // query.width_s, []),
            }
            for begin, end in buckets
        ],
        "has_more": next_s is not None,
        "next_page": None if next_s is None else f"{_PAGE_PREFIX}{next_s}",
        "x_complete_until": complete_until_us // 1_000_000,
    }


USAGE_FIELDS: Final = {
    "project_id": "tenant",
    "user_id": "NULL",
    "api_key_id": "key_id",
    "model": "model",
    "batch": "0",
    "service_tier": "NULL",
    "api_source": "'unlabeled'",
    "function": "function",
}
_SUMS: Final = ("SUM(input_tokens)", "SUM(cached_tokens)", "SUM(output_tokens)", "COUNT(*)")


class Usage:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def completions(self, query: RangeQuery) -> dict[str, Any]:
        # A request's rows are dated when they are written, so what lies behind the running second is whole.
        until_us = self._database.clock.now_us() - 1_000_000
        return await self._database.read(
            lambda connection: grouped(
                connection, query, USAGE_FIELDS, _SUMS, "stage = 'total' AND kind = 'request'", _usage, until_us
            )
        )


def _usage(group: Mapping[str, Any], sums: Sequence[Any]) -> dict[str, Any]:
    input_tokens, cached_tokens, output_tokens, requests = sums
    result = {
        "object": "organization.usage.completions.result",
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "num_model_requests": requests,
        "input_cached_tokens": cached_tokens,
        "input_uncached_tokens": input_tokens - cached_tokens,
        "input_text_tokens": input_tokens - cached_tokens,
        "input_cached_text_tokens": cached_tokens,
        "output_text_tokens": output_tokens,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "project_id": group.get("project_id"),
        "user_id": None,
        "api_key_id": group.get("api_key_id"),
        "model": group.get("model"),
        "batch": False if "batch" in group else None,
        "service_tier": None,
    }
    if "api_source" in group:
        result["api_source"] = group["api_source"]
    if "function" in group:
        result["function"] = group["function"]
    return result
