"""How fast the replicas of each function serve, measured live from what they report of their steps.

    heartbeats   steps made and device time spent since the last one, by how many requests run: a step's seconds
    first tokens device time of a prompt's prefill, by the tokens that had to be computed: prefill speed
    ends         how many tokens answers have

`model` is the `ServiceModel` fitted to the last `KEPT` samples of a function and checkpoint, `FIT_S` old at most. Steps
during which a prompt was prefilled are not taken for steps of generation. Limits: nothing is known of a function until
it has served a little in this process's life; a prompt that another gateway's request has prefilled in the same moment
cannot be told from generation.
"""

from __future__ import annotations

import dataclasses
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from autoscaler.admission import LENGTHS_NEEDED, left_tokens
from autoscaler.forecast import Forecast
from autoscaler.service import ServiceModel
from control_plane.lanes import UNMEASURED, FunctionKey, Seat
from control_plane.live_request import LiveRequest
from function_runtime.protocol import Progress, Tokens

KEPT: Final = 128
LENGTHS_KEPT: Final = 64
IDENTITIES_KEPT: Final = 4
"""Checkpoints of one function; the oldest goes."""
FIT_S: Final = 2.0
SAMPLES_NEEDED: Final = 8
SPREAD: Final = 2
"""How many times as long as the shortest prompt the longest has to be."""


def token_s(prefills: Iterable[tuple[int, float]]) -> float:
    """Seconds that one more token of a prompt takes, by (tokens, seconds) of some. What a prefill costs whatever its
    length is not the tokens': the slope of a line through them, where their lengths differ enough to tell; otherwise
    all of it is, which is too much for prompts much longer than those."""
    points = list(prefills)
    tokens, seconds = sum(each for each, _ in points), math.fsum(each for _, each in points)
    whole = seconds / tokens
    if max(each for each, _ in points) < SPREAD * min(each for each, _ in points):
        return whole
    mean, mean_s = tokens / len(points), seconds / len(points)
    across = math.fsum((each - mean) ** 2 for each, _ in points)
    slope = math.fsum((each - mean) * (each_s - mean_s) for each, each_s in points) / across
    return min(max(slope, whole / 100), whole)


class _Lengths:
    """The last so many, in order of coming and in order of size."""

    __slots__ = ("_came", "ascending", "total")

    def __init__(self) -> None:
        self._came: deque[int] = deque()
        self.ascending: list[int] = []
        self.total = 0

    def add(self, length: int) -> None:
        if len(self._came) >= LENGTHS_KEPT:
            gone = self._came.popleft()
            self.ascending.remove(gone)
            self.total -= gone
        self._came.append(length)
        insort(self.ascending, length)
        self.total += length

    @property
    def mean(self) -> float | None:
        return self.total / len(self._came) if self._came else None


class _Served:
    """Of one function and checkpoint."""

    __slots__ = ("asked", "fitted", "fitted_s", "fresh", "max_requests", "outputs", "prefills", "prompts", "steps")

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int, float]] = deque(maxlen=KEPT)
        self.prefills: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self.outputs = _Lengths()
        self.prompts = _Lengths()
        """Tokens that had to be computed."""
        self.asked = _Lengths()
        """Tokens of the same prompts."""
        self.max_requests = 1
        self.fresh = False
        self.fitted: ServiceModel | None = None
        self.fitted_s = float("-inf")


class ServiceTimes:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served: dict[tuple[FunctionKey, str], _Served] = {}
        self._before: dict[str, tuple[Progress, bool]] = {}
        """The last heartbeat of each replica, and whether a prompt was being prefilled at it."""
        self.forecast: Callable[[FunctionKey], Forecast | None] = lambda key: None
        """Of a function, if one holds: it outlives this process."""

    def _of(self, key: FunctionKey, identity: str) -> _Served:
        served = self._served.get((key, identity))
        if served is None:
            known = [each for each in self._served if each[0] == key]
            for each in known[: max(len(known) - IDENTITIES_KEPT + 1, 0)]:
                del self._served[each]
            served = self._served[key, identity] = _Served()
        return served

    # --- what replicas say ---

    def beat(self, seat: Seat, progress: Progress) -> None:
        reading = any(request.last_token_ns == 0 for request in seat.in_flight.values())
        before = self._before.get(seat.replica_id)
        self._before[seat.replica_id] = progress, reading
        if before is None:
            return
        last, was_reading = before
        steps = progress.steps - last.steps
        busy_us = progress.time.attributed_us - last.time.attributed_us
        prefilled = reading or was_reading or progress.others > last.others
        if steps <= 0 or busy_us <= 0 or prefilled or not (progress.running and last.running):
            return
        running = max(round((progress.running + last.running) / 2), 1)
        served = self._of(seat.key, seat.identity)
        served.max_requests = seat.max_requests
        served.steps.append((running, running, busy_us / 1e6 / steps))
        served.fresh = True

    def first_token(self, request: LiveRequest, message: Tokens) -> None:
        """The first that an attempt says. What a resumed one had to compute is not a prompt's prefill."""
        seat = request.seat
        computed = len(request.origin.prompt) - message.cached_tokens
        if seat is None or request.log.last_seq or message.device.prefill_us <= 0 or computed <= 0:
            return
        served = self._of(seat.key, seat.identity)
        served.max_requests = seat.max_requests
        served.prefills.append((computed, message.device.prefill_us / 1e6))
        served.prompts.add(computed)
        served.asked.add(len(request.origin.prompt))
        served.fresh = True

    def ended(self, request: LiveRequest) -> None:
        made = request.log.last_seq
        if made and request.complete:
            self._of(request.origin.key, request.origin.identity).outputs.add(-(-made // request.origin.sampling.n))

    def left(self, seat: Seat) -> None:
        self._before.pop(seat.replica_id, None)

    # --- what is known ---

    def model(self, key: FunctionKey, identity: str) -> ServiceModel | None:
        """None: too little was measured yet."""
        served = self._served.get((key, identity))
        if served is None:
            return None
        now_s = self._clock()
        enough = len(served.steps) >= SAMPLES_NEEDED
        if served.fresh and enough and (served.fitted is None or now_s - served.fitted_s >= FIT_S):
            served.fresh, served.fitted_s = False, now_s
            fitted = ServiceModel.fitted(tuple(served.steps), max_requests=served.max_requests)
            if fitted is not None and served.prefills:
                fitted = dataclasses.replace(fitted, prefill_tokens_per_s=1.0 / token_s(served.prefills))
            served.fitted = fitted or served.fitted
        return served.fitted

    def of_identity(self, identity: str) -> ServiceModel | None:
        """Of whichever function has measured most with this checkpoint."""
        known = [(len(served.steps), key) for (key, own), served in self._served.items() if own == identity]
        return self.model(max(known)[1], identity) if known else None

    def speeds(self, key: FunctionKey, identity: str) -> tuple[float, float]:
        """Seconds of a step and tokens a second of prefill, by which a request weighs a queue against a prefix."""
        model = self.model(key, identity)
        return UNMEASURED if model is None else (model.step_s(1), model.prefill_tokens_per_s)

    def output_lengths(self, key: FunctionKey, identity: str) -> list[int]:
        """Tokens of the last answers, ascending."""
        served = self._served.get((key, identity))
        return served.outputs.ascending if served is not None else []

    def left_tokens(self, key: FunctionKey, identity: str) -> Callable[[int, int], float]:
        """What a request that has made so many tokens, and may make so many, is expected to make still: by the answers
        that ended here; before there were enough, by those that the forecast knows of."""
        lengths, forecast = self.output_lengths(key, identity), self.forecast(key)
        if len(lengths) < LENGTHS_NEEDED and forecast is not None and forecast.output_tokens:
            return lambda made, most: min(max(most - made, 0), forecast.remaining_tokens(made))
        return lambda made, most: left_tokens(made, most, lengths)

    def computed_share(self, key: FunctionKey, identity: str) -> float:
        """Of a prompt's tokens, those that are computed and not found."""
        served = self._served.get((key, identity))
        return served.prompts.total / served.asked.total if served is not None and served.asked.total else 1.0

    def means(self, key: FunctionKey, identity: str) -> tuple[float, float] | None:
        """Prompt tokens that are computed and output tokens of a request, on average."""
        served = self._served.get((key, identity))
        if served is None:
            return None
        prompt, output = served.prompts.mean, served.outputs.mean
        return None if prompt is None or output is None else (prompt, output)
