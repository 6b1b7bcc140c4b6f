"""The durable record of every accepted request: its input, its log of tokens, who works on it under which epoch.

One gateway owns a request; each attempt has an epoch. Every write names both and takes effect only if the row still has
them: the condition is in the statement, so that it holds between gateways and on any database. Appends of all streams
that arrive while a commit is under way share the next one. Limits: a request with durability `off` has no token log;
its appends are granted from memory and a death of its gateway or replica is an honest error.
"""

from __future__ import annotations

import asyncio
import os
import platform
import threading
import time
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from control_plane import ledger
from control_plane import statements as sql
from control_plane.database import Connection, Database
from control_plane.errors import Fenced, NotFound, StorageUnavailable, Unprocessable
from control_plane.records import (
    Accepted,
    Attempt,
    NewRequest,
    Outcome,
    OutcomeError,
    RequestRecord,
    RequestState,
    StageTimes,
    pack_tokens,
    unpack_tokens,
)
from control_plane.settings import GatewaySettings, RetentionSettings
from function_runtime.protocol import Accepted as Taken
from function_runtime.protocol import DeviceTime, KvChunk, TokenEvent

__all__ = [
    "Accepted",
    "Attempt",
    "Fenced",
    "Journal",
    "NewRequest",
    "Outcome",
    "OutcomeError",
    "RequestRecord",
    "RequestState",
    "StageTimes",
    "pack_tokens",
    "unpack_tokens",
]

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_events: Final = msgspec.msgpack.Decoder(list[TokenEvent]).decode
_decode_ends: Final = msgspec.msgpack.Decoder(tuple[int, ...]).decode
_decode_outcome: Final = msgspec.msgpack.Decoder(Outcome).decode
_decode_chunks: Final = msgspec.msgpack.Decoder(list[KvChunk]).decode


def now_us() -> int:
    return time.time_ns() // 1000


class _Live:
    """What this gateway must know of a request to write its log."""

    __slots__ = ("durable", "epoch", "last_seq", "logged")

    def __init__(self, durability: str, epoch: int, last_seq: int) -> None:
        self.logged = durability != "off"
        self.durable = durability == "host"
        self.epoch = epoch
        self.last_seq = last_seq
        """Kept for requests without a log only."""


class _Batch:
    """Appends waiting for one group. The event loop fills it until the writer begins with it."""

    __slots__ = ("durable", "futures", "rows")

    def __init__(self, durable: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.futures: list[asyncio.Future[bool]] = []
        self.durable = durable


@dataclass(frozen=True, slots=True)
class RetiredKv:
    packs: tuple[str, ...]
    """Keys of pack objects that may be deleted."""
    rows: tuple[tuple[str, int], ...]
    """(request id, number) of the rows that `forget_kv` drops."""


class Journal:
    def __init__(
        self,
        database: Database,
        gateway_id: str,
        retention: RetentionSettings | None = None,
        gateway: GatewaySettings | None = None,
    ) -> None:
        self.gateway_id = gateway_id
        self._database = database
        self._retention = retention or RetentionSettings()
        self._gateway = gateway or GatewaySettings()
        self._live: dict[str, _Live] = {}
        self._batches: dict[bool, _Batch] = {}
        self._lock = threading.Lock()

    # --- gateways' leases ---------------------------------------------------------------------------------------

    async def register(self) -> None:
        """Take the lease of this gateway."""
        await self._lease(self._gateway.lease_s)

    async def heartbeat(self) -> None:
        """Renew it; at least every `GatewaySettings.renew_s`."""
        await self._lease(self._gateway.lease_s)

    async def release(self) -> None:
        """Give the lease up at a clean exit, so that the requests parked here are adopted at once."""
        await self._lease(0.0)

    async def _lease(self, lease_s: float) -> None:
        now = now_us()
        values = {
            "id": self.gateway_id,
            "host": platform.node(),
            "pid": os.getpid(),
            "now": now,
            "until": now + round(lease_s * 1e6),
        }
        await self._database.write(lambda connection: connection.execute(sql.LEASE, values).rowcount)

    async def adopt(self, alive: Collection[str] | None = None) -> list[RequestRecord]:
        """Make the unfinished requests of dead gateways mine, and return all that are mine. `alive`: gateways that
        live; None asks the leases. A former owner that still lives is fenced from here on."""

        def run(connection: Connection) -> list[RequestRecord]:
            now = now_us()
            living = (
                {str(name) for (name,) in connection.execute(sql.LIVING_GATEWAYS, {"now": now}).fetchall()}
                if alive is None
                else set(alive)
            )
            living.discard(self.gateway_id)
            for (owner,) in connection.execute(sql.OWNERS_OF_LIVE).fetchall():
                if owner != self.gateway_id and owner not in living:
                    connection.execute(sql.ADOPT, {"owner": owner, "me": self.gateway_id})
            rows = connection.execute(sql.MINE, {"me": self.gateway_id}).fetchall()
            return [_record(row) for row in rows]

        records = await self._database.write(run)
        for record in records:
            self._live.setdefault(record.id, _Live(record.durability, record.epoch, record.last_seq))
        return records

    # --- accept, assign, requeue --------------------------------------------------------------------------------

    async def accept(self, new: NewRequest) -> Accepted:
        """From here on the request is not lost. A known idempotency key attaches to the earlier request."""
        values = {
            "id": new.id,
            "tenant": new.tenant,
            "key_id": new.key_id,
            "function": new.function,
            "revision": new.revision,
            "endpoint": new.endpoint,
            "model": new.model,
            "durability": new.durability,
            "on_disconnect": new.on_disconnect,
            "stream": int(new.stream),
            "idempotency_key": new.idempotency_key,
            "body_hash": new.body_hash,
            "input_tokens": len(new.prompt) // 4,
            "created_us": new.created_us,
            "owner": self.gateway_id,
        }

        def run(connection: Connection) -> RequestRecord | None:
            if connection.execute(sql.ACCEPT, values).rowcount == 1:
                connection.execute(
                    sql.ACCEPT_INPUT, {"id": new.id, "params": new.params, "prompt": new.prompt}
                )
                return None
            return _attached(connection, new)

        earlier = await self._database.submit(run, durable=new.durability == "host")
        if earlier is not None:
            return Accepted(earlier, attached=True)
        self._live[new.id] = _Live(new.durability, 0, 0)
        return Accepted(_fresh(new, self.gateway_id), attached=False)

    async def assign(self, request_id: str, replica_id: str, slot_id: str) -> int:
        """Begin an attempt: the epoch it runs under. An attempt that is still open is closed as replaced. Raises
        `Fenced` when the request has ended or another gateway owns it."""

        def run(connection: Connection) -> int:
            seen = connection.execute(sql.STANDING, {"id": request_id}).fetchone()
            if seen is None:
                raise NotFound(f"there is no request {request_id}")
            owner, epoch, state, last_seq = seen[0], seen[1], RequestState(seen[2]), seen[3]
            values = {
                "id": request_id,
                "me": self.gateway_id,
                "epoch": epoch,
                "replica_id": replica_id,
                "slot_id": slot_id,
                "now": now_us(),
                "last_seq": last_seq,
            }
            if state is RequestState.RUNNING:
                _close_attempt(connection, request_id, epoch, "replaced", None, None, values["now"])
            if connection.execute(sql.ASSIGN, values).rowcount != 1:
                raise Fenced(f"{request_id} is {state} under {owner}, not ours to assign")
            connection.execute(sql.OPEN_ATTEMPT, values)
            return int(epoch) + 1

        live = self._live.get(request_id)
        begun = await self._database.write(run, durable=live is not None and live.durable)
        if live is not None:
            live.epoch = begun
        return begun

    async def requeue(
        self, request_id: str, epoch: int, reason: str, device: DeviceTime | None = None
    ) -> bool:
        """The attempt ended without an outcome; what it used of the device is charged. False when fenced."""

        def run(connection: Connection) -> bool:
            values = {"id": request_id, "me": self.gateway_id, "epoch": epoch}
            if not _is_running(connection, values):
                return False
            _close_attempt(connection, request_id, epoch, reason, device, None, now_us())
            return connection.execute(sql.REQUEUE, values).rowcount == 1

        return await self._database.write(run)

    async def taken(self, accepted: Taken) -> bool:
        """What the replica said on taking the request: how much of it was resumed from stored KV, how exactly."""
        values = {
            "id": accepted.request_id,
            "epoch": accepted.epoch,
            "loaded_tokens": accepted.loaded_tokens,
            "recomputed_tokens": accepted.recomputed_tokens,
            "exact": int(accepted.exact),
            "load_us": accepted.load_us,
            "detail": accepted.detail,
        }
        return await self._database.submit(
            lambda connection: connection.execute(sql.TAKEN, values).rowcount == 1, guarded=False
        )

    # --- the log ------------------------------------------------------------------------------------------------

    def append(
        self,
        request_id: str,
        epoch: int,
        first_seq: int,
        payload: bytes,
        count: int,
        device: DeviceTime,
        cached_tokens: int,
        prefill_ends: tuple[int, ...] | None = None,
    ) -> Awaitable[bool]:
        """Write `count` tokens (msgpack of a list of `TokenEvent`) at `first_seq`; True once they are committed, or
        when they were already. False: the epoch or the owner is no longer valid, or there is a gap."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        live = self._live.get(request_id)
        if live is not None and not live.logged:
            granted = live.epoch == epoch and live.last_seq == first_seq - 1
            if granted:
                live.last_seq += count
            future.set_result(granted)
            return future
        row = {
            "id": request_id,
            "me": self.gateway_id,
            "epoch": epoch,
            "first": first_seq,
            "last": first_seq + count - 1,
            "before": first_seq - 1,
            "payload": payload,
            "prefill_us": device.prefill_us,
            "decode_us": device.decode_us,
        }
        if first_seq == 1:
            row["cached_tokens"] = cached_tokens
            row["prefill_ends"] = _encode(prefill_ends) if prefill_ends else None
            row["now"] = now_us()
        durable = live is not None and live.durable
        with self._lock:
            batch = self._batches.get(durable)
            started = batch is None
            if batch is None:
                batch = self._batches[durable] = _Batch(durable)
            batch.rows.append(row)
            batch.futures.append(future)
        if started:
            self._hand_over(batch)
        return future

    def _hand_over(self, batch: _Batch) -> None:
        """The batch takes more rows until the writer begins with it: that is how groups form."""

        def run(connection: Connection) -> list[bool]:
            self._seal(batch)
            return [_append_row(connection, row) for row in batch.rows]

        def settle(done: asyncio.Future[list[bool]]) -> None:
            self._seal(batch)
            error = done.exception()
            for place, future in enumerate(batch.futures):
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(done.result()[place])

        self._database.submit(run, durable=batch.durable, guarded=False).add_done_callback(settle)

    def _seal(self, batch: _Batch) -> None:
        with self._lock:
            if self._batches.get(batch.durable) is batch:
                del self._batches[batch.durable]

    async def log(self, request_id: str, after_seq: int = 0) -> list[TokenEvent]:
        """The tokens behind `after_seq`, in order."""

        def run(connection: Connection) -> list[Any]:
            return connection.execute(sql.READ_LOG, {"id": request_id, "after": after_seq}).fetchall()

        events: list[TokenEvent] = []
        for first_seq, payload in await self._database.read(run):
            decoded = _decode_events(payload)
            events.extend(decoded[after_seq + 1 - first_seq :] if first_seq <= after_seq else decoded)
        return events

    async def get(self, request_id: str, tenant: str | None = None) -> RequestRecord | None:
        """`tenant` given: only if it is the tenant's own."""
        query = sql.GET if tenant is None else sql.GET_OF_TENANT
        values = {"id": request_id, "tenant": tenant}
        row = await self._database.read(lambda connection: connection.execute(query, values).fetchone())
        return None if row is None else _record(row)

    async def recent(self, function: str, limit: int = 20) -> list[RequestRecord]:
        values = {"function": function, "limit": limit}
        rows = await self._database.read(lambda connection: connection.execute(sql.RECENT, values).fetchall())
        return [_record(row) for row in rows]

    async def attempts(self, request_id: str) -> list[Attempt]:
        values = {"id": request_id}
        rows = await self._database.read(lambda connection: connection.execute(sql.ATTEMPTS, values).fetchall())
        return [_attempt(row) for row in rows]

    async def attempts_of_replica(self, replica_id: str, limit: int = 50) -> list[tuple[str, int]]:
        """(request id, epoch), newest first."""
        values = {"replica_id": replica_id, "limit": limit}
        rows = await self._database.read(
            lambda connection: connection.execute(sql.ATTEMPTS_OF_REPLICA, values).fetchall()
        )
        return [(str(request_id), int(epoch)) for request_id, epoch in rows]

    # --- durable KV -------------------------------------------------------------------------------------------

    async def seal_kv(self, request_id: str, epoch: int, chunks: Sequence[KvChunk]) -> bool:
        """Remember chunks that are durable now. False when fenced: they are then only remembered to be deleted."""
        values = {"id": request_id, "me": self.gateway_id, "epoch": epoch, "chunks": _encode(list(chunks))}
        (counted,) = await self._database.submit(
            lambda connection: connection.execute(sql.SEAL, values).fetchone(), guarded=False
        )
        return bool(counted)

    async def kv(self, request_id: str) -> list[KvChunk]:
        """What a resume may load; of a range that was written twice, the later one."""
        values = {"id": request_id}
        rows = await self._database.read(lambda connection: connection.execute(sql.READ_KV, values).fetchall())
        chunks: dict[tuple[int, int, int], KvChunk] = {}
        for (payload,) in rows:
            for chunk in _decode_chunks(payload):
                chunks[chunk.choice, chunk.start, chunk.end] = chunk
        return list(chunks.values())

    async def retired_kv(self, limit: int = 256) -> RetiredKv:
        """Packs that no live request counts on any more. Delete the objects first, then `forget_kv`."""

        def run(connection: Connection) -> RetiredKv:
            retired = connection.execute(sql.RETIRED_KV, {"limit": limit}).fetchall()
            if not retired:
                return RetiredKv((), ())
            packs = {chunk.pack for row in retired for chunk in _decode_chunks(row[2])}
            for (payload,) in connection.execute(sql.LIVE_KV).fetchall():
                packs.difference_update(chunk.pack for chunk in _decode_chunks(payload))
            return RetiredKv(tuple(sorted(packs)), tuple((str(row[0]), int(row[1])) for row in retired))

        return await self._database.read(run)

    async def forget_kv(self, retired: RetiredKv) -> None:
        rows = [{"id": request_id, "number": number} for request_id, number in retired.rows]
        if rows:
            await self._database.write(lambda connection: connection.executemany(sql.FORGET_KV, rows).rowcount)

    # --- the end ------------------------------------------------------------------------------------------------

    async def finish(self, request_id: str, epoch: int, outcome: Outcome) -> bool:
        """Outcome, usage and ledger rows in one transaction. True also when this very end was written before; False
        when fenced. Raises `StorageUnavailable` (try again) while an append that precedes it is not in the log."""

        def run(connection: Connection) -> bool:
            seen = connection.execute(sql.STANDING, {"id": request_id}).fetchone()
            if seen is None or (seen[0], seen[1]) != (self.gateway_id, epoch):
                return False
            if RequestState(seen[2]).ended:
                return True
            if outcome.last_seq is not None and seen[4] != "off" and outcome.last_seq != seen[3]:
                raise StorageUnavailable(
                    f"{request_id} has {seen[3]} of {outcome.last_seq} tokens in its log; the rest must come first"
                )
            return self._finish(connection, request_id, epoch, outcome, running=seen[2] == RequestState.RUNNING)

        live = self._live.get(request_id)
        written = await self._database.submit(run, durable=live is not None and live.durable)
        self._live.pop(request_id, None)
        return written

    def _finish(
        self, connection: Connection, request_id: str, epoch: int, outcome: Outcome, *, running: bool
    ) -> bool:
        now = now_us()
        values = {
            "id": request_id,
            "me": self.gateway_id,
            "epoch": epoch,
            "state": outcome.state.value,
            "outcome": _encode(outcome),
            "now": now,
            "expires_us": now + round(self._retention.log_s * 1e6),
        }
        subject = _close_attempt(
            connection, request_id, epoch, outcome.state.value, outcome.device, outcome.stages, now, running=running
        )
        stages = outcome.stages
        waits = (
            ("queue", stages.queue_us),
            ("cold_start", stages.cold_start_us),
            ("load_kv", stages.load_kv_us),
        )
        entries = [ledger.Entry("request", stage, wall_us) for stage, wall_us in waits if wall_us]
        refused = outcome.state is RequestState.REFUSED
        entries.append(
            ledger.Entry(
                "request",
                "refused" if refused else "total",
                stages.total_us,
                input_tokens=outcome.input_tokens,
                cached_tokens=outcome.cached_tokens,
                output_tokens=outcome.output_tokens,
            )
        )
        ledger.record_stages(connection, subject, entries, now)
        if connection.execute(sql.FINISH, values).rowcount != 1:
            raise Fenced(f"{request_id} was taken over")
        return True

    async def sweep(self, limit: int = 200) -> int:
        """Drop what retention no longer keeps, a little at a time; how much there was to do. First the log and the
        input of an ended request go, later its row; the ledger stays."""
        now = now_us()
        keep_us = round(self._retention.request_s * 1e6)

        def run(connection: Connection) -> int:
            expired = connection.execute(sql.EXPIRED, {"now": now, "limit": limit}).fetchall()
            for request_id, finished_us, expires_us in expired:
                values = {"id": request_id, "expires_us": max(finished_us + keep_us, expires_us + 1)}
                connection.execute(sql.DROP_LOG, values)
                connection.execute(sql.DROP_INPUT, values)
                if values["expires_us"] > now:
                    connection.execute(sql.EXPIRE_LATER, values)
                else:
                    connection.execute(sql.DROP_ATTEMPTS, values)
                    connection.execute(sql.DROP_REQUEST, values)
            return len(expired)

        return await self._database.write(run)


def _append_row(connection: Connection, row: dict[str, Any]) -> bool:
    statement = sql.APPEND_FIRST if "now" in row else sql.APPEND
    if connection.execute(statement, row).rowcount == 1:
        connection.execute(sql.LOG, row)
        return True
    return connection.execute(sql.HAS_ALREADY, row).fetchone() is not None


def _attached(connection: Connection, new: NewRequest) -> RequestRecord | None:
    """The request that kept `new` out: under the same idempotency key, or itself, written by an unclear commit."""
    if new.idempotency_key is not None:
        values = {"tenant": new.tenant, "idempotency_key": new.idempotency_key}
        found = connection.execute(sql.BY_IDEMPOTENCY_KEY, values).fetchone()
        if found is not None and found[0] != new.id:
            if found[1] != new.body_hash:
                raise Unprocessable(
                    "this Idempotency-Key was used for a request with another body: use a new key for a new request",
                    param="Idempotency-Key",
                    code="idempotency_key_reused",
                )
            return _record(connection.execute(sql.GET, {"id": found[0]}).fetchone())
    return None


def _is_running(connection: Connection, values: dict[str, Any]) -> bool:
    return connection.execute(sql.RUNNING, values).fetchone() is not None


def _close_attempt(
    connection: Connection,
    request_id: str,
    epoch: int,
    reason: str,
    device: DeviceTime | None,
    stages: StageTimes | None,
    now: int,
    *,
    running: bool = True,
) -> ledger.Subject:
    """End the attempt's row and charge its device time: the larger of what the log and the caller know, since both
    only grow."""
    row = connection.execute(sql.BILLED, {"id": request_id}).fetchone()
    tenant, key_id, function, revision, model, replica_id, prefill_us, decode_us, last_seq, _ = row
    subject = ledger.Subject(tenant, function, revision, key_id, model, request_id, epoch, replica_id)
    used = DeviceTime()
    if running:
        told = device or used
        used = DeviceTime(max(prefill_us, told.prefill_us), max(decode_us, told.decode_us))
        connection.execute(
            sql.CLOSE_ATTEMPT,
            {
                "id": request_id,
                "epoch": epoch,
                "now": now,
                "reason": reason,
                "last_seq": last_seq,
                "prefill_us": used.prefill_us,
                "decode_us": used.decode_us,
            },
        )
    prefill_wall_us, decode_wall_us = (stages.prefill_us, stages.decode_us) if stages else (0, 0)
    ledger.charge_attempt(connection, subject, used, now, prefill_wall_us, decode_wall_us)
    return subject


def _record(row: Sequence[Any]) -> RequestRecord:
    fixed: list[Any] = list(row)
    fixed[9] = bool(row[9])
    fixed[13] = RequestState(row[13])
    device = DeviceTime(row[23], row[24])
    ends = _decode_ends(row[25]) if row[25] else ()
    outcome = _decode_outcome(row[26]) if row[26] else None
    fixed[23:] = [device, ends, outcome, row[27] or b"", row[28] or b""]
    return RequestRecord(*fixed)


def _fresh(new: NewRequest, owner: str) -> RequestRecord:
    return RequestRecord(
        id=new.id,
        tenant=new.tenant,
        key_id=new.key_id,
        function=new.function,
        revision=new.revision,
        endpoint=new.endpoint,
        model=new.model,
        durability=new.durability,
        on_disconnect=new.on_disconnect,
        stream=new.stream,
        idempotency_key=new.idempotency_key,
        input_tokens=len(new.prompt) // 4,
        created_us=new.created_us,
        state=RequestState.QUEUED,
        owner=owner,
        epoch=0,
        last_seq=0,
        replica_id=None,
        slot_id=None,
        assigned_us=None,
        first_token_us=None,
        finished_us=None,
        cached_tokens=0,
        device=DeviceTime(),
        prefill_ends=(),
        outcome=None,
        params=new.params,
        prompt=new.prompt,
    )


def _attempt(row: Sequence[Any]) -> Attempt:
    fixed: list[Any] = list(row)
    fixed[11] = None if row[11] is None else bool(row[11])
    fixed[14:] = [DeviceTime(row[14], row[15])]
    return Attempt(*fixed)
