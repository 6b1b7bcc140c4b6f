"""What gateways say to one another over HTTP, under a token that only holders of the database can derive.

    changed   something in the database is worth another look (gateways, functions, keys, slots)
    demand    who waits and what runs here, for whoever leads the control loop; answered with what cannot be served
    left      a client that read a request of the other's through this gateway has gone away

Requests of clients that another gateway owns are forwarded with the same token (`gateway.relay`). Limits: a message
that is lost costs only time: whatever it said is found at the next renewal, or said again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

import aiohttp
import msgspec

from control_plane.gateways import Gateways
from control_plane.load_windows import ClosedWindow

logger = logging.getLogger(__name__)

CALL_S: Final = 3.0
CHANGED_PATH: Final = "/internal/v1/changed"
DEMAND_PATH: Final = "/internal/v1/demand"
LEFT_PATH: Final = "/internal/v1/left"
LEFT_PAUSES_S: Final = (0.2, 1.0, 3.0)
"""Before it is said again that a reader left: until it is heard, work goes on that nobody waits for."""


class News(msgspec.Struct, frozen=True):
    what: tuple[str, ...]
    """gateways | functions | keys | slots"""


class Left(msgspec.Struct, frozen=True):
    request_id: str
    reader: str


class LaneDemand(msgspec.Struct, frozen=True):
    """What one gateway has of one function and checkpoint."""

    tenant: str
    function: str
    identity: str
    waiting: int
    peak_demand: int
    """Largest within the scale-in window."""
    generation: int
    idle_s: float
    """Since the last activity; 0 while there is some."""
    woken: bool = False
    """Somebody wants it and does not wait."""
    running: tuple[tuple[str, int], ...] = ()
    """(replica, requests in flight)."""
    gaps_s: tuple[float, ...] = ()
    deferred: int = 0
    """Refused early, and told to come back."""
    arrivals_in_10_s: int = 0
    arrivals_in_60_s: int = 0
    first_token_s: float | None = None
    """Lately, of requests that found a ready replica."""
    token_s: float | None = None
    waiting_tokens: int = 0
    running_tokens: int = 0
    arrivals_in_30_s: int = 0
    waited_s: float | None = None
    """By the one who waits longest; None: nobody does, or it is not told."""


class DemandReport(msgspec.Struct, frozen=True):
    """Everything at once, so that a lost report is made good by the next."""

    gateway: str
    lanes: tuple[LaneDemand, ...]
    windows: tuple[ClosedWindow, ...] = ()
    """Of load, that the leader has not said it has."""


class Refusal(msgspec.Struct, frozen=True):
    """No replica of this can be had: what waits for one may be told so."""

    tenant: str
    function: str
    identity: str
    code: str
    message: str


class DemandAnswer(msgspec.Struct, frozen=True):
    leads: bool
    refusals: tuple[Refusal, ...] = ()
    strict: dict[str, float] = {}
    """Tenants that hold more than their share while others lack devices: by how much their objectives are tightened."""
    windows_until_s: float | None = None
    """The windows it need not be told of again."""


_answer: Final = msgspec.msgpack.Decoder(DemandAnswer).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class Peers:
    def __init__(self, gateways: Gateways, token: str) -> None:
        self._gateways = gateways
        self.token = token
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def session(self) -> aiohttp.ClientSession:
        """Connections to the other gateways; kept open, as a wake-up must not wait for a handshake."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=CALL_S),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                headers={"Authorization": f"Bearer {self.token}"},
                read_bufsize=1 << 20,
            )
        return self._session

    def tell(self, *what: str) -> None:
        """Say to every other gateway that there is news; nobody waits for it."""
        if self._closed:
            return
        for peer in self._gateways.peers.values():
            self._spawn(self._tell(peer.url, News(what)))

    async def tell_all(self, *what: str) -> None:
        """The same, and wait until it was said."""
        await asyncio.gather(*(self._tell(peer.url, News(what)) for peer in self._gateways.peers.values()))

    async def _tell(self, url: str, news: News) -> None:
        try:
            async with self.session.post(url + CHANGED_PATH, data=_encode(news)) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.info("event=peer_not_told url=%s what=%s error=%r", url, ",".join(news.what), error)

    def tell_left(self, url: str, left: Left) -> None:
        if not self._closed:
            self._spawn(self._tell_left(url, left))

    async def _tell_left(self, url: str, left: Left) -> None:
        for pause_s in (*LEFT_PAUSES_S, None):
            try:
                async with self.session.post(url + LEFT_PATH, data=_encode(left)) as response:
                    await response.read()
                    if response.status < 500:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.info("event=leaving_not_told request=%s url=%s error=%r", left.request_id, url, error)
            if pause_s is not None:
                await asyncio.sleep(pause_s)

    async def send_demand(self, url: str, report: DemandReport) -> DemandAnswer | None:
        """None: it was not heard."""
        try:
            async with self.session.post(url + DEMAND_PATH, data=_encode(report)) as response:
                body = await response.read()
                return _answer(body) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            logger.info("event=demand_not_heard url=%s error=%r", url, error)
            return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
