"""SQL of the token log: appends of many streams by one statement, compaction, deletion. Two databases, two texts.

An append takes effect only where `owner`, `epoch`, `state` and `last_seq` are what its author believes; the condition
is in the statement that moves the request. Rows come as JSON with one blob of payloads (SQLite: one step outside of the
interpreter's lock, whatever the number of streams) or as arrays (PostgreSQL: one way to the server).
Limits: a request occurs once in a statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from control_plane.schema import LOG_SECOND_BITS


@dataclass(frozen=True, slots=True)
class LogStatements:
    append: tuple[str, ...]
    """The last one counts the requests that moved, by its rows affected (SQLite) or its answer (PostgreSQL)."""
    have: str
    """Places of the rows that are in the log under this owner and epoch, whoever wrote them and when."""
    compacted: str
    """The row that takes a chain's place; returns its id."""
    drop: str | None
    """Delete a request's chain; None: it goes with its partition."""


NEXT_LOG_ID: Final = "SELECT COALESCE(MAX(id), 0) + 1 FROM token_log"

_FENCED: Final = {"id": 0, "epoch": 1, "first": 2, "last": 3}
_PAYLOAD: Final = {"place": 4, "nbytes": 5}
_TOLD: Final = {
    "prefill_us": 6, "decode_us": 7, "cached": 8, "at_us": 9, "ends_place": 10, "ends_nbytes": 11, "begun": 12,
}  # fmt: skip


def _given(fields: dict[str, int]) -> str:
    """Each field is taken out of its row once: named again and again it is a fifth of the statement's time."""
    taken = ", ".join(f"value ->> {place} AS {name}" for name, place in fields.items())
    return f"(WITH t AS MATERIALIZED (SELECT key, {taken} FROM json_each(:rows)) SELECT * FROM t)"


_SQLITE_FENCE: Final = """
    r.id = g.id AND r.owner = :me AND r.epoch = g.epoch AND r.state = 'running' AND r.last_seq = g.first - 1"""

SQLITE_LOG: Final = LogStatements(
    append=(
        f"""
INSERT INTO token_log (id, previous, first_seq, last_seq, epoch, payload)
SELECT :base + g.key, r.log_head, g.first, g.last, r.epoch, substr(:payloads, g.place, g.nbytes)
FROM {_given({**_FENCED, **_PAYLOAD})} g CROSS JOIN requests r WHERE {_SQLITE_FENCE}""",
        f"""
UPDATE requests AS r SET last_seq = g.last, log_head = :base + g.key, log_tail = COALESCE(r.log_tail, :base + g.key),
    prefill_us = g.prefill_us, decode_us = g.decode_us, cached_tokens = COALESCE(g.cached, r.cached_tokens),
    first_token_us = COALESCE(g.at_us, r.first_token_us),
    prefill_ends = COALESCE(substr(:payloads, g.ends_place, g.ends_nbytes), r.prefill_ends),
    begun = COALESCE(g.begun, r.begun)
FROM {_given({**_FENCED, **_TOLD})} g WHERE {_SQLITE_FENCE}""",
    ),
    have="""
SELECT j.key FROM json_each(:rows) j CROSS JOIN requests r
WHERE r.id = j.value ->> 0 AND r.owner = :me AND r.epoch = j.value ->> 1 AND r.last_seq >= j.value ->> 3""",
    compacted="""
INSERT INTO token_log (previous, first_seq, last_seq, epoch, payload) VALUES (NULL, 1, :last, :epoch, :payload)
RETURNING id""",
    drop="""
DELETE FROM token_log WHERE id IN (
    WITH RECURSIVE chain (id, previous) AS (
        SELECT id, previous FROM token_log WHERE id = :head
        UNION ALL
        SELECT t.id, t.previous FROM token_log t JOIN chain c ON t.id = c.previous)
    SELECT id FROM chain)""",
)

_GIVEN: Final = """UNNEST(CAST(:ids AS TEXT[]), CAST(:epochs AS BIGINT[]), CAST(:firsts AS BIGINT[]),
        CAST(:lasts AS BIGINT[])"""
_LOG_ID: Final = (
    f"(CAST(EXTRACT(EPOCH FROM now()) AS BIGINT) << {LOG_SECOND_BITS}) "
    f"| (nextval('log_ids') & {(1 << LOG_SECOND_BITS) - 1})"
)

POSTGRESQL_LOG: Final = LogStatements(
    append=(
        f"""
WITH given AS MATERIALIZED (
    SELECT id, epoch, first, last, payload, prefill_us, decode_us, cached_tokens, at_us, ends, begun,
        {_LOG_ID} AS log_id
    FROM {_GIVEN}, CAST(:payloads AS BYTEA[]), CAST(:prefills AS BIGINT[]), CAST(:decodes AS BIGINT[]),
        CAST(:cached AS BIGINT[]), CAST(:at AS BIGINT[]), CAST(:ends AS BYTEA[]),
        CAST(:begun AS TEXT[]))
        AS t (id, epoch, first, last, payload, prefill_us, decode_us, cached_tokens, at_us, ends, begun)),
moved AS (
    UPDATE requests AS r SET last_seq = g.last, log_previous = r.log_head, log_head = g.log_id,
        log_tail = COALESCE(r.log_tail, g.log_id), prefill_us = g.prefill_us, decode_us = g.decode_us,
        cached_tokens = COALESCE(g.cached_tokens, r.cached_tokens),
        first_token_us = COALESCE(g.at_us, r.first_token_us), prefill_ends = COALESCE(g.ends, r.prefill_ends),
        begun = COALESCE(g.begun, r.begun)
    FROM given g
    WHERE r.id = g.id AND r.owner = :me AND r.epoch = g.epoch AND r.state = 'running' AND r.last_seq = g.first - 1
    RETURNING g.log_id, r.log_previous, g.first, g.last, g.epoch, g.payload),
logged AS (
    INSERT INTO token_log (id, previous, first_seq, last_seq, epoch, payload) SELECT * FROM moved)
SELECT COUNT(*) FROM moved""",
    ),
    have=f"""
SELECT g.place - 1 FROM {_GIVEN}) WITH ORDINALITY AS g (id, epoch, first, last, place)
JOIN requests r ON r.id = g.id AND r.owner = :me AND r.epoch = g.epoch AND r.last_seq >= g.last""",
    compacted="""
INSERT INTO token_log (previous, first_seq, last_seq, epoch, payload) VALUES (NULL, 1, :last, :epoch, :payload)
RETURNING id""",
    drop=None,
)

ENDED_LOG: Final = """
SELECT log_head, last_seq, epoch, tenant, sealed FROM requests
WHERE id = :id AND state NOT IN ('queued', 'running') AND log_head IS NOT NULL AND log_head <> log_tail"""

POINT_AT: Final = """
UPDATE requests SET log_head = :to, log_tail = :to
WHERE id = :id AND log_head = :head AND state NOT IN ('queued', 'running')"""
