"""The durable record of every accepted request: its input, its log of tokens, who works on it under which epoch.

One gateway owns a request; each attempt has an epoch. Every write names both and takes effect only if the row still has
them: the condition is in the statement, so that it holds between gateways and on any database. Appends of all streams
that arrive while a commit is under way share the next one. Limits: a request with durability `off` has no token log;
its appends are granted from memory and a death of its gateway or replica is an honest error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

import msgspec

from control_plane import statements as sql
from control_plane.accounts import Charged, Entry, charge_request, nobody_charged
from control_plane.appends import AppendRow, Appends
from control_plane.database import Connection, Database
from control_plane.errors import Fenced, LeaseLapsed, NotFound, StorageUnavailable
from control_plane.history import History, decode_chunks, record_of, under_key
from control_plane.records import (
    Accepted,
    Attempt,
    NewRequest,
    Outcome,
    OutcomeError,
    RequestRecord,
    RequestState,
    StageTimes,
    fresh_record,
    pack_tokens,
    unpack_tokens,
)
from control_plane.retention import Retention
from control_plane.sealing import NOT_SEALED, RequestSeal, TenantKeys
from control_plane.settings import RetentionSettings
from control_plane.standing import Standing, device_entries, end_attempt, entries_of, standing, standing_of
from control_plane.tenant_rules import TenantRules
from function_runtime.protocol import Accepted as Taken
from function_runtime.protocol import Begun, DeviceTime, KvChunk

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

FORGET_ROWS: Final = 500
"""Deleted by one transaction: tokens of others wait for the writer, too."""
_encode: Final = msgspec.msgpack.Encoder().encode
_encode_json: Final = msgspec.json.Encoder().encode
_NOT_SAID: Final = Begun()


class _Live:
    """What this gateway must know of a request to write its log."""

    __slots__ = ("durable", "epoch", "last_seq", "logged", "seal")

    def __init__(self, durability: str, epoch: int, last_seq: int, seal: RequestSeal | None = None) -> None:
        self.seal = seal
        self.logged = durability != "off"
        self.durable = durability == "host"
        self.epoch = epoch
        self.last_seq = last_seq
        """Kept for requests without a log only."""


class _Bill:
    """What a transaction has charged of a request. It may run more than once; the last time counts."""

    __slots__ = ("_key_id", "_microusd", "_tenant")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._tenant = self._key_id = ""
        self._microusd = 0

    def charge(
        self, connection: Connection, seen: Standing, request_id: str, entries: Sequence[Entry], now: int
    ) -> None:
        self._tenant, self._key_id = seen.tenant, seen.key_id
        self._microusd = charge_request(connection, seen.subject(request_id), entries, now)

    def tell(self, charged: Charged) -> None:
        if self._microusd:
            charged(self._tenant, self._key_id, self._microusd)


@dataclass(frozen=True, slots=True)
class RetiredKv:
    packs: tuple[str, ...]
    """Keys of pack objects that may be deleted."""
    rows: tuple[tuple[str, int], ...]
    """(request id, number) of the rows that `forget_kv` drops."""


class Journal(History):
    def __init__(
        self,
        database: Database,
        gateway_id: str,
        retention: RetentionSettings | None = None,
        tenant_keys: TenantKeys | None = None,
    ) -> None:
        self.gateway_id = gateway_id
        super().__init__(database, tenant_keys)
        self._retention = retention or RetentionSettings()
        self.may_write: Callable[[], bool] = lambda: True
        """Whether this gateway holds its lease: without it nothing is begun, logged or ended, until it has it again."""
        self.on_charged: Charged = nobody_charged
        self._live: dict[str, _Live] = {}
        self._appends = Appends(database, gateway_id)
        self._keeping = Retention(database, self._retention, self._seal_of)
        self._doubtful: dict[str, int] = {}
        """Requests, and their epochs, whose acceptance was refused to the client and may have been written."""

    @property
    def patience_s(self) -> float:
        """How long readers wait for a database that is away."""
        return self._database.settings.patience_s

    # --- whose they are -----------------------------------------------------------------------------------------

    async def adopt(self, alive: Collection[str] = ()) -> list[RequestRecord]:
        """Make the unfinished requests of all gateways but those `alive` mine, and return all that are mine, as they
        lie there: `opened` gives what is sealed. A former owner that still lives is fenced from here on."""

        def run(connection: Connection) -> list[RequestRecord]:
            for (owner,) in connection.execute(sql.OWNERS_OF_LIVE).fetchall():
                if owner != self.gateway_id and owner not in alive:
                    connection.execute(sql.ADOPT, {"owner": owner, "me": self.gateway_id})
            rows = connection.execute(sql.MINE, {"me": self.gateway_id}).fetchall()
            return [record_of(row) for row in rows]

        return self._known(await self._database.write(run))

    def _known(self, records: list[RequestRecord]) -> list[RequestRecord]:
        """Nothing may fail between here and the move: what is to be read of each record is read for it alone."""
        for record in records:
            if not record.sealed:
                self._live.setdefault(record.id, self._live_of(record))
        return records

    async def opened(self, record: RequestRecord) -> RequestRecord:
        """A record that is mine now, with its input as it was given."""
        if record.sealed:
            (record,) = await self._all_opened([record])
            self._live.setdefault(record.id, self._live_of(record))
        return record

    def _live_of(self, record: RequestRecord) -> _Live:
        readable = record.params and not record.damaged
        seal = self._seal_of(record.tenant, record.sealed, record.id) if readable else None
        return _Live(record.durability, record.epoch, record.last_seq, seal)

    async def take_over(self, owners: Collection[str]) -> list[RequestRecord]:
        """Make the unfinished requests of these gateways mine while it runs; only those that were theirs until now are
        returned, oldest first, and so by one gateway only; `opened` gives what is sealed."""

        def run(connection: Connection) -> list[RequestRecord]:
            found: list[RequestRecord] = []
            for owner in owners:
                values = {"owner": owner, "me": self.gateway_id}
                for (request_id,) in connection.execute(sql.TAKE_OVER, values).fetchall():
                    found.append(record_of(connection.execute(sql.GET, {"id": request_id}).fetchone()))
            return sorted(found, key=lambda record: (record.created_us, record.id))

        records = await self._database.write(run)
        for record in records:
            self._live.pop(record.id, None)  # what was known of it before it was theirs
        return self._known(records)

    # --- accept, assign, requeue --------------------------------------------------------------------------------

    def accept(self, new: NewRequest, place: tuple[str, str] | None = None) -> Awaitable[Accepted]:
        """From here on the request is not lost. A known idempotency key attaches to the earlier request. `place`
        (replica, slot): with the same write its first attempt begins there, under epoch 1. The write is handed over
        before this returns: what the caller writes about the request from then on comes behind it."""
        replica_id, slot_id = place or (None, None)
        number = NOT_SEALED if self._tenant_keys is None else self._tenant_keys.number(new.tenant)
        seal = self._seal_of(new.tenant, number, new.id)
        params, prompt = new.params, new.prompt
        if seal is not None:
            params, prompt = seal.seal("params", params), seal.seal("prompt", prompt)
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
            "state": "queued" if place is None else "running",
            "me": self.gateway_id,
            "first_epoch": 0 if place is None else 1,
            "replica_id": replica_id,
            "slot_id": slot_id,
            "now": None if place is None else self._database.clock.now_us(),
            "sealed": number,
        }

        def run(connection: Connection) -> RequestRecord | None:
            if connection.execute(sql.ACCEPT, values).rowcount == 1:
                connection.execute(sql.ACCEPT_INPUT, {"id": new.id, "params": params, "prompt": prompt})
                if place is not None:
                    connection.execute(sql.OPEN_ATTEMPT, {**values, "epoch": 0, "last_seq": 0})
                return None
            return _attached(connection, new)

        if not self.may_write():
            return self._lapsed()
        self._live[new.id] = _Live(new.durability, 0 if place is None else 1, 0, seal)
        # Only an idempotency key can make it raise for a reason of its own.
        guarded = new.idempotency_key is not None
        if place is not None:
            self._appends.close()
        written = self._database.submit(run, durable=new.durability == "host", guarded=guarded)
        return self._accepted(new, written)

    async def _accepted(self, new: NewRequest, written: Awaitable[RequestRecord | None]) -> Accepted:
        try:
            earlier = await written
        except Exception as error:
            live = self._live.pop(new.id, None)
            if isinstance(error, StorageUnavailable) and error.unclear and live is not None:
                self._doubtful[new.id] = live.epoch
            raise
        if earlier is not None:
            del self._live[new.id]
            return Accepted((await self._all_opened([earlier]))[0], attached=True)
        return Accepted(fresh_record(new, self.gateway_id), attached=False)

    async def _lapsed(self) -> NoReturn:
        raise LeaseLapsed()

    async def _withdraw_doubtful(self) -> None:
        """The client was told 503 while nobody knew whether the commit took effect: if it did, nobody works on it."""
        for request_id, epoch in list(self._doubtful.items()):
            error = OutcomeError(503, "storage_unavailable", "the database went away while this was accepted", True)
            await self.finish(request_id, epoch, Outcome(RequestState.REFUSED, error=error))
            self._doubtful.pop(request_id, None)

    async def assign(self, request_id: str, replica_id: str, slot_id: str) -> int:
        """Begin an attempt: the epoch it runs under. An attempt that is still open is closed as replaced. Raises
        `Fenced` when the request has ended or another gateway owns it."""

        bill = _Bill()

        def run(connection: Connection) -> int:
            bill.clear()
            seen = standing(connection, request_id)
            if seen is None:
                raise NotFound(f"there is no request {request_id}")
            now = self._database.clock.now_us()
            values = {
                "id": request_id,
                "me": self.gateway_id,
                "epoch": seen.epoch,
                "replica_id": replica_id,
                "slot_id": slot_id,
                "now": now,
                "last_seq": seen.last_seq,
            }
            if connection.execute(sql.ASSIGN, values).rowcount != 1:
                raise Fenced(f"{request_id} is {seen.state} under {seen.owner}, not ours to assign")
            if seen.state is RequestState.RUNNING:
                used = end_attempt(connection, request_id, seen, "replaced", None, now)
                bill.charge(connection, seen, request_id, device_entries(used), now)
            connection.execute(sql.OPEN_ATTEMPT, values)
            return seen.epoch + 1

        if not self.may_write():
            raise LeaseLapsed()
        live = self._live.get(request_id)
        self._appends.hand_over()
        begun = await self._database.write(run, durable=live is not None and live.durable)
        bill.tell(self.on_charged)
        if live is not None:
            live.epoch = begun
        return begun

    async def requeue(self, request_id: str, epoch: int, reason: str, device: DeviceTime | None = None) -> bool:
        """The attempt ended without an outcome; what it used of the device is charged. False when fenced."""

        bill = _Bill()

        def run(connection: Connection) -> bool:
            bill.clear()
            seen = standing(connection, request_id)
            values = {"id": request_id, "me": self.gateway_id, "epoch": epoch}
            if seen is None or connection.execute(sql.REQUEUE, values).rowcount != 1:
                return False
            now = self._database.clock.now_us()
            used = end_attempt(connection, request_id, seen, reason, device, now)
            bill.charge(connection, seen, request_id, device_entries(used), now)
            return True

        self._appends.hand_over()
        requeued = await self._database.write(run)
        bill.tell(self.on_charged)
        return requeued

    async def taken(self, accepted: Taken) -> int | None:
        """What the replica said on taking the request: how much of it was resumed from stored KV, how exactly. After
        which token the attempt went on; None where it was written before (a replica says it to every gateway)."""
        values = {
            "id": accepted.request_id,
            "epoch": accepted.epoch,
            "loaded_tokens": accepted.loaded_tokens,
            "recomputed_tokens": accepted.recomputed_tokens,
            "exact": int(accepted.exact),
            "load_us": accepted.load_us,
            "detail": accepted.detail,
        }
        row = await self._database.submit(
            lambda connection: connection.execute(sql.TAKEN, values).fetchone(), guarded=False
        )
        return None if row is None else int(row[0])

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
        prefill_ends: tuple[int, ...] = (),
        begun: Begun = _NOT_SAID,
    ) -> Awaitable[bool]:
        """Write `count` tokens (msgpack of a list of `TokenEvent`) at `first_seq`; True once they are committed, or
        when they were already. False: the epoch or the owner is no longer valid, or there is a gap."""
        if not self.may_write():
            refused: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            refused.set_exception(LeaseLapsed())
            return refused
        live = self._live.get(request_id)
        if live is not None and not live.logged:
            future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            granted = live.epoch == epoch and live.last_seq == first_seq - 1
            if granted:
                live.last_seq += count
            future.set_result(granted)
            return future
        if live is not None and live.seal is not None:
            payload = live.seal.seal(f"log/{first_seq}", payload)
        durable = live is not None and live.durable
        last_seq = first_seq + count - 1
        if first_seq > 1:
            row = AppendRow(request_id, epoch, first_seq, last_seq, payload, device.prefill_us, device.decode_us)
        else:
            ends = _encode(prefill_ends) if prefill_ends else None
            row = AppendRow(
                request_id, epoch, first_seq, last_seq, payload, device.prefill_us, device.decode_us, cached_tokens,
                self._database.clock.now_us(), ends, None if begun == _NOT_SAID else _encode_json(begun).decode(),
            )  # fmt: skip
        return self._appends.add(row, durable=durable)

    # --- durable KV -------------------------------------------------------------------------------------------

    async def seal_kv(self, request_id: str, epoch: int, chunks: Sequence[KvChunk]) -> bool:
        """Remember chunks that are durable now. False when fenced: they are then only remembered to be deleted."""
        values = {"id": request_id, "me": self.gateway_id, "epoch": epoch, "chunks": _encode(list(chunks))}
        (counted,) = await self._database.submit(
            lambda connection: connection.execute(sql.SEAL, values).fetchone(), guarded=False
        )
        return bool(counted)

    async def retired_kv(self, limit: int = 256) -> RetiredKv:
        """Packs that no live request counts on any more. Delete the objects first, then `forget_kv`."""

        def run(connection: Connection) -> RetiredKv:
            retired = connection.execute(sql.RETIRED_KV, {"limit": limit}).fetchall()
            if not retired:
                return RetiredKv((), ())
            packs = {chunk.pack for row in retired for chunk in decode_chunks(row[2])}
            for (payload,) in connection.execute(sql.LIVE_KV).fetchall():
                packs.difference_update(chunk.pack for chunk in decode_chunks(payload))
            return RetiredKv(tuple(sorted(packs)), tuple((str(row[0]), int(row[1])) for row in retired))

        return await self._database.read(run)

    async def forget_kv(self, retired: RetiredKv) -> None:
        rows = [{"id": request_id, "number": number} for request_id, number in retired.rows]
        for at in range(0, len(rows), FORGET_ROWS):
            await self._database.write(partial(_forget_kv, rows=rows[at : at + FORGET_ROWS]))

    # --- the end ------------------------------------------------------------------------------------------------

    async def finish(self, request_id: str, epoch: int, outcome: Outcome) -> bool:
        """Outcome, usage and ledger rows in one transaction. True also when this very end was written before; False
        when fenced. Raises `StorageUnavailable` (try again) while an append that precedes it is not in the log."""
        payload = _encode(outcome)
        kept_us = None if outcome.kept_s is None else round(outcome.kept_s * 1e6)
        log_us = round(self._retention.log_s * 1e6)

        bill = _Bill()

        def run(connection: Connection) -> bool | None:
            bill.clear()
            now = self._database.clock.now_us()
            values = {
                "id": request_id,
                "me": self.gateway_id,
                "epoch": epoch,
                "state": outcome.state.value,
                "outcome": payload,
                "now": now,
                "kept_us": kept_us,
                "log_us": log_us,
                "last_seq": outcome.last_seq,
            }
            seen = standing_of(connection.execute(sql.FINISH, values).fetchone())
            if seen is None:
                found = standing(connection, request_id)
                if found is None or (found.owner, found.epoch) != (self.gateway_id, epoch):
                    return False
                return True if found.state.ended else None
            used = end_attempt(connection, request_id, seen, outcome.state.value, outcome.device, now)
            bill.charge(connection, seen, request_id, entries_of(outcome, used), now)
            return True

        if not self.may_write():
            raise LeaseLapsed()
        live = self._live.get(request_id)
        self._appends.hand_over()
        written = await self._database.submit(run, durable=live is not None and live.durable, guarded=False)
        if written is None:
            raise StorageUnavailable(
                f"the log of {request_id} does not have all of its {outcome.last_seq} tokens yet; they come first"
            )
        self._live.pop(request_id, None)
        bill.tell(self.on_charged)
        if written:
            self._keeping.ended(request_id)
        return written

    @property
    def rules(self) -> TenantRules:
        """How long tenants keep what is theirs."""
        return self._keeping.rules

    async def prepare(self) -> None:
        """Before the first request."""
        await self._keeping.prepare()

    async def tidy(self) -> int:
        """Bring logs of ended requests into one row each, a few at a time; how many were looked at."""
        await self._withdraw_doubtful()
        return await self._keeping.compact()

    async def sweep(self, limit: int = 200) -> int:
        """Drop what retention no longer keeps, a little at a time; how much there was to do."""
        return await self._keeping.sweep(limit)

    async def delete(self, request_id: str, tenant: str) -> None:
        """Forget an ended request of a tenant, except in the ledger. Raises `Conflict` while it runs."""
        await self._keeping.delete(request_id, tenant)


def _forget_kv(connection: Connection, rows: Sequence[dict[str, object]]) -> None:
    connection.executemany(sql.FORGET_KV, rows)


def _attached(connection: Connection, new: NewRequest) -> RequestRecord | None:
    """The request that kept `new` out: under the same idempotency key, or itself, written by an unclear commit."""
    if new.idempotency_key is None:
        return None
    found = under_key(connection, new.tenant, new.idempotency_key, new.body_hash)
    return None if found is None or found.id == new.id else found
