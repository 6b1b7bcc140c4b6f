"""A replica's time: the parts sum to the whole, to the microsecond, at every look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from function_runtime.clock import LifeClock, Stopwatch


@given(
    st.integers(0, 10**12),
    st.integers(0, 10**10),
    st.lists(st.tuples(st.sampled_from(["step", "idle", "other"]), st.integers(0, 10**9), st.integers(0, 999))),
)
def test_parts_sum_to_the_whole_at_every_look(begin_ns: int, cold_ns: int, life: list[tuple[str, int, int]]) -> None:
    now_ns = begin_ns

    def look() -> None:
        time = clock.read()
        assert time.held_us == (now_ns - begin_ns) // 1000
        assert time.cold_us + time.attributed_us + time.idle_us + time.overhead_us == time.held_us
        assert min(time.cold_us, time.attributed_us, time.idle_us, time.overhead_us) >= 0

    clock = LifeClock(begin_ns, lambda: now_ns)
    look()
    now_ns += cold_ns
    assert clock.read().cold_us == clock.read().held_us
    clock.become_ready()
    attributed_us = 0
    for kind, duration_ns, slack_ns in life:
        now_ns += duration_ns + slack_ns
        if kind == "step":
            clock.attribute(duration_ns // 1000)
            attributed_us += duration_ns // 1000
        elif kind == "idle":
            clock.add_idle(duration_ns)
        look()
        assert clock.read().attributed_us == attributed_us


def test_a_stage_is_recorded_even_when_it_fails() -> None:
    watch = Stopwatch()
    try:
        with watch.run("build") as stage:
            stage.detail = "half"
            raise ValueError
    except ValueError:
        pass
    assert [(s.name, s.detail) for s in watch.stages] == [("build", "half")] and watch.stages[0].duration_us >= 0
