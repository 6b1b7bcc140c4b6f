"""What a gateway counts of its load, by windows on a wall clock that may jump."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

from control_plane.load_meter import KEPT, WINDOW_S, LoadMeter
from control_plane.load_windows import SLOTS, STORED, ClosedWindow

KEY = ("default", "smol")
T0 = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 500.0
        self.ahead_s = T0 - 500.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s + self.ahead_s


class Line:
    """A lane with so many requests."""

    def __init__(self, identity: str = "abc") -> None:
        self.key, self.identity = KEY, identity
        self.waiting: deque[int] = deque()
        self.running = 0

    @property
    def demand(self) -> int:
        return len(self.waiting) + self.running


def make() -> tuple[LoadMeter, Clock]:
    clock = Clock()
    return LoadMeter(clock.monotonic, clock.wall), clock


def request(request_id: str = "r1", tokens: int = 0, prompt: int = 3) -> Any:
    stages = SimpleNamespace(load_kv_us=0, prefill_us=100_000, decode_us=900_000, cold_start_us=0)
    origin = SimpleNamespace(key=KEY, prompt=(1,) * prompt)
    log = SimpleNamespace(last_seq=tokens)
    return SimpleNamespace(
        request_id=request_id, origin=origin, log=log, stages=stages, received=tokens, accept_ns=0, seat=None,
        attempt_first=0, last_token_ns=0, submit_ns=time.monotonic_ns(),
    )  # fmt: skip


def on_slot(window: ClosedWindow, slot_id: str = "slot-1") -> dict[str, float]:
    (found,) = (each for each in window.functions if (each.tenant, each.function) == (SLOTS, slot_id))
    return dict(zip(STORED, found.values, strict=True))


def named(window: ClosedWindow) -> dict[str, float]:
    return dict(zip(STORED, window.functions[0].values, strict=True))


def close(meter: LoadMeter, clock: Clock, live: tuple[Any, ...] = ()) -> ClosedWindow:
    clock.now_s += meter.ends_s - clock.wall()
    assert meter.close(live)
    return meter.unsent()[-1]


def test_a_window_has_what_came_and_what_became_of_it() -> None:
    meter, clock = make()
    line = Line()
    meter.arrived(request(prompt=7))
    line.waiting.append(1)
    meter.demand(line)  # type: ignore[arg-type]
    clock.now_s += 4
    line.waiting.clear()
    line.running = 1
    meter.demand(line)  # type: ignore[arg-type]
    meter.ended(request(tokens=10))
    meter.refused(KEY)
    line.running = 0
    clock.now_s += 1
    meter.demand(line)  # type: ignore[arg-type]
    window = close(meter, clock)
    found = named(window)
    assert (window.start_s, window.whole) == (T0, False)
    assert (found["arrivals"], found["refused"], found["prompt_tokens"]) == (2, 1, 7)
    assert (found["peak_concurrency"], found["peak_queue"]) == (1, 1)
    assert found["mean_concurrency"] == 0.5
    assert (found["ended"], found["output_tokens"], found["service_s_sum"]) == (1, 10, 1.0)
    assert (found["token_s_sum"], found["token_count"]) == (0.1, 1)
    assert window.functions[0].busy == ((T0, T0 + 5),)


def test_tokens_of_a_long_answer_count_in_the_window_they_were_made_in() -> None:
    meter, clock = make()
    live = request(tokens=30)
    assert named(close(meter, clock, (live,)))["output_tokens"] == 30
    live.received = live.log.last_seq = 50
    meter.ended(live)
    assert named(close(meter, clock))["output_tokens"] == 20


def test_what_goes_on_is_busy_in_every_window_and_a_quiet_function_in_none() -> None:
    meter, clock = make()
    line = Line()
    line.running = 2
    clock.now_s += 9
    meter.demand(line)  # type: ignore[arg-type]
    first, second = close(meter, clock), close(meter, clock)
    assert first.functions[0].busy == ((T0 + 9, T0 + 10),)
    assert second.functions[0].busy == ((T0 + 10, T0 + 20),)
    assert named(second)["mean_concurrency"] == 2.0
    line.running = 0
    meter.demand(line)  # type: ignore[arg-type]
    assert named(close(meter, clock))["mean_concurrency"] == 0
    assert close(meter, clock).functions == ()


def test_two_checkpoints_of_a_function_are_one_load() -> None:
    meter, clock = make()
    for identity in ("old", "new"):
        line = Line(identity)
        line.running = 3
        meter.demand(line)  # type: ignore[arg-type]
    assert named(close(meter, clock))["peak_concurrency"] == 6


def test_a_window_in_which_the_clock_jumped_is_not_told_of_nor_the_broken_one_behind_it() -> None:
    meter, clock = make()
    close(meter, clock)
    meter.arrived(request())
    clock.ahead_s += 3600
    assert not meter.close(())
    assert meter.clock_jumps == 1
    clock.now_s += 10
    assert not meter.close(())
    close(meter, clock)
    clock.ahead_s -= 3600
    assert not meter.close(())
    assert [window.start_s for window in meter.unsent()] == [T0, T0 + 3620]


def test_a_process_that_stood_still_tells_nothing_of_that_time() -> None:
    meter, clock = make()
    close(meter, clock)
    meter.arrived(request())
    clock.now_s += 60
    assert not meter.close(())
    assert meter.clock_jumps == 0
    assert len(meter.unsent()) == 1


def test_windows_wait_for_the_leader_and_are_bounded() -> None:
    meter, clock = make()
    for _ in range(KEPT + 5):
        close(meter, clock)
    assert len(meter.unsent()) == KEPT
    meter.sent(meter.unsent()[3].start_s)
    assert meter.unsent()[0].start_s == T0 + WINDOW_S * (5 + 4)


def test_a_slot_has_what_ran_on_its_replicas_and_what_they_made_there() -> None:
    meter, clock = make()
    seat: Any = SimpleNamespace(slot_id="slot-1", key=KEY)
    resumed = request("r1", tokens=2, prompt=7)
    resumed.seat = seat
    meter.seated(seat, resumed, True)
    meter.first_token(resumed)
    meter.memory(seat, 30, 40, waiting=3)
    clock.now_s += 4
    resumed.received, resumed.attempt_first, resumed.last_token_ns = 12, 10**9, 10**9 + 900_000_000
    meter.seated(seat, resumed, False)
    found = on_slot(close(meter, clock))
    assert (found["arrivals"], found["prompt_tokens"], found["output_tokens"]) == (1, 7, 10)
    assert (found["peak_concurrency"], found["mean_concurrency"]) == (1, 0.4)
    assert (found["peak_queue"], found["kv_used_share"], found["first_token_count"]) == (3, 0.75, 1)
    assert found["token_s_sum"] == 0.1 and found["ended"] == 1


def test_what_goes_on_over_a_windows_end_counts_on_its_slot_in_both() -> None:
    meter, clock = make()
    seat: Any = SimpleNamespace(slot_id="slot-1", key=KEY)
    elsewhere: Any = SimpleNamespace(slot_id="", key=KEY)
    running, other = request("r1"), request("r2")
    running.seat, other.seat = seat, elsewhere
    meter.seated(seat, running, True)
    meter.seated(elsewhere, other, True)
    running.received = 5
    first = close(meter, clock, (running, other))
    running.received = 8
    meter.seated(seat, running, False)
    second = close(meter, clock)
    assert (on_slot(first)["output_tokens"], on_slot(second)["output_tokens"]) == (5, 3)
    assert (on_slot(first)["arrivals"], on_slot(second)["arrivals"]) == (1, 0)
    assert on_slot(second)["peak_concurrency"] == 1
    assert not [each for each in close(meter, clock).functions if each.tenant == SLOTS]
