"""What comes by the clock: on which minutes, what being ready for it is worth, and what it may cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autoscaler.decision import Observed, Phase, Reason, ReplicaView, ScalingSpec
from autoscaler.forecast import Costs, Forecast
from autoscaler.forecasting.clock import (
    BACK,
    NEWEST,
    UNSEEN,
    ByClock,
    Span,
    _smoothed,
    minute_rates,
    plan_by_clock,
)
from autoscaler.forecasting.credit import SHARE, STARTS
from autoscaler.forecasting.warmth import gap_cost
from autoscaler.scaling import decide
from autoscaler.windows import History, Window
from tests.autoscaler.forecasting_support import DAY_S, START_S, Life

COSTS = Costs(start_s=4.0, devices=1, waiting_weight=10.0)


def counted(minutes: int, of_minute) -> tuple[History, float]:  # type: ignore[no-untyped-def]
    """A history of so many minutes, and the moment it ends."""
    history = History()
    for minute in range(minutes):
        at_s = START_S + 60.0 * minute
        if count := int(of_minute(minute)):
            history.add(Window(at_s, 60.0, arrivals=count, ended=count, service_s_sum=1.0 * count))
        history.observed(at_s, at_s + 60.0)
    return history, START_S + 60.0 * minutes


def test_calls_of_every_fifth_minute_are_awaited_and_not_kept_for() -> None:
    rng = np.random.default_rng(1)
    history, now_s = counted(601, lambda minute: rng.poisson(20) if minute % 5 == 0 else 0)
    rates = minute_rates(history, now_s, 31)
    assert rates is not None
    busy = [minute for minute in range(31) if rates[minute] > 0.1]
    assert busy == [4, 9, 14, 19, 24, 29], "the present minute is the first after a busy one"
    plan = plan_by_clock(rates, now_s, COSTS, 1.0, 1.0)
    assert len(plan.spans) == 4, "so many lie within what is said"
    for place, span in enumerate(plan.spans):
        opens_s = now_s + 60.0 * (4 + 5 * place)
        assert opens_s - 15.0 <= span.ready_s <= opens_s + 5.0
        assert opens_s + 40.0 <= span.until_s <= opens_s + 60.0


def test_what_has_no_season_is_left_to_the_laws_of_gaps() -> None:
    rng = np.random.default_rng(2)
    history, now_s = counted(1440, lambda minute: rng.poisson(3.0))
    assert minute_rates(history, now_s, 31) is None
    assert minute_rates(History(), now_s, 31) is None


def test_a_season_is_found_by_what_it_would_have_foretold() -> None:
    rng = np.random.default_rng(3)
    history, now_s = counted(1440, lambda minute: rng.poisson(15.0 if minute % 20 in (3, 4) else 0.3))
    rates = minute_rates(history, now_s, 60)
    assert rates is not None
    assert [minute for minute in range(60) if rates[minute] > 0.05] == [3, 4, 23, 24, 43, 44]


@pytest.mark.parametrize("unseen", [0.0, 0.3], ids=["all seen", "some not"])
@pytest.mark.parametrize(("minutes", "season"), [(720, 5), (1440, 60), (733, 20), (400, 1)])
def test_what_is_told_of_a_minute_is_the_fading_mean_of_the_same_one_of_earlier_seasons(
    minutes: int, season: int, unseen: float
) -> None:
    rng = np.random.default_rng(minutes + season)
    counts = rng.poisson(2.0, minutes).astype(np.float64)
    counts[rng.random(minutes) < unseen] = np.nan
    judged, usual = minutes // 2, 1.7
    told, following = _smoothed(counts, season, judged, usual)

    def naive(minute: int) -> float:
        total, weights = usual * UNSEEN, UNSEEN
        for back in range(1, BACK + 1):
            earlier = minute - back * season
            if 0 <= earlier < minutes and not math.isnan(counts[earlier]):
                total += NEWEST * (1.0 - NEWEST) ** (back - 1) * counts[earlier]
                weights += NEWEST * (1.0 - NEWEST) ** (back - 1)
        return total / weights

    assert told.tolist() == [naive(minute) for minute in range(judged, minutes)]
    place = -(-minutes // season) * season
    assert following.tolist() == [naive(minute) for minute in range(place, place + season)]


def test_a_plan_by_the_clock_is_one_of_windows_for_each_gap() -> None:
    plan = ByClock(1000.0, (Span(1090.0, 1100.0, 1160.0), Span(1400.0, math.inf, 1460.0)))
    assert plan.windows(1010.0) == ((90.0, 150.0),), "for the second none is started"
    assert plan.windows(1120.0) == ((0.0, 40.0),)
    assert plan.windows(1420.0) == ((0.0, 40.0),), "what is there is held"
    assert plan.windows(1500.0) == ()
    assert plan.following(((0.0, 20.0),)).windows(950.0) == ((0.0, 20.0), (150.0, 210.0))


@pytest.mark.parametrize("room", [30.0, 100.0, 400.0, 2000.0])
def test_no_gap_loses_more_than_the_room_that_a_plan_is_cut_to(room: float) -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        edges = np.sort(rng.uniform(0.0, 1200.0, 6))
        spans = tuple(
            Span(edges[i], edges[i] + float(rng.choice([0.0, 5.0, math.inf])), edges[i + 1]) for i in (0, 2, 4)
        )
        plan = ByClock(0.0, tuple(s if s.ready_s < s.until_s else replace(s, ready_s=math.inf) for s in spans))
        kept = plan.within(COSTS, room, 1.0)
        if kept is None:
            assert room < COSTS.of_start()
            continue
        for start_s in (*edges.tolist(), 0.0):
            for gap_s in rng.uniform(0.0, 1500.0, 20).tolist():
                for ended in (True, False):
                    assert gap_cost(kept.windows(start_s), gap_s, COSTS, ended=ended) <= room + 1e-6


SPEC = ScalingSpec(waiting_weight=10.0, devices=1)


def seen(now_s: float, *, replicas: int = 0, idle_s: float = 100.0) -> Observed:
    ready = (ReplicaView("r", Phase.READY, 0, 0.0),) * replicas
    return Observed(
        waiting=0,
        replicas=ready,
        peak_demand=0,
        last_activity_s=now_s - idle_s,
        cold_start_s=4.0,
        cold_start_high_s=5.0,
        window_covered_s=3600.0,
        seen_s=now_s,
    )


def test_a_replica_is_ready_when_its_span_says_and_held_to_the_end_of_it() -> None:
    forecast = Forecast("clock", 1000.0, clock=((1090.0, 1100.0, 1160.0), (1400.0, math.inf, 1460.0)))
    early = decide(SPEC, seen(1050.0), forecast, 1050.0)
    assert (early.desired, early.ask_again_s) == (0, 1095.0)
    begun = decide(SPEC, seen(1095.0), forecast, 1095.0)
    assert (begun.desired, begun.reason) == (1, Reason.PREWARM)
    held = decide(SPEC, seen(1155.0, replicas=1), forecast, 1155.0)
    assert (held.desired, held.ask_again_s) == (1, 1160.0)
    assert decide(SPEC, seen(1161.0, replicas=1), forecast, 1161.0).desired == 0
    assert decide(SPEC, seen(1410.0), forecast, 1410.0).desired == 0, "for this span none is started"
    assert decide(SPEC, seen(1410.0, replicas=1), forecast, 1410.0).desired == 1
    moved = forecast.moved(-1000.0).clock
    assert moved is not None and moved[0] == (90.0, 100.0, 160.0) and moved[1][1] == math.inf


def test_a_span_that_cannot_be_counts_for_nothing() -> None:
    forecast = Forecast("clock", 1000.0, clock=((1090.0, 1100.0, math.nan),))
    assert decide(SPEC, seen(1095.0), forecast, 1095.0).desired == 0


def timed(since_s: float, until_s: float, phase: int, seed: int) -> list[float]:
    """Eight calls by chance in each fifth minute, one in ten minutes beside them."""
    rng = np.random.default_rng(seed)
    begins = np.arange(since_s + 60.0 * phase, until_s - 60.0, 300.0)
    calls = (begins[:, None] + rng.uniform(0.0, 60.0, (len(begins), 8))).ravel()
    other = rng.uniform(since_s, until_s, int((until_s - since_s) / 600.0))
    return np.sort(np.concatenate([calls, other])).tolist()


def test_it_acts_once_it_has_won_and_calls_find_a_replica() -> None:
    life = Life(COSTS, service_s=1.0)
    half_s = START_S + DAY_S / 2
    life.live(timed(START_S, half_s, 2, 0), half_s)
    forecast = life.choosing.forecast
    assert forecast is not None and forecast.source == "clock" and forecast.clock
    paid, reactive = life.paid, life.reactive
    life.live(timed(half_s, half_s + DAY_S / 4, 2, 1), half_s + DAY_S / 4)
    assert life.paid - paid < 0.9 * (life.reactive - reactive)


def test_timers_that_change_their_minute_cost_no_more_than_the_credit() -> None:
    life = Life(COSTS, service_s=1.0)
    for part in range(6):
        until_s = life.now_s + DAY_S / 4
        life.live(timed(life.now_s, until_s, (2, 4, 1)[part % 3], part), until_s)
    life.now_s += DAY_S / 8
    life.refit()
    life.settle_silence()
    within_a_window = 8 * COSTS.of_start(life.choosing.waiters)
    credit = STARTS * COSTS.of_start(life.choosing.waiters) + SHARE * life.reactive
    assert life.paid - life.reactive <= credit + within_a_window
