"""`stoker usage`: requests, tokens and money by function, key or day, from the two organization APIs.

Costs come with their line item: active, cold start, idle, overhead and unreported are columns, their sum is the total.
"""

from __future__ import annotations

import time
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from control_plane.cli.connection import connect
from control_plane.cli.failure import USAGE, CommandError
from control_plane.cli.output import money, print_json, print_table
from control_plane.client import Client

DAY_S: Final = 86400
FIELD_OF: Final = {"function": "function", "key": "api_key_id", "day": None}
LINE_ITEMS: Final = ("active", "cold_start", "idle", "overhead", "unreported")
TOKEN_FIELDS: Final = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")


def show_usage(data_dir: Path | None, url: str | None, by: str, days: int, as_json: bool) -> None:
    if by not in FIELD_OF:
        raise CommandError(f"--by is function, key or day, not {by!r}", code="bad_option", status=USAGE)
    rows = summed(connect(data_dir, url), by, days)
    if as_json:
        print_json({"object": "list", "by": by, "days": days, "data": rows})
        return
    table = [
        (
            row[by],
            *(row[name] for name in TOKEN_FIELDS),
            *(money(row["cost_microusd"][name]) for name in LINE_ITEMS),
            money(sum(row["cost_microusd"].values())),
        )
        for row in rows
    ]
    head = (by.upper(), "REQUESTS", "INPUT", "CACHED", "OUTPUT", "ACTIVE", "COLD START", "IDLE", "OVERHEAD",
            "UNREPORTED", "TOTAL")  # fmt: skip
    print_table(head, table, empty=f"nothing was used in the last {days} days", right=frozenset(range(1, 11)))


def summed(client: Client, by: str, days: int) -> list[dict[str, Any]]:
    """One row per function, key or day, in the order of the keys."""
    today_s = int(time.time()) // DAY_S * DAY_S
    query = {"start_time": today_s - (days - 1) * DAY_S, "end_time": today_s + DAY_S, "limit": days}
    field = FIELD_OF[by]
    groups = [field] if field else []
    rows: dict[str, dict[str, Any]] = {}

    def row_of(bucket: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        if field:
            key = str(result.get(field) or "-")
        else:
            key = time.strftime("%Y-%m-%d", time.gmtime(bucket["start_time"]))
        fresh = {by: key, **dict.fromkeys(TOKEN_FIELDS, 0), "cost_microusd": dict.fromkeys(LINE_ITEMS, 0)}
        return rows.setdefault(key, fresh)

    for bucket in pages(client, "/v1/organization/usage/completions", {**query, "group_by": groups}):
        for result in bucket["results"]:
            row = row_of(bucket, result)
            for name in TOKEN_FIELDS:
                row[name] += int(result.get(name) or 0)
    for bucket in pages(client, "/v1/organization/costs", {**query, "group_by": [*groups, "line_item"]}):
        for result in bucket["results"]:
            costs = row_of(bucket, result)["cost_microusd"]
            item = str(result.get("line_item") or "unreported")
            costs[item] = costs.get(item, 0) + microusd_of(result["amount"])
    return [rows[key] for key in sorted(rows)]


def pages(client: Client, path: str, query: dict[str, Any]) -> list[dict[str, Any]]:
    buckets: list[dict[str, Any]] = []
    page: str | None = None
    while True:
        answer = client.request("GET", path, query={**query, "page": page})
        buckets += answer["data"]
        page = answer.get("next_page")
        if not answer.get("has_more") or page is None:
            return buckets


def microusd_of(amount: dict[str, Any]) -> int:
    """The wire says dollars as a number; six decimals of it are exact."""
    return int((Decimal(str(amount["value"])) * 1_000_000).to_integral_value())
