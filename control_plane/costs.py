"""Money by time bucket and line item, from the ledger, in OpenAI's shape (`organization.costs`).

Line items: `active` (device time of requests), `cold_start`, `idle`, `overhead`, `unreported`; corrections are already
in the item they correct, and the items of a range sum to what the devices cost. Limits: the time of a living replica is
charged when it is reported, so `x_complete_until` is the oldest report of those that live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from control_plane.database import Connection, Database
from control_plane.usage import RangeQuery, grouped

LINE_ITEM: Final = "CASE WHEN kind = 'request' THEN 'active' ELSE stage END"
COST_FIELDS: Final = {
    "project_id": "tenant",
    "user_id": "NULL",
    "api_key_id": "key_id",
    "api_source": "'unlabeled'",
    "line_item": LINE_ITEM,
    "function": "function",
}
_SUMS: Final = ("SUM(cost_microusd)", "SUM(device_us)")


class Costs:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def costs(self, query: RangeQuery) -> dict[str, Any]:
        now_us = self._database.clock.now_us() - 1_000_000

        def run(connection: Connection) -> dict[str, Any]:
            (oldest_us,) = connection.execute(
                "SELECT MIN(reported_us) FROM replica_accounts WHERE closed_us IS NULL AND tenant = :tenant",
                {"tenant": query.tenant},
            ).fetchone()
            until_us = now_us if oldest_us is None else min(oldest_us, now_us)
            # Rows that hold no device cost nothing; an item that was given back whole is still shown, as zero.
            return grouped(connection, query, COST_FIELDS, _SUMS, "device_us <> 0", _cost, until_us)

        return await self._database.read(run)


def _cost(group: Mapping[str, Any], sums: Sequence[Any]) -> dict[str, Any]:
    microusd, device_us = sums
    by_item = "line_item" in group
    result = {
        "object": "organization.costs.result",
        # NOTE: six decimals of a double are exact up to nine digits of dollars: a reader gets the micro-dollars.
        "amount": {"value": microusd / 1_000_000, "currency": "usd"},
        "line_item": group.get("line_item"),
        "project_id": group.get("project_id"),
        "api_key_id": group.get("api_key_id"),
        "user_id": None,
        "quantity": device_us / 1_000_000 if by_item else None,
        "quantity_unit": "duration_seconds" if by_item else None,
    }
    if "api_source" in group:
        result["api_source"] = group["api_source"]
    if "function" in group:
        result["function"] = group["function"]
    return result
