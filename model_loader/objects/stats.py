"""What a store was asked for and what it cost: requests and bytes by kind, retries, failures, the breaker's state.

A *request* is what a provider bills: one on the wire, retries and parts of an upload included; for a directory, one
operation. Limits: counts of this process since the store was opened.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

KINDS: Final = ("get", "put", "head", "list", "delete")
"""S3 bills put and list at one price, get and head at another, delete at none."""


@dataclass(frozen=True, slots=True)
class KindUse:
    requests: int = 0
    nbytes: int = 0
    """Payload moved for requests that succeeded."""
    retries: int = 0
    """Of the requests, those that repeated a failed one."""
    failures: int = 0
    """Requests that got no usable answer; 'there is no such object' is an answer."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreUse:
    """A moment's counts."""

    kinds: dict[str, KindUse] = field(default_factory=lambda: {kind: KindUse() for kind in KINDS})
    refused_unasked: int = 0
    """Operations that the open breaker refused."""
    breaker: str = "closed"
    breaker_opened: int = 0

    @property
    def reads(self) -> int:
        return self.kinds["get"].requests + self.kinds["head"].requests

    @property
    def writes(self) -> int:
        """And listings, which cost the same."""
        return self.kinds["put"].requests + self.kinds["list"].requests

    @property
    def deletes(self) -> int:
        return self.kinds["delete"].requests

    @property
    def read_bytes(self) -> int:
        return self.kinds["get"].nbytes

    @property
    def written_bytes(self) -> int:
        return self.kinds["put"].nbytes

    @property
    def requests(self) -> int:
        return sum(use.requests for use in self.kinds.values())

    @property
    def failures(self) -> int:
        return sum(use.failures for use in self.kinds.values())

    @property
    def retries(self) -> int:
        return sum(use.retries for use in self.kinds.values())


class StoreStats:
    """Counted under one lock: an addition costs far less than the request it counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[str, list[float]] = {kind: [0, 0, 0, 0, 0.0] for kind in KINDS}
        self._refused_unasked = 0
        self._breaker = "closed"
        self._breaker_opened = 0

    def count(
        self, kind: str, *, nbytes: int = 0, seconds: float = 0.0, retry: bool = False, failed: bool = False
    ) -> None:
        """One request."""
        with self._lock:
            counts = self._kinds[kind]
            counts[0] += 1
            counts[1] += nbytes
            counts[2] += retry
            counts[3] += failed
            counts[4] += seconds

    def add_bytes(self, kind: str, nbytes: int) -> None:
        """Of a request that was counted before its size was known."""
        with self._lock:
            self._kinds[kind][1] += nbytes

    def refuse(self) -> None:
        with self._lock:
            self._refused_unasked += 1

    def breaker_is(self, state: str) -> None:
        with self._lock:
            self._breaker_opened += state == "open" and self._breaker != "open"
            self._breaker = state

    def snapshot(self) -> StoreUse:
        with self._lock:
            kinds = {kind: KindUse(int(c[0]), int(c[1]), int(c[2]), int(c[3]), c[4]) for kind, c in self._kinds.items()}
            return StoreUse(kinds, self._refused_unasked, self._breaker, self._breaker_opened)
