"""Cron in a time zone: the calendar, the two day fields, and the hours that summer time skips and repeats."""

from __future__ import annotations

import datetime
import zoneinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.forecasting.calendar import civil, utc
from autoscaler.forecasting.schedule import Asked, Cron, Schedule, ScheduleError, asked_for, floors

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


def berlin(at_s: float) -> float:
    offset = datetime.datetime.fromtimestamp(at_s, BERLIN).utcoffset()
    assert offset is not None
    return offset.total_seconds()


def at(text: str, zone: datetime.tzinfo = datetime.UTC) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@settings(max_examples=200)
@given(st.integers(-(10**10), 10**11))
def test_civil_dates_are_those_of_the_calendar(second: int) -> None:
    date = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=second)
    found = civil(float(second))
    assert found == (date.year, date.month, date.day, date.hour, date.minute, date.isoweekday() % 7)


@pytest.mark.parametrize(
    ("cron", "since", "times"),
    [
        ("30 8 * * 1-5", "2026-01-02T00:00", ["2026-01-02T08:30", "2026-01-05T08:30", "2026-01-06T08:30"]),
        ("0 */6 * * *", "2026-01-01T05:00", ["2026-01-01T06:00", "2026-01-01T12:00", "2026-01-01T18:00"]),
        ("15,45 0 29 feb *", "2026-01-01T00:00", ["2028-02-29T00:15", "2028-02-29T00:45"]),
        ("0 0 1 * mon", "2026-05-30T00:00", ["2026-06-01T00:00", "2026-06-08T00:00", "2026-06-15T00:00"]),
        ("@weekly", "2026-01-01T00:00", ["2026-01-04T00:00", "2026-01-11T00:00"]),
        ("0 12 * * 7", "2026-01-01T00:00", ["2026-01-04T12:00", "2026-01-11T12:00"]),
    ],
)
def test_times_are_those_crontab_5_gives(cron: str, since: str, times: list[str]) -> None:
    wanted = [at(text) for text in times]
    assert Cron.parsed(cron).times(at(since), wanted[-1] + 60.0, utc) == wanted


def test_a_zone_moves_with_summer_time() -> None:
    times = Cron.parsed("0 9 * * *").times(at("2026-03-28T00:00"), at("2026-03-31T00:00"), berlin)
    assert times == [at(f"2026-03-{day}T09:00", BERLIN) for day in (28, 29, 30)]
    assert times[1] - times[0] == 23 * 3600.0


def test_a_skipped_time_comes_when_the_hour_has_been_skipped_and_a_repeated_one_once() -> None:
    skipped = Cron.parsed("30 2 * * *").times(at("2026-03-29T00:00"), at("2026-03-30T00:00"), berlin)
    assert skipped == [at("2026-03-29T01:00")], "clocks go from 2:00 to 3:00 then"
    repeated = Cron.parsed("30 2 * * *").times(at("2026-10-25T00:00"), at("2026-10-26T00:00"), berlin)
    assert repeated == [at("2026-10-25T00:30")], "the first 2:30"


@pytest.mark.parametrize(
    "cron",
    ["", "* * * *", "60 * * * *", "* 24 * * *", "5-1 * * * *", "*/0 * * * *", "* * 0 * *", "a * * * *", "0 0 31 feb *"],
)
def test_what_means_nothing_is_refused_with_the_part(cron: str) -> None:
    with pytest.raises(ScheduleError, match="cron"):
        Cron.parsed(cron)


@pytest.mark.parametrize(("length_s", "replicas"), [(0.0, 1), (10**9, 1), (600.0, 0), (float("nan"), 1)])
def test_lengths_and_counts_are_bounded(length_s: float, replicas: int) -> None:
    with pytest.raises(ScheduleError):
        Schedule.parsed("0 9 * * *", length_s, replicas)


def test_overlapping_times_are_one_interval_and_floors_take_the_most() -> None:
    schedules = (Schedule.parsed("*/10 9 * * *", 900.0, 2), Schedule.parsed("0 9 * * *", 600.0, 3))
    nine_s = at("2026-01-05T09:00")
    asked = asked_for(schedules, nine_s - 60.0, nine_s + 7_200.0)
    assert asked == (Asked(nine_s, nine_s + 3_000.0 + 900.0, 2), Asked(nine_s, nine_s + 600.0, 3))
    assert floors(asked, nine_s - 60.0, 60.0, 13) == (0, *[3] * 10, 2, 2)
    assert floors(asked, nine_s + 5_000.0, 60.0, 10) == ()


def test_an_interval_that_began_before_is_still_asked_for() -> None:
    schedule = Schedule.parsed("0 22 * * *", 8 * 3_600.0)
    two_s = at("2026-01-05T02:00")
    assert schedule.asked_for(two_s, two_s + 60.0) == ((two_s - 4 * 3_600.0, two_s + 4 * 3_600.0),)
