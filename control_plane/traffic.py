"""What came for each function, out of the journal: times, tokens and how long it took, for replays elsewhere.

No content, no key and no client is told. Of a function: the requests of a time, the last starts, and what its spec says
of its replicas. Limits: what retention has dropped is gone; a request's output is the tokens it was delivered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from control_plane.database import Connection, Database

PAGE: Final = 20_000
STARTS: Final = 64

_FUNCTIONS: Final = """
SELECT f.name, r.spec, r.price_microusd_per_hour
FROM functions f JOIN revisions r ON r.tenant = f.tenant AND r.function = f.name AND r.revision = f.revision
WHERE f.tenant = :tenant ORDER BY f.name"""
_STARTS: Final = """
SELECT cold_us FROM replica_accounts
WHERE tenant = :tenant AND function = :function AND cold_us > 0 ORDER BY reported_us DESC LIMIT :limit"""
_MEASURED: Final = "SELECT data FROM start_times WHERE tenant = :tenant AND function = :function"
_REQUESTS: Final = """
SELECT created_us, id, input_tokens, cached_tokens, last_seq, first_token_us, finished_us, prefill_us, decode_us
FROM requests
WHERE function = :function AND tenant = :tenant AND created_us >= :since AND created_us < :until
    AND (created_us > :after_us OR (created_us = :after_us AND id > :after_id))
ORDER BY created_us, id LIMIT :limit"""


@dataclass(frozen=True, slots=True)
class Page:
    rows: list[list[Any]]
    """created_us, input, cached and output tokens, first_token_us, finished_us, prefill_us, decode_us."""
    following: str | None
    """Where the next page begins."""


class Traffic:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def functions(self, tenant: str) -> list[dict[str, Any]]:
        """Those that are deployed, and those that were deleted."""

        def run(connection: Connection) -> list[dict[str, Any]]:
            found = []
            for name, spec, price in connection.execute(_FUNCTIONS, {"tenant": tenant}).fetchall():
                values = {"tenant": tenant, "function": name, "limit": STARTS}
                starts = connection.execute(_STARTS, values).fetchall()
                measured = connection.execute(_MEASURED, {"tenant": tenant, "function": name}).fetchone()
                scaling = json.loads(spec).get("scaling", {})
                found.append(
                    {
                        "tenant": tenant,
                        "name": name,
                        "price_microusd_per_hour": price,
                        "scaling": scaling if isinstance(scaling, dict) else {},
                        "starts_s": [cold_us / 1e6 for (cold_us,) in reversed(starts)],
                        "start_times": None if measured is None else measured[0],
                    }
                )
            return found

        return await self._database.read(run)

    async def requests(self, tenant: str, function: str, since_us: int, until_us: int, after: str | None) -> Page:
        after_us, _, after_id = (after or "").partition(":")
        values = {
            "tenant": tenant, "function": function, "since": since_us, "until": until_us, "limit": PAGE,
            "after_us": int(after_us or 0), "after_id": after_id,
        }  # fmt: skip
        found = await self._database.read(lambda connection: connection.execute(_REQUESTS, values).fetchall())
        following = f"{found[-1][0]}:{found[-1][1]}" if len(found) == PAGE else None
        return Page([[row[0], *row[2:]] for row in found], following)
