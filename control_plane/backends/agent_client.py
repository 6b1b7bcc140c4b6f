"""HTTP client of one agent: commands as JSON, events as a stream of NDJSON lines.

Limits: one session per agent incarnation; an event line may have at most `EVENT_BYTES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import aiohttp
import msgspec

from control_plane.backends.base import SlotRefused, SlotUnavailable
from function_runtime.protocol import AgentInfo, Peer, ReplicaSpec, ReplicaStatus, SlotEvent, peer_token

if TYPE_CHECKING:
    from model_loader.portable import Part

CALL_S: Final = 10.0
SILENCE_S: Final = 10.0
"""The agent sends something every second; this long without is a dead connection, or a machine out of breath."""
EVENT_BYTES: Final = 16 * 1024 * 1024
MANIFEST_S: Final = 120.0


class _Fault(msgspec.Struct):
    code: str
    message: str
    retry: bool


class _Refusal(msgspec.Struct):
    error: _Fault


def _refusal(status: int, answer: bytes) -> SlotUnavailable:
    try:
        fault = msgspec.json.decode(answer, type=_Refusal).error
    except msgspec.MsgspecError:
        return SlotUnavailable(f"the agent answered {status}: {answer[:300].decode(errors='replace')}")
    if fault.retry or status >= 500:
        return SlotUnavailable(f"{fault.code}: {fault.message}", fault.code)
    return SlotRefused(fault.code, fault.message)


_events = msgspec.json.Decoder(SlotEvent)
_status = msgspec.json.Decoder(ReplicaStatus)


class _Silence:
    """Closes a response on which nothing has come for `SILENCE_S`: one timer, however much comes."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def broken(self) -> None:
        """Something has come."""
        self._heard_s = self._loop.time()

    def _look(self) -> None:
        left_s = self._heard_s + SILENCE_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._response.content.set_exception(TimeoutError(f"silent for {SILENCE_S:g} s"))
            self._response.close()

    def __enter__(self) -> _Silence:
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class AgentClient:
    """Use as an async context manager."""

    def __init__(self, info: AgentInfo) -> None:
        self.info = info
        host = f"[{info.host}]" if ":" in info.host else info.host
        self._base = f"http://{host}:{info.port}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AgentClient:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.info.token}"},
            timeout=aiohttp.ClientTimeout(total=CALL_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, enable_cleanup_closed=False),
            read_bufsize=EVENT_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def events(self) -> AsyncIterator[SlotEvent]:
        """Until the connection ends. Raises SlotUnavailable."""
        # NOTE: no timeout of the client's own, which would be set anew with each of hundreds of lines a second.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S)
        try:
            async with asyncio.timeout(SILENCE_S):
                response = await self._get_session().get(f"{self._base}/v1/events", timeout=timeout)
            async with response:
                if response.status != 200:
                    raise SlotUnavailable(f"the agent answered {response.status}: {await response.text()}")
                with _Silence(response) as silence:
                    async for line in response.content:
                        silence.broken()
                        line = line.strip()
                        if line:
                            yield _events.decode(line)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError, ValueError) as error:
            raise SlotUnavailable(f"the agent's events broke off: {error or type(error).__name__}") from error

    async def start_replica(self, spec: ReplicaSpec) -> ReplicaStatus:
        body = await self._call("POST", "/v1/replicas", msgspec.json.encode(spec))
        return _status.decode(body)

    async def end_replica(self, replica_id: str, grace_s: float, reason: str) -> None:
        await self._call("DELETE", f"/v1/replicas/{quote(replica_id)}?grace_s={grace_s}&reason={quote(reason)}")

    async def warm(self, workers: int) -> None:
        await self._call("POST", "/v1/warm", msgspec.json.encode({"workers": workers}))

    @property
    def as_peer(self) -> Peer:
        """How another slot reads this one's pool."""
        return Peer(self._base, peer_token(self.info.token))

    async def warm_pool(self, manifest_path: str, dtype: str, peers: Sequence[Peer], **elsewhere: str) -> None:
        body: dict[str, Any] = {"manifest_path": manifest_path, "dtype": dtype, "peers": peers, **elsewhere}
        await self._call("POST", "/v1/pool/warm", msgspec.json.encode(body), timeout_s=600.0)

    async def renew_store(self, tokens: Mapping[str, str]) -> None:
        """By replica."""
        await self._call("POST", "/v1/store-tokens", msgspec.json.encode({"tokens": tokens}))

    async def resize_kv(self, kv_bytes: Mapping[str, int]) -> None:
        """By replica."""
        await self._call("POST", "/v1/kv-shares", msgspec.json.encode({"kv_bytes": kv_bytes}))

    async def evict_pool(self, key: str) -> None:
        await self._call("DELETE", f"/v1/pool/{quote(key, safe='')}")

    async def forget_checkpoint(self, identity: str) -> None:
        await self._call("DELETE", f"/v1/checkpoints/{quote(identity, safe='')}")

    async def expect_pool(self, chances: Mapping[str, float], holds_s: float) -> None:
        await self._call("POST", "/v1/pool/forecast", msgspec.json.encode({"chances": chances, "holds_s": holds_s}))

    async def put_manifest(self, identity: str, parts: Sequence[Part]) -> None:
        """Sends a checkpoint's manifest and what lies beside it to a slot that has no folder of ours."""

        async def body() -> AsyncIterator[bytes]:
            yield msgspec.json.encode([(part.name, part.nbytes) for part in parts]) + b"\n"
            for part in parts:
                yield await asyncio.to_thread(part.read)

        path = f"/v1/checkpoints/{quote(identity, safe='')}/manifest"
        await self._call("PUT", path, body(), timeout_s=MANIFEST_S)

    async def replica_log(self, replica_id: str, tail_lines: int) -> str:
        body = await self._call("GET", f"/v1/replicas/{quote(replica_id)}/log?tail={tail_lines}")
        return body.decode(errors="replace")

    async def shutdown(self, grace_s: float, *, if_idle: bool = False) -> None:
        """`if_idle`: raises SlotRefused where there is a replica."""
        body: dict[str, Any] = {"grace_s": grace_s, **({"if_idle": True} if if_idle else {})}
        await self._call("POST", "/v1/shutdown", msgspec.json.encode(body), timeout_s=grace_s + CALL_S)

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise SlotUnavailable("the agent's client is closed")
        return self._session

    async def _call(
        self, method: str, path: str, body: bytes | AsyncIterator[bytes] | None = None, timeout_s: float = CALL_S
    ) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with self._get_session().request(
                method, self._base + path, data=body, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                answer = await response.read()
                if response.status >= 400:
                    raise _refusal(response.status, answer)
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SlotUnavailable(f"{method} {path}: {error or type(error).__name__}") from error
