"""How a request stands inside a transaction, and what the end of an attempt or of the request writes.

What was found here is a belief: the statement that then changes the request repeats it as its condition. Limits: runs
inside somebody's transaction and decides nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from control_plane import statements as sql
from control_plane.accounts import Entry, Subject
from control_plane.database import Connection, Row
from control_plane.records import Outcome, RequestState
from function_runtime.protocol import DeviceTime


class Standing(NamedTuple):
    """How a request stands, as a transaction found it; what it then writes is conditional on that."""

    owner: str
    epoch: int
    state: RequestState
    last_seq: int
    durability: str
    tenant: str
    key_id: str
    function: str
    revision: int
    model: str
    replica_id: str | None
    prefill_us: int
    decode_us: int

    def subject(self, request_id: str) -> Subject:
        return Subject(
            self.tenant, self.function, self.revision, self.key_id, self.model, request_id, self.epoch, self.replica_id
        )


def standing(connection: Connection, request_id: str) -> Standing | None:
    return standing_of(connection.execute(sql.STANDING, {"id": request_id}).fetchone())


def standing_of(row: Row | None) -> Standing | None:
    return None if row is None else Standing(row[0], row[1], RequestState(row[2]), *row[3:])


def end_attempt(
    connection: Connection, request_id: str, seen: Standing, reason: str, told: DeviceTime | None, now: int
) -> DeviceTime:
    """End the row of the attempt that runs, if any; what it used of the device: the larger of what the log and the
    caller know, since both only grow."""
    if seen.state is not RequestState.RUNNING:
        return DeviceTime()
    told = told or DeviceTime()
    used = DeviceTime(max(seen.prefill_us, told.prefill_us), max(seen.decode_us, told.decode_us))
    values = {
        "id": request_id,
        "epoch": seen.epoch,
        "now": now,
        "reason": reason,
        "last_seq": seen.last_seq,
        "prefill_us": used.prefill_us,
        "decode_us": used.decode_us,
    }
    connection.execute(sql.CLOSE_ATTEMPT, values)
    return used


def device_entries(used: DeviceTime, prefill_wall_us: int = 0, decode_wall_us: int = 0) -> list[Entry]:
    stages = (("prefill", prefill_wall_us, used.prefill_us), ("decode", decode_wall_us, used.decode_us))
    return [Entry("request", stage, wall_us, device_us) for stage, wall_us, device_us in stages if wall_us or device_us]


def entries_of(outcome: Outcome, used: DeviceTime) -> list[Entry]:
    """The rows of a request's end: a row per stage it went through, and the total with its tokens."""
    stages = outcome.stages
    waits = (
        ("queue", stages.queue_us),
        ("cold_start", stages.cold_start_us),
        ("load_kv", stages.load_kv_us),
    )
    return [
        *(Entry("request", stage, wall_us) for stage, wall_us in waits if wall_us),
        *device_entries(used, stages.prefill_us, stages.decode_us),
        Entry(
            "request",
            "refused" if outcome.state is RequestState.REFUSED else "total",
            stages.total_us,
            input_tokens=outcome.input_tokens,
            cached_tokens=outcome.cached_tokens,
            output_tokens=outcome.output_tokens,
        ),
    ]
