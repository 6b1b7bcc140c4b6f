"""Values the storage tests are made of."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from control_plane.database import Connection, Database
from control_plane.journal import NewRequest, Outcome, RequestState, pack_tokens
from function_runtime.protocol import (
    DeviceTime,
    EngineOptions,
    KvChunk,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    ReplicaTime,
    TokenEvent,
)


def new_request(**given: Any) -> NewRequest:
    values: dict[str, Any] = {
        "id": f"chatcmpl-{secrets.token_hex(16)}",
        "tenant": "default",
        "key_id": "key_1",
        "function": "smol",
        "revision": 1,
        "endpoint": "chat",
        "model": "smol",
        "params": b"params",
        "prompt": pack_tokens((1, 2, 3)),
        "on_disconnect": "cancel",
        "stream": True,
        "durability": "process",
        "created_us": 1_000_000,
    }
    return NewRequest(**{**values, **given})


def events(first_seq: int, count: int) -> tuple[bytes, list[TokenEvent]]:
    """Tokens whose ids are their places, so that a test sees any gap, double or change."""
    made = [TokenEvent(choice=0, token_id=seq, text=f"t{seq}") for seq in range(first_seq, first_seq + count)]
    return msgspec.msgpack.encode(made), made


def chunk(start: int, end: int, pack: str = "pack") -> KvChunk:
    return KvChunk(0, start, end, f"kv/packs/{pack}", 0, 10, "d" * 64, "c" * 64)


def done(last_seq: int | None = None, **given: Any) -> Outcome:
    return Outcome(RequestState.DONE, last_seq=last_seq, **given)


def replica_status(
    replica_id: str = "rep-1",
    *,
    time: ReplicaTime | None = None,
    function: str = "smol",
    revision: int = 1,
    tenant: str = "default",
) -> ReplicaStatus:
    spec = ReplicaSpec(replica_id, function, revision, tenant, "/manifest", "identity", EngineOptions())
    return ReplicaStatus(replica_id, function, revision, ReplicaState.ENDED, spec, time=time or ReplicaTime())


async def set_price(database: Database, microusd_per_hour: int, function: str = "smol", revision: int = 1) -> None:
    """A revision with a price, without going through the function store."""

    def run(connection: Connection) -> None:
        connection.execute(
            """INSERT INTO revisions (tenant, function, revision, spec, digest, price_microusd_per_hour, created_us,
            state) VALUES ('default', ?, ?, '{}', '', ?, 0, 'ready')""",
            (function, revision, microusd_per_hour),
        )

    await database.write(run)


def used(prefill_us: int, decode_us: int) -> DeviceTime:
    return DeviceTime(prefill_us, decode_us)


def query(sql: str, *parameters: Any) -> Callable[[Connection], list[Any]]:
    return lambda connection: connection.execute(sql, parameters).fetchall()


def database_path(directory: Path) -> Path:
    return directory / "data" / "stoker.db"
