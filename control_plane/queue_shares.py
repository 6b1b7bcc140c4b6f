"""Places in the queues of all gateways together: who needs more than it has claimed claims more, in steps.

A request that finds a free place at a replica needs none. One that has to wait needs a place and its bytes within what
this gateway has claimed for the function; where that is used up more is claimed first, a sixteenth of the bound ahead,
as far as others have left it. `settle`, every second, gives back what is not used, all of it where nothing waits, and
writes down what came to wait without asking: requests that lost their replica or were adopted are never refused.
Limits: up to two steps for each busy gateway lie claimed and unused, an idle one's share for two seconds; where the
bound is reached it is asked about again every `AGAIN_S`; each gateway counts the free places of replicas as its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from control_plane.lanes import FunctionKey, Lanes, Room
from control_plane.settings import QueueSettings
from control_plane.shares import Shares, Want

STEPS: Final = 16
NOTHING: Final = Room(0, 0)
AGAIN_S: Final = 0.05
"""While the bound is reached a refusal costs no write: so often it is asked whether there is room again."""


class QueueShares:
    def __init__(
        self, shares: Shares, lanes: Lanes, bounds: QueueSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shares = shares
        self._lanes = lanes
        self._bounds = bounds
        self._clock = clock
        self.most_waiting: Callable[[FunctionKey], int] = lambda key: bounds.max_requests
        """How many may wait for a function at all gateways together; never more than the bound."""
        self._peaks: dict[FunctionKey, Room] = {}
        """What was needed at most since the last look."""
        self._reached: dict[tuple[FunctionKey, bool], tuple[float, Room]] = {}
        """When there was last not enough left, and for what."""
        self.due: Final = asyncio.Event()
        """Much has come to wait without asking: look at once."""
        self._known: set[FunctionKey] = set()
        """Functions with claims."""

    def granted(self, key: FunctionKey) -> Room:
        requests, nbytes = _names(key)
        return Room(self._shares.granted(requests), self._shares.granted(nbytes))

    async def ensure(self, key: FunctionKey, nbytes: int, *, judged: bool = True) -> None:
        """Claim what one more request needs, if it has to wait and there is not enough; whether it then fits is looked
        at by whoever takes the place, without a pause after this. `judged`: by its function's objective, which may
        allow fewer to wait than the bound does."""
        if self._enough(key, nbytes) or self._in_vain(key, nbytes, judged):
            return
        async with self._shares.lock:
            if self._enough(key, nbytes) or self._in_vain(key, nbytes, judged):
                return
            need, bounds = self._lanes.need(key, nbytes), self._bounds
            most = self._most(key) if judged else bounds.max_requests
            if need.requests > most or need.nbytes > bounds.max_bytes:
                return
            ahead = Room(need.requests + max(most // STEPS, 1), need.nbytes + max(bounds.max_bytes // STEPS, 1))
            await self._shares.claim(self._wants(key, ahead, most))
            if not self._enough(key, nbytes):
                self._reached[key, judged] = self._clock(), need

    def others(self, key: FunctionKey) -> int:
        """Places that the other gateways had in its queue when this one last claimed some."""
        return self._shares.others(_names(key)[0])

    def _most(self, key: FunctionKey) -> int:
        return max(min(self.most_waiting(key), self._bounds.max_requests), 0)

    def _in_vain(self, key: FunctionKey, nbytes: int, judged: bool) -> bool:
        """No less than this was asked for a moment ago, and could not be had."""
        at_s, less = self._reached.get((key, judged), (float("-inf"), NOTHING))
        need = self._lanes.need(key, nbytes)
        return self._clock() - at_s < AGAIN_S and need.requests >= less.requests and need.nbytes >= less.nbytes

    def _enough(self, key: FunctionKey, nbytes: int) -> bool:
        need, granted = self._lanes.need(key, nbytes), self.granted(key)
        peak = self._peaks.get(key, NOTHING)
        self._peaks[key] = Room(max(peak.requests, need.requests), max(peak.nbytes, need.nbytes))
        return need.requests <= granted.requests and need.nbytes <= granted.nbytes

    def _wants(self, key: FunctionKey, room: Room, most: int, must: Room | None = None) -> list[Want]:
        requests, nbytes = _names(key)
        have = must or NOTHING
        return [
            Want(requests, min(room.requests, most), most, have.requests),
            Want(nbytes, min(room.nbytes, self._bounds.max_bytes), self._bounds.max_bytes, have.nbytes),
        ]

    async def settle(self) -> None:
        """Claims follow what is used: what is not is given back, what came without asking is written down."""
        peaks, self._peaks = self._peaks, {}
        keys = {lane.key for lane in self._lanes if lane.waiting or lane.entering} | set(peaks) | self._known
        async with self._shares.lock:
            wants: list[Want] = []
            for key in keys:
                used, granted = self._lanes.need(key, 0, more=0), self.granted(key)
                peak = peaks.get(key, NOTHING)
                wanted = Room(
                    _settled(max(used.requests, peak.requests), granted.requests, self._most(key)),
                    _settled(max(used.nbytes, peak.nbytes), granted.nbytes, self._bounds.max_bytes),
                )
                more = used.requests > granted.requests or used.nbytes > granted.nbytes
                if more or wanted != granted or not self._shares.unclear.isdisjoint(_names(key)):
                    wants += self._wants(key, wanted, self._most(key), used)
            await self._shares.claim(wants)
        self._known = {key for key in keys if self.granted(key) != NOTHING}


def _settled(used: int, granted: int, bound: int) -> int:
    """What to have of it for now: nothing where nothing is used, no less than a step ahead of what is, and what there
    is where that is not far from it."""
    if used <= 0:
        return 0
    ahead = used + max(bound // STEPS, 1)
    return granted if granted <= ahead + max(bound // STEPS, 1) else ahead


def _names(key: FunctionKey) -> tuple[str, str]:
    tenant, function = key
    return f"queue/{tenant}/{function}/requests", f"queue/{tenant}/{function}/bytes"
