"""Which windows count, what becomes of them at each resolution, and what is not seen."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autoscaler.windows import CAPACITY, GAPS_KEPT, STEPPED_BACK_AFTER, History, Refusal, Window, combined

DAY_S = 86_400.0
T0 = 20_000 * DAY_S


def ten(n: int, **values: float) -> Window:
    """The n-th window of 10 s after T0."""
    return Window(T0 + 10 * n, 10, **values)


def test_coarse_windows_are_made_of_the_fine_ones() -> None:
    history = History()
    for n in range(60):
        assert history.add(ten(n, arrivals=2, peak_concurrency=n, mean_concurrency=0.5, kv_used_share=0.1)) is None
    starts, counts = history.arrivals(60, T0, T0 + 600)
    assert starts.tolist() == [T0 + 60 * n for n in range(10)]
    assert counts.tolist() == [12.0] * 10
    assert history.arrivals(600, T0, T0 + 600)[1].tolist() == [120.0]
    assert history.series("peak_concurrency", 60, T0, T0 + 120)[1].tolist() == [5.0, 11.0]
    assert history.series("mean_concurrency", 600, T0, T0 + 600)[1].tolist() == [0.5]
    assert history.series("kv_used_share", 600, T0, T0 + 600)[1] == pytest.approx([0.1])


def test_a_quiet_window_is_zero_and_one_nobody_watched_is_nan() -> None:
    history = History()
    history.add(ten(0, arrivals=1))
    history.add(ten(1))
    history.observed(T0 + 40, T0 + 60)
    counts = history.arrivals(10, T0, T0 + 80)[1]
    assert counts.tolist()[:2] == [1.0, 0.0]
    assert np.isnan(counts[[2, 3, 6, 7]]).all()
    assert counts[[4, 5]].tolist() == [0.0, 0.0]


def test_a_window_watched_in_part_is_scaled_up_and_one_watched_for_less_than_half_is_not_seen() -> None:
    history = History()
    for n in range(4):
        history.add(ten(n, arrivals=3))
    history.add(ten(6, arrivals=3))
    counts = history.arrivals(60, T0, T0 + 120)[1]
    assert counts[0] == pytest.approx(18.0)
    assert math.isnan(counts[1])
    assert history.total("arrivals", 60, T0, T0 + 120) == 15.0


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Window)])
def test_numbers_that_are_none_and_negative_ones_are_refused_and_counted(field: str) -> None:
    history = History()
    for value, reason in ((math.nan, Refusal.NOT_A_NUMBER), (math.inf, Refusal.NOT_A_NUMBER), (-1.0, Refusal.NEGATIVE)):
        assert history.add(dataclasses.replace(ten(0), **{field: value})) is reason
    assert history.refusals == {Refusal.NOT_A_NUMBER: 2, Refusal.NEGATIVE: 1}
    assert history.observed_until_s is None


def test_windows_of_other_lengths_or_off_the_grid_are_refused() -> None:
    history = History()
    assert history.add(Window(T0, 15)) is Refusal.UNEVEN
    assert history.add(Window(T0 + 3, 10)) is Refusal.UNEVEN


def test_one_window_late_counts_and_two_are_refused() -> None:
    history = History()
    history.add(ten(0, arrivals=1))
    history.add(ten(3, arrivals=1))
    assert history.add(ten(2, arrivals=7)) is None
    assert history.add(ten(1, arrivals=9)) is Refusal.LATE
    counts = history.arrivals(10, T0, T0 + 40)[1]
    assert counts[[0, 2, 3]].tolist() == [1.0, 7.0, 1.0]
    assert math.isnan(counts[1])


def test_a_window_told_twice_counts_once() -> None:
    history = History()
    for window in (ten(0, arrivals=5), ten(0, arrivals=5), ten(1), ten(1, arrivals=2)):
        history.add(window)
    assert history.arrivals(10, T0, T0 + 20)[1].tolist() == [5.0, 0.0]
    assert history.refusals == {Refusal.DUPLICATED: 2}


def test_a_clock_put_forward_leaves_a_hole() -> None:
    history = History()
    history.add(ten(0, arrivals=1))
    history.add(ten(360, arrivals=1))
    counts = history.arrivals(600, T0 - 600, T0 + 4200)[1]
    assert np.isnan(counts).sum() == len(counts)  # neither window of 600 s was watched for half of its time
    assert np.isnan(history.arrivals(10, T0, T0 + 3610)[1]).sum() == 359


def test_a_clock_put_back_is_believed_after_a_minute_and_what_it_had_shown_goes() -> None:
    history = History()
    for n in range(1000, 1010):
        history.add(ten(n, arrivals=1))
    history.note_gap(T0 + 10_050, 20.0)
    told = [history.add(ten(n, arrivals=4)) for n in range(10)]
    assert told[: STEPPED_BACK_AFTER - 1] == [Refusal.LATE] * (STEPPED_BACK_AFTER - 1)
    assert told[STEPPED_BACK_AFTER - 1 :] == [None] * (11 - STEPPED_BACK_AFTER)
    assert history.observed_until_s == T0 + 100
    assert np.nansum(history.arrivals(10, T0, T0 + 200)[1]) == 4.0 * (11 - STEPPED_BACK_AFTER)
    assert len(history.gaps_s) == 0


def test_late_windows_that_do_not_go_forward_are_no_clock_put_back() -> None:
    history = History()
    history.add(ten(1000, arrivals=1))
    assert [history.add(ten(5)) for _ in range(20)] == [Refusal.LATE] * 20
    assert history.observed_until_s == T0 + 10_010


def test_what_is_kept_is_bounded() -> None:
    history = History()
    history.add_many(60, T0, T0 + 18 * DAY_S, {"arrivals": np.ones(18 * 1440)})
    for n in range(18 * 1440, 20 * 1440):
        history.add(Window(T0 + 60 * n, 60, arrivals=1))
    for resolution, capacity in CAPACITY.items():
        rows = history._rows[resolution]
        assert rows.count <= len(rows.numbers) <= capacity + capacity // 8
    now_s = T0 + 20 * DAY_S
    assert np.nansum(history.arrivals(600, T0, now_s)[1]) == 15 * 1440
    assert len(history.arrivals(600, T0, now_s)[0]) == CAPACITY[600]
    for n in range(3000):
        history.note_gap(T0 + n, 0.5)
    assert len(history.gaps_s) == len(history.gap_starts_s) == GAPS_KEPT
    assert history.gap_starts_s[-1] == T0 + 2999


def test_a_function_called_once_a_day_takes_no_room_for_its_quiet_windows() -> None:
    history = History()
    for day in range(15):
        history.observed(T0 + day * DAY_S, T0 + (day + 1) * DAY_S - 10)
        history.add(Window(T0 + (day + 1) * DAY_S - 10, 10, arrivals=1))
    assert len(history.to_bytes()) < 2000
    assert np.nansum(history.arrivals(600, T0, T0 + 15 * DAY_S)[1]) == 15


def test_gaps_are_refused_where_they_are_none_or_known() -> None:
    history = History()
    assert history.note_gap(T0, 5.0)
    assert not history.note_gap(T0, 5.0)
    assert not history.note_gap(T0 - 1, 5.0)
    assert not history.note_gap(T0 + 9, math.nan)
    assert not history.note_gap(T0 + 9, -1.0)
    assert history.gaps_s.tolist() == [5.0]
    assert history.refusals == {
        Refusal.DUPLICATED: 1, Refusal.LATE: 1, Refusal.NOT_A_NUMBER: 1, Refusal.NEGATIVE: 1,
    }  # fmt: skip


def test_many_at_once_are_the_same_as_one_after_the_other() -> None:
    random = np.random.default_rng(5)
    counts = random.poisson(0.4, 500).astype(float)
    single, many = History(), History()
    for n, count in enumerate(counts):
        single.add(Window(T0 + 60 * n, 60, arrivals=count, peak_queue=count, mean_concurrency=count / 2))
    many.add_many(60, T0, T0 + 60 * 500, {"arrivals": counts, "peak_queue": counts, "mean_concurrency": counts / 2})
    for name in ("arrivals", "peak_queue", "mean_concurrency"):
        for resolution in (10, 60, 600):
            ours, theirs = (h.series(name, resolution, T0, T0 + 30_000)[1] for h in (many, single))
            np.testing.assert_allclose(ours, theirs)
    with pytest.raises(ValueError, match="before what there is"):
        many.add_many(60, T0, T0 + 60, {"arrivals": 1.0})
    with pytest.raises(ValueError, match="finite"):
        many.add_many(60, T0 + 60_000, T0 + 60_060, {"arrivals": math.nan})


def test_bytes_give_back_the_same_history_and_damaged_ones_none() -> None:
    history = History()
    for n in range(100):
        history.add(ten(n, arrivals=n % 7, first_token_s_max=0.25))
    history.note_gap(T0 + 5, 3.5)
    data = history.to_bytes()
    again = History.from_bytes(data)
    for name in ("arrivals", "first_token_s_max"):
        for resolution in (10, 60, 600):
            since_s, until_s = T0 - 600, T0 + 2000
            np.testing.assert_array_equal(
                again.series(name, resolution, since_s, until_s)[1],
                history.series(name, resolution, since_s, until_s)[1],
            )
    assert again.gaps_s.tolist() == [3.5]
    assert again.add(ten(100, arrivals=1)) is None
    assert again.add(ten(100, arrivals=1)) is Refusal.DUPLICATED
    for bad in (b"", data[:-1], data[:40] + b"x" + data[41:], b"something else entirely"):
        with pytest.raises(ValueError, match="no history"):
            History.from_bytes(bad)


def test_windows_of_several_gateways_are_one() -> None:
    one = ten(3, arrivals=2, peak_queue=4, kv_used_share=0.5, first_token_s_max=1.0, mean_concurrency=0.5)
    two = ten(3, arrivals=1, peak_queue=1, kv_used_share=0.2, first_token_s_max=3.0, mean_concurrency=1.0)
    both = combined([one, two])
    assert (both.start_s, both.arrivals, both.peak_queue, both.mean_concurrency) == (T0 + 30, 3, 5, 1.5)
    assert (both.kv_used_share, both.first_token_s_max) == (0.5, 3.0)
