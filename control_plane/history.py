"""Reading the journal: requests, their logs, their attempts, the KV a resume may load.

Every answer is one read transaction. What is sealed is opened here. A record that does not open or cannot be read says
so (`damaged`) and stops none of those that were read with it. Limits: what retention has dropped is gone (an empty log,
empty input), while the request's row and its ledger rows stay longer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from control_plane import statements as sql
from control_plane.database import Connection, Database
from control_plane.errors import Damaged, KeyDeleted, Unprocessable
from control_plane.records import Attempt, Outcome, RequestRecord, RequestState
from control_plane.sealing import RequestSeal, TenantKeys
from function_runtime.protocol import Begun, DeviceTime, KvChunk, TokenEvent

logger = logging.getLogger(__name__)

_decode_events: Final = msgspec.msgpack.Decoder(list[TokenEvent]).decode
_decode_ends: Final = msgspec.msgpack.Decoder(tuple[int, ...]).decode
_decode_begun: Final = msgspec.json.Decoder(Begun).decode
_decode_outcome: Final = msgspec.msgpack.Decoder(Outcome).decode
_decode_chunks: Final = msgspec.msgpack.Decoder(list[KvChunk]).decode


def decode_chunks(payload: bytes) -> list[KvChunk]:
    """None of them where the row cannot be read: nobody can load by it, so it holds nothing."""
    try:
        return _decode_chunks(payload)
    except msgspec.MsgspecError as error:
        logger.error("event=kv_row_damaged bytes=%d error=%s", len(payload), error)
        return []


class History:
    def __init__(self, database: Database, tenant_keys: TenantKeys | None = None) -> None:
        self._database = database
        self._tenant_keys = tenant_keys

    def _seal_of(self, tenant: str, number: int, request_id: str) -> RequestSeal | None:
        """None: in the clear. Raises `KeyDeleted`."""
        return None if self._tenant_keys is None else self._tenant_keys.seal_of(tenant, number, request_id)

    async def _learn_keys(self, sealed: Iterable[tuple[str, int]]) -> None:
        """A key that was set through another gateway is read now: what is not known is not yet deleted."""
        keys = self._tenant_keys
        if keys is not None and not all(keys.knows(tenant, number) for tenant, number in sealed):
            await keys.refresh()

    async def _all_opened(self, records: list[RequestRecord]) -> list[RequestRecord]:
        await self._learn_keys((record.tenant, record.sealed) for record in records)
        return [self._opened(record) for record in records]

    def _opened(self, record: RequestRecord) -> RequestRecord:
        """With its input as it was given. What was sealed with a deleted key is gone like what retention dropped."""
        if not record.sealed or not record.params:
            return record
        try:
            seal = self._seal_of(record.tenant, record.sealed, record.id)
            if seal is None:
                return record
            params, prompt = seal.open("params", record.params), seal.open("prompt", record.prompt)
        except KeyDeleted:
            return replace(record, params=b"", prompt=b"")
        except Damaged as error:
            logger.error("event=record_damaged request=%s error=%s", record.id, error)
            return replace(record, params=b"", prompt=b"", damaged=str(error))
        return replace(record, params=params, prompt=prompt)

    async def log(self, request_id: str, after_seq: int = 0) -> list[TokenEvent]:
        """The tokens behind `after_seq`, in order. Raises `Damaged`."""

        def run(connection: Connection) -> tuple[Any, list[Any]]:
            sealed = connection.execute(sql.SEALED, {"id": request_id}).fetchone()
            return sealed, connection.execute(sql.READ_LOG, {"id": request_id, "after": after_seq}).fetchall()

        events: list[TokenEvent] = []
        sealed, rows = await self._database.read(run)
        if sealed is None:
            return events
        await self._learn_keys([(sealed[0], sealed[1])])
        try:
            seal = self._seal_of(sealed[0], sealed[1], request_id)
        except KeyDeleted:
            return events
        for first_seq, payload in rows:
            try:
                decoded = _decode_events(payload if seal is None else seal.open(f"log/{first_seq}", bytes(payload)))
            except msgspec.MsgspecError as error:
                raise Damaged(f"the log of {request_id} cannot be read from token {first_seq} on: {error}") from error
            events.extend(decoded[after_seq + 1 - first_seq :] if first_seq <= after_seq else decoded)
        return events

    async def get(self, request_id: str, tenant: str | None = None) -> RequestRecord | None:
        """`tenant` given: only if it is the tenant's own."""
        query = sql.GET if tenant is None else sql.GET_OF_TENANT
        values = {"id": request_id, "tenant": tenant}
        row = await self._database.read(lambda connection: connection.execute(query, values).fetchone())
        return None if row is None else (await self._all_opened([record_of(row)]))[0]

    async def under_key(self, tenant: str, key: str, body_hash: bytes) -> RequestRecord | None:
        """The request that was accepted under this idempotency key. Raises `Unprocessable` if for another body."""
        found = await self._database.read(lambda connection: under_key(connection, tenant, key, body_hash))
        return None if found is None else (await self._all_opened([found]))[0]

    async def whose(self, request_ids: Collection[str]) -> dict[str, tuple[str, int, RequestState]]:
        """(owner, epoch, state) of those that are known."""

        def run(connection: Connection) -> dict[str, tuple[str, int, RequestState]]:
            found = {}
            for request_id in request_ids:
                row = connection.execute(sql.WHOSE, {"id": request_id}).fetchone()
                if row is not None:
                    found[request_id] = (str(row[0]), int(row[1]), RequestState(row[2]))
            return found

        return await self._database.read(run)

    async def recent(self, function: str, limit: int = 20) -> list[RequestRecord]:
        values = {"function": function, "limit": limit}
        rows = await self._database.read(lambda connection: connection.execute(sql.RECENT, values).fetchall())
        return await self._all_opened([record_of(row) for row in rows])

    async def attempts(self, request_id: str) -> list[Attempt]:
        values = {"id": request_id}
        rows = await self._database.read(lambda connection: connection.execute(sql.ATTEMPTS, values).fetchall())
        return [attempt_of(row) for row in rows]

    async def attempts_of_replica(self, replica_id: str, limit: int = 50) -> list[tuple[str, int]]:
        """(request id, epoch), newest first."""
        values = {"replica_id": replica_id, "limit": limit}
        rows = await self._database.read(
            lambda connection: connection.execute(sql.ATTEMPTS_OF_REPLICA, values).fetchall()
        )
        return [(str(request_id), int(epoch)) for request_id, epoch in rows]

    async def kv(self, request_id: str) -> list[KvChunk]:
        """What a resume may load; of a range that was written twice in the same way, the later one."""
        values = {"id": request_id}
        rows = await self._database.read(lambda connection: connection.execute(sql.READ_KV, values).fetchall())
        chunks: dict[tuple[int, int, int, str], KvChunk] = {}
        for (payload,) in rows:
            for chunk in decode_chunks(payload):
                chunks[chunk.choice, chunk.start, chunk.end, chunk.lineage] = chunk
        return list(chunks.values())


def under_key(connection: Connection, tenant: str, key: str, body_hash: bytes | None) -> RequestRecord | None:
    values = {"tenant": tenant, "idempotency_key": key}
    found = connection.execute(sql.BY_IDEMPOTENCY_KEY, values).fetchone()
    if found is None:
        return None
    if found[1] != body_hash:
        raise Unprocessable(
            "this Idempotency-Key was used for a request with another body: use a new key for a new request",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )
    return record_of(connection.execute(sql.GET, {"id": found[0]}).fetchone())


def record_of(row: Sequence[Any]) -> RequestRecord:
    """Never raises for what is written in the row: a batch is read for all that are in it."""
    fixed: list[Any] = list(row)
    fixed[9] = bool(row[9])
    fixed[13] = RequestState(row[13])
    device = DeviceTime(row[23], row[24])
    damaged = ""
    ends: tuple[int, ...] = ()
    begun = Begun()
    outcome: Outcome | None = None
    try:
        ends = _decode_ends(row[25]) if row[25] else ()
        outcome = _decode_outcome(row[26]) if row[26] else None
        begun = _decode_begun(row[30]) if row[30] else begun
    except msgspec.MsgspecError as error:
        damaged = f"its row cannot be read: {error}"
        logger.error("event=record_damaged request=%s error=%s", row[0], error)
    fixed[23:] = [device, ends, outcome, bytes(row[27] or b""), bytes(row[28] or b""), row[29], damaged, begun]
    return RequestRecord(*fixed)


def attempt_of(row: Sequence[Any]) -> Attempt:
    fixed: list[Any] = list(row)
    fixed[11] = None if row[11] is None else bool(row[11])
    fixed[14:] = [DeviceTime(row[14], row[15])]
    return Attempt(*fixed)
