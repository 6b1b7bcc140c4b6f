"""Requests that stop here and go on elsewhere, later: their KV is stored first, then the gateway hears `Parked`.

    out of the engine at a token boundary, tail exported -> flushed by a helper -> Parked

One flush runs at a time and takes everything that was put away before it began; the loop and its other requests go on
meanwhile. Limits: what is not stored within `within_s` is computed again where the request goes on.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from function_runtime.held import HeldRequest
from function_runtime.inbox import Inbox


class Flush(Protocol):
    def flush(self, within_s: float) -> None: ...


class Parking:
    def __init__(self, inbox: Inbox, kv: Flush | None, within_s: float) -> None:
        self._inbox = inbox
        self._kv = kv
        self._within_s = within_s
        self._waiting: list[HeldRequest] = []
        self._flushing = False

    def put_away(self, held: HeldRequest, reason: str) -> None:
        """It is out of the engine; what KV it has is queued to be stored."""
        held.parking = reason
        if self._kv is None or not held.work.write_kv:
            held.park(time.monotonic_ns())
            return
        self._waiting.append(held)
        self._flush()

    def _flush(self) -> None:
        if self._flushing or not self._waiting or self._kv is None:
            return
        batch, self._waiting = self._waiting, []
        self._flushing = True
        threading.Thread(target=self._store, args=(self._kv, batch), name="park", daemon=True).start()

    def _store(self, kv: Flush, batch: list[HeldRequest]) -> None:
        try:
            kv.flush(self._within_s)
        finally:
            # What was stored has been posted before: each request's `KvSealed` precede its `Parked`.
            self._inbox.post(lambda: self._stored(batch))

    def _stored(self, batch: list[HeldRequest]) -> None:
        self._flushing = False
        now_ns = time.monotonic_ns()
        for held in batch:
            if held.live:
                held.park(now_ns)
        self._flush()
