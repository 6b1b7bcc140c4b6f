"""The agent's HTTP face: JSON with a bearer token on the agent's address, events as NDJSON.

Bodies are the structures of `function_runtime.protocol`; errors are {"error": {"code", "message", "retry"}}. Without a
token there is only `GET /v1/health`: 200 "ok", or 503 "terminating".
Limits: a request body has at most `MAX_BODY_BYTES`; a stream whose reader is stuck holds no lease once writes block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from function_runtime.agent.access import Access
from function_runtime.agent.slot import Slot
from function_runtime.agent.watch import Watch
from function_runtime.errors import SlotError, SpecError
from function_runtime.protocol import Peer, ReplicaSpec, SlotEvent
from model_loader.errors import LoaderError

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
MAX_LOG_LINES: Final = 10_000
_LOG_TAIL_BYTES: Final = 2 * 1024 * 1024
_STALLED_WRITE_S: Final = 10.0
HEALTH: Final = "/v1/health"
POOL_ENTRY: Final = "/v1/pool/{key}"
POOL_BYTES: Final = "/v1/pool/{key}/bytes"
T = TypeVar("T")


class WarmTarget(msgspec.Struct, frozen=True):
    workers: int


class PoolWish(msgspec.Struct, frozen=True):
    manifest_path: str
    dtype: str
    peers: tuple[Peer, ...] = ()
    identity: str = ""
    manifest_sha256: str = ""
    store_token: str = ""
    """As in `ReplicaSpec`."""


class NewStoreTokens(msgspec.Struct, frozen=True):
    tokens: dict[str, str]
    """By replica; those of replicas that are no more mean nothing."""


class KvShares(msgspec.Struct, frozen=True):
    kv_bytes: dict[str, int]
    """By replica; those of replicas that do not serve mean nothing."""


class PoolForecast(msgspec.Struct, frozen=True):
    chances: dict[str, float]
    """By checkpoint identity."""
    holds_s: float


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """NOTE: a condition that is not known is refused, and not passed over: a slot ended in spite of it is no slot."""

    grace_s: float = 10.0
    if_idle: bool = False
    """Refused while there is a replica, whatever state it is in; once it is not, none is started any more."""


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, code: str, message: str, *, retry: bool) -> web.Response:
    return _json({"error": {"code": code, "message": message, "retry": retry}}, status)


class AgentServer:
    def __init__(self, slot: Slot, watch: Watch, access: Access) -> None:
        self._slot = slot
        self._watch = watch
        self._access = access
        self.shutdown_wanted: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes([
            web.post("/v1/replicas", self.start_replica),
            web.delete("/v1/replicas/{id}", self.end_replica),
            web.get("/v1/replicas/{id}", self.read_replica),
            web.get("/v1/replicas/{id}/log", self.read_log),
            web.get(HEALTH, self.read_health),
            web.get("/v1/state", self.read_state),
            web.get("/v1/events", self.stream_events),
            web.post("/v1/warm", self.set_warm),
            web.post("/v1/pool/warm", self.warm_pool),
            web.post("/v1/store-tokens", self.renew_store),
            web.post("/v1/kv-shares", self.resize_kv),
            web.post("/v1/pool/forecast", self.expect),
            web.get(POOL_ENTRY, self.read_entry),
            web.get(POOL_BYTES, self.read_bytes),
            web.delete("/v1/pool/{key}", self.evict),
            web.delete("/v1/checkpoints/{identity}", self.forget),
            web.put("/v1/checkpoints/{identity}/manifest", self.take_manifest),
            web.post("/v1/shutdown", self.shut_down),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        resource = request.match_info.route.resource
        asked = resource.canonical if resource is not None and request.method in ("GET", "HEAD") else ""
        as_peer = asked in (POOL_ENTRY, POOL_BYTES) and self._access.is_peer(given)
        if asked != HEALTH and not as_peer and not self._access.is_command(given):
            return _error(401, "unauthenticated", "the agent's bearer token is required", retry=False)
        try:
            return await handler(request)
        except SpecError as error:
            return _error(400, error.code, error.message, retry=False)
        except SlotError as error:
            return _error(503 if error.retry else 422, error.code, error.message, retry=error.retry)
        except LoaderError as error:
            return _error(503 if error.retry else 422, error.code, str(error), retry=error.retry)
        except msgspec.MsgspecError as error:
            return _error(400, "invalid_body", str(error), retry=False)

    async def start_replica(self, request: web.Request) -> web.Response:
        spec = await _body(request, ReplicaSpec)
        return _json(self._slot.start_replica(spec))

    async def end_replica(self, request: web.Request) -> web.Response:
        grace_s = _number(request, "grace_s", 30.0)
        status = self._slot.end_replica(request.match_info["id"], grace_s, request.query.get("reason", "asked"))
        return _json(status) if status is not None else _unknown(request)

    async def read_replica(self, request: web.Request) -> web.Response:
        replica = self._slot.get(request.match_info["id"])
        return _json(replica.status()) if replica is not None else _unknown(request)

    async def read_log(self, request: web.Request) -> web.Response:
        if self._slot.get(request.match_info["id"]) is None:
            return _unknown(request)
        lines = min(MAX_LOG_LINES, max(0, int(_number(request, "tail", 200))))
        path = self._slot.log_directory / f"{request.match_info['id']}.log"

        def tail() -> bytes:
            try:
                with path.open("rb") as file:
                    size = file.seek(0, 2)
                    file.seek(max(0, size - _LOG_TAIL_BYTES))
                    return b"".join(file.readlines()[-lines:]) if lines else b""
            except FileNotFoundError:
                return b""

        return web.Response(body=await asyncio.to_thread(tail), content_type="text/plain", charset="utf-8")

    async def read_health(self, request: web.Request) -> web.Response:
        """For probes: nobody is told more than that it lives."""
        return web.Response(status=503, text="terminating") if self._slot.closing else web.Response(text="ok")

    async def read_state(self, request: web.Request) -> web.Response:
        return _json(self._slot.state())

    async def stream_events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        encode = msgspec.json.Encoder().encode
        with self._slot.events.listen() as queue:
            event: SlotEvent | None = SlotEvent(state=self._slot.state())
            try:
                while event is not None:
                    async with asyncio.timeout(_STALLED_WRITE_S):
                        await response.write(encode(event) + b"\n")
                    self._watch.stream_was_read()
                    event = await queue.get()
            except (ConnectionError, TimeoutError):
                # The reader is gone or stuck; it begins anew with the whole state.
                pass
        return response

    async def set_warm(self, request: web.Request) -> web.Response:
        wish = await _body(request, WarmTarget)
        if not 0 <= wish.workers <= 64:
            raise SpecError(f"workers is {wish.workers}, allowed are 0 to 64")
        self._slot.workers.set_target(wish.workers)
        return _json(self._slot.state())

    async def warm_pool(self, request: web.Request) -> web.Response:
        wish = await _body(request, PoolWish)
        path = wish.manifest_path
        if wish.manifest_sha256:
            path = str(self._slot.manifests.find(wish.identity, wish.manifest_sha256))
        if wish.store_token:
            self._slot.pool.use_store(wish.store_token, path)
        checkpoint = await self._slot.pool.warm(path, wish.dtype, wish.peers)
        return _json({"path": checkpoint.path, "tier": checkpoint.tier, "nbytes": checkpoint.nbytes})

    async def renew_store(self, request: web.Request) -> web.Response:
        given = await _body(request, NewStoreTokens)
        return _json({"taken": self._slot.renew_store(given.tokens)})

    async def resize_kv(self, request: web.Request) -> web.Response:
        given = await _body(request, KvShares)
        if any(share <= 0 for share in given.kv_bytes.values()):
            raise SpecError("a share of KV memory must be above 0")
        return _json({"taken": self._slot.resize_kv(given.kv_bytes)})

    async def expect(self, request: web.Request) -> web.Response:
        forecast = await _body(request, PoolForecast)
        if not 0 < forecast.holds_s <= 86_400:
            raise SpecError(f"holds_s is {forecast.holds_s}, allowed is up to 86400")
        self._slot.pool.expect(forecast.chances, forecast.holds_s)
        self._slot.slot_changed()
        return _json({"taken": len(forecast.chances)})

    async def evict(self, request: web.Request) -> web.Response:
        return _json({"nbytes": await self._slot.pool.evict(request.match_info["key"])})

    async def forget(self, request: web.Request) -> web.Response:
        identity = request.match_info["identity"]
        nbytes = await self._slot.pool.forget(identity)
        if not any(replica.spec.identity == identity for replica in self._slot.live):
            await self._slot.manifests.forget(identity)
        return _json({"nbytes": nbytes})

    async def take_manifest(self, request: web.Request) -> web.Response:
        await self._slot.manifests.take(request.match_info["identity"], request.content)
        return _json({"taken": True})

    async def read_entry(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        entry = next((entry for entry in self._slot.pool.entries() if entry.key == key), None)
        if entry is None or entry.state != "ready":
            return _error(404, "pool_entry_unknown", f"the pool holds nothing ready under {key!r}", retry=True)
        return _json(entry)

    async def read_bytes(self, request: web.Request) -> web.StreamResponse:
        """A prepared form by HTTP ranges, to another slot's agent. It is held while it is read."""
        return _LentFile(self._slot.pool.lend(request.match_info["key"]))

    async def shut_down(self, request: web.Request) -> web.Response:
        wish = await _body(request, Shutdown)
        if wish.if_idle:
            self._slot.close_if_idle()
        if not self.shutdown_wanted.done():
            self.shutdown_wanted.set_result(wish.grace_s)
        return _json({"ending": True})


class _LentFile(web.FileResponse):
    """Sent by the server after the handler has returned, which is why it holds the lease itself."""

    def __init__(self, lent: AbstractContextManager[Path]) -> None:
        self._lease = contextlib.ExitStack()
        super().__init__(self._lease.enter_context(lent), chunk_size=1 << 20)

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._lease:
            return await super().prepare(request)


async def _body(request: web.Request, kind: type[T]) -> T:
    return msgspec.json.decode(await request.read() or b"{}", type=kind)


def _number(request: web.Request, name: str, default: float) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise SpecError(f"{name} must be a number from 0 to 86400")
    return value


def _unknown(request: web.Request) -> web.Response:
    return _error(404, "replica_unknown", f"no replica {request.match_info['id']} here", retry=False)
