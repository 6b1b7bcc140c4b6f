"""What replicas ask and tell about stored KV, answered: which chunks continue a prompt, which were kept, which are bad.

An answer comes within `ANSWER_WITHIN_S` or is empty: the replica computes then. Who a request belongs to is the
gateway's own knowledge, never the replica's word; what is said under an epoch that is not (or was not last) the
request's is dropped. Limits: of requests that ended only the last `ENDED_KEPT` are remembered, for chunks that were
still on their way to the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from control_plane.decisions import Decisions
from control_plane.errors import StokerError
from control_plane.kv_index import Counts, Keeper, KvIndex
from control_plane.live_request import LiveRequest, Origin
from control_plane.replica_link import ReplicaLink
from control_plane.settings import KvSettings
from function_runtime.protocol import KvAsk, KvBad, KvChunk, KvKept, Reuse

logger = logging.getLogger(__name__)

KvWord: TypeAlias = KvAsk | KvKept | KvBad

ANSWER_WITHIN_S: Final = 0.15
ENDED_KEPT: Final = 4096
FRESH_S: Final = 30.0
"""How stale the observed reuse may be."""
PRIOR: Final = 0.2
"""Share of kept chunks that is expected to be used again before anything was observed."""
PRIOR_KEYED: Final = 0.5
"""The same for requests with a `prompt_cache_key`: their client says that it will come back."""
PRIOR_CHUNKS: Final = 64
"""How many observed chunks weigh as much as the prior."""
CHUNKS_MAX: Final = 16_384
"""Of one message: more than any context holds."""


@dataclass(slots=True)
class KvCounts:
    """Of this gateway's life."""

    asked: int = 0
    hits: int = 0
    """Answers that named at least one chunk."""
    late: int = 0
    """Asked, and not answered in time (or not at all: the database was away)."""
    chunks_named: int = 0
    chunks_kept: int = 0
    bytes_kept: int = 0
    not_kept: int = 0
    """Requests whose KV was not worth keeping."""
    quarantined: int = 0


def probability(counts: Counts, keyed: bool) -> float:
    """That a chunk kept now is used again: what was observed, beside a prior that fades."""
    prior = PRIOR_KEYED if keyed else PRIOR
    return min(1.0, (counts.reused + prior * PRIOR_CHUNKS) / (max(counts.kept, counts.reused) + PRIOR_CHUNKS))


def conversation_of(kv_scope: str, key: str) -> str:
    """A client's `prompt_cache_key` as it is kept: a name that tells nobody the key."""
    return hmac.new(kv_scope.encode(), key.encode(), hashlib.sha256).hexdigest()[:16] if key else ""


def function_scope(tenant_scope: str, function: str) -> str:
    """The scope of a function that shares with nobody else, not even within its tenant."""
    return hmac.new(tenant_scope.encode(), b"function\0" + function.encode(), hashlib.sha256).hexdigest()


class KvDesk:
    def __init__(self, index: KvIndex, decisions: Decisions, settings: KvSettings) -> None:
        self._index = index
        self._decisions = decisions
        self._settings = settings
        self.counts = KvCounts()
        self._ended: OrderedDict[str, tuple[int, Origin]] = OrderedDict()
        self._observed: dict[tuple[str, str, bool], Counts] = {}
        self._observed_s = float("-inf")
        self._observing = False
        self._tasks: set[asyncio.Task[None]] = set()

    # --- for requests that begin and end ---

    def reuse(self, origin: Origin) -> Reuse:
        """What the replica needs to decide whether this request's KV is kept."""
        if not origin.share_prefix or not origin.write_kv:
            return Reuse()
        self._observe()
        keyed = bool(origin.conversation)
        counts = self._observed.get((origin.tenant, origin.function, keyed), Counts())
        return Reuse(round(probability(counts, keyed), 4), self._price(origin))

    def _price(self, origin: Origin) -> int:
        return origin.price_microusd_per_hour or self._settings.device_microusd_per_hour

    def _observe(self) -> None:
        now_s = time.monotonic()
        if now_s - self._observed_s < FRESH_S or self._observing:
            return
        self._observing = True
        self._spawn(self._read_reuse())

    async def _read_reuse(self) -> None:
        try:
            self._observed = await self._index.reuse()
            self._observed_s = time.monotonic()
        except StokerError:
            self._observed_s = time.monotonic()  # the last known stands a while longer
        finally:
            self._observing = False

    def ended(self, request: LiveRequest) -> None:
        if not request.origin.share_prefix:
            return
        self._ended[request.request_id] = (request.epoch, request.origin)
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    # --- what replicas say ---

    def hear(self, link: ReplicaLink, request: LiveRequest | None, message: KvWord) -> None:
        """On the event loop, in the order of arrival: what is to be written is handed over before the next message of
        the link (the end of the request, perhaps) is looked at."""
        epoch, origin = self._about(request, message.request_id)
        current = origin is not None and epoch == message.epoch
        if isinstance(message, KvAsk):
            self._spawn(self._answer(link, message, origin if current else None))
        elif origin is None or not current:
            logger.info("event=kv_fenced request=%s epoch=%d", message.request_id, message.epoch)
        elif isinstance(message, KvBad):
            self._spawn(self._quarantine(link, message, origin))
        elif message.chunks:
            self._spawn(self._keep(message, origin))
        else:
            self.counts.not_kept += 1
            self._record("kv_not_kept", link, origin, message.reason, {})

    def _about(self, request: LiveRequest | None, request_id: str) -> tuple[int, Origin | None]:
        if request is not None:
            return request.epoch, request.origin
        return self._ended.get(request_id, (0, None))

    async def _answer(self, link: ReplicaLink, message: KvAsk, origin: Origin | None) -> None:
        chunks: tuple[KvChunk, ...] = ()
        if origin is not None and origin.share_prefix and len(message.chains) <= CHUNKS_MAX:
            self.counts.asked += 1
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    chunks = await self._index.known(message.identity, origin.kv_scope, message.chains)
            except (TimeoutError, StokerError) as error:
                self.counts.late += 1
                logger.warning("event=kv_not_answered request=%s error=%r", message.request_id, str(error))
        self.counts.hits += bool(chunks)
        self.counts.chunks_named += len(chunks)
        link.kv_known(message.request_id, message.epoch, chunks)

    async def _keep(self, message: KvKept, origin: Origin) -> None:
        chunks = message.chunks[:CHUNKS_MAX]
        keeper = Keeper(
            origin.tenant, origin.function, origin.kv_scope, origin.conversation, self._price(origin), origin.kv_owner
        )
        try:
            new = await self._index.keep(keeper, message.identity, chunks, message.packs, message.token_us)
        except StokerError as error:
            # Nothing names the packs then: the next look for orphans finds them.
            logger.warning("event=kv_not_remembered request=%s error=%s", message.request_id, error)
            return
        self.counts.chunks_kept += new
        self.counts.bytes_kept += sum(chunk.nbytes for chunk in chunks) if new else 0
        inputs = {"chunks": len(chunks), "new": new, "tokens": chunks[-1].end, "token_us": round(message.token_us, 1)}
        self._record("kv_kept", None, origin, message.reason, inputs)

    async def _quarantine(self, link: ReplicaLink, message: KvBad, origin: Origin) -> None:
        chunk = message.chunk
        try:
            bad = await self._index.quarantine(chunk.pack, origin.tenant, message.reason)
        except StokerError as error:
            logger.warning("event=kv_not_quarantined pack=%s error=%s", chunk.pack, error)
            return
        if bad is None:
            return
        self.counts.quarantined += 1
        logger.warning("event=kv_quarantined pack=%s request=%s reason=%s", chunk.pack, message.request_id,
                       message.reason)  # fmt: skip
        reason = f"stored KV of tokens {chunk.start} to {chunk.end} is not used again: {message.reason}"
        inputs = {"pack": chunk.pack, "digest": chunk.digest, "chunks_out_of_reach": bad.chunks}
        self._record("kv_quarantined", link, origin, reason, inputs)

    def _record(self, kind: str, link: ReplicaLink | None, origin: Origin, reason: str, inputs: dict[str, Any]) -> None:
        replica_id = link.replica_id if link is not None else None
        self._decisions.record(
            kind, origin.function, replica_id, origin.request_id, reason, inputs, tenant=origin.tenant
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)
