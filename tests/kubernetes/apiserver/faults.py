"""Faults on demand: what an API server under stress, or a network between, does to its clients.

Model: a fault names verb, resource and what happens, and for how many calls; the first that fits a call is used up by
it. `lost` faults let the call happen and spoil only the answer: the write is there, and the client does not know.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

from tests.kubernetes.apiserver.calls import Call
from tests.kubernetes.apiserver.errors import ApiError

_REASONS = {
    400: "BadRequest",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}
# The connection is closed without an answer, or is held without one until the client gives up.
RESET, HANG = "reset", "hang"


@dataclass(slots=True)
class Fault:
    """`outcome` is an HTTP code, RESET, HANG, or None for a mere delay."""

    verb: str = "*"
    resource: str = "*"
    outcome: int | str | None = 500
    times: int | None = 1
    delay_s: float = 0.0
    retry_after_s: int | None = None
    namespace: str | None = None
    user: str | None = None
    lost: bool = False
    chance: float = 1.0
    # Calls that met it.
    met: int = 0

    def error(self) -> ApiError:
        assert isinstance(self.outcome, int)
        reason = _REASONS.get(self.outcome, "InternalError")
        return ApiError(self.outcome, reason, f"injected by the test: {reason}", retry_after_s=self.retry_after_s)

    def fits(self, call: Call) -> bool:
        plural = call.target.plural + (f"/{call.subresource}" if call.subresource else "")
        return (
            self.verb in ("*", call.verb)
            and self.resource in ("*", plural)
            and self.namespace in (None, call.namespace)
            and (self.user is None or self.user in call.user.name)
        )


@dataclass(slots=True)
class Faults:
    """The faults still to happen. Set from any thread."""

    seed: int = 0
    _pending: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._pending.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        with self._lock:
            self._pending = [each for each in self._pending if each is not fault]

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()

    def take(self, call: Call) -> Fault | None:
        with self._lock:
            for each in self._pending:
                if each.fits(call) and (each.chance >= 1 or self._random.random() < each.chance):
                    each.met += 1
                    if each.times is not None:
                        each.times -= 1
                        if each.times <= 0:
                            self._pending.remove(each)
                    return each
        return None
