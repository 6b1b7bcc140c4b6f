"""Schedules given by the user: cron in a time zone, for how long, and how many replicas. They count as a forecast.

Five fields (minute, hour, day of the month, month, day of the week) with lists, ranges, steps and names, as crontab(5)
has them, the rule of its two day fields included: if both are restricted, either will do. A time that summer time skips
comes at the end of the skipped hour; one that it repeats comes once. Limits: whole minutes; no seconds, no @reboot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoscaler.forecasting.calendar import Zone, civil, instants_of, utc

MINUTE_S = 60.0
_FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 7))
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_NAMES = {3: {name: number + 1 for number, name in enumerate(_MONTHS)}, 4: dict(zip(_DAYS, range(7), strict=True))}
_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
LONGEST_S = 7 * 86_400.0
"""A schedule that asks for replicas for longer is `min_replicas`."""


class ScheduleError(ValueError):
    """A cron expression or a duration that means nothing; the message says which part."""


@dataclass(frozen=True, slots=True)
class Cron:
    """When: sets of what each field allows."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool
    """Both day fields are restricted: one of them is enough."""

    @classmethod
    def parsed(cls, text: str) -> Cron:
        """Raises ScheduleError."""
        words = _ALIASES.get(text.strip().lower(), text).split()
        if len(words) != 5:
            raise ScheduleError(f"cron {text!r} has {len(words)} fields, not the five: minute hour day month weekday")
        minutes, hours, days, months, weekdays = (_allowed(number, word) for number, word in enumerate(words))
        either = not words[2].startswith("*") and not words[4].startswith("*")
        cron = cls(minutes, hours, days, months, frozenset(day % 7 for day in weekdays), either)
        if not either and weekdays >= set(range(7)) and not any(cron._exists(month) for month in months):
            raise ScheduleError(f"cron {text!r} names a day that never comes")
        return cron

    def _exists(self, month: int) -> bool:
        return min(self.days) <= (29 if month == 2 else 30 if month in (4, 6, 9, 11) else 31)

    def on_day(self, local_s: float) -> bool:
        date = civil(local_s)
        if date.month not in self.months:
            return False
        by_month, by_week = date.day in self.days, date.weekday in self.weekdays
        return by_month or by_week if self.either_day else by_month and by_week

    def times(self, since_s: float, until_s: float, zone: Zone = utc) -> list[float]:
        """Instants in [since, until) at which it comes, in order."""
        found: set[float] = set()
        day_s = (since_s + zone(since_s)) // 86_400 * 86_400 - 86_400
        while day_s <= until_s + 2 * 86_400:
            if self.on_day(day_s):
                for hour in self.hours:
                    for minute in self.minutes:
                        found.add(_first_instant(day_s + 3_600 * hour + 60 * minute, zone))
            day_s += 86_400
        return sorted(at_s for at_s in found if since_s <= at_s < until_s)


def _first_instant(local_s: float, zone: Zone) -> float:
    instants = instants_of(local_s, zone)
    if instants:
        return instants[0]
    # Skipped: the first instant after the change, which is where the offset before and the one after meet.
    before, after = local_s - 86_400.0, local_s + 86_400.0
    low, high = before, after
    while high - low > 1.0:
        middle = (low + high) / 2
        if zone(middle) == zone(before):
            low = middle
        else:
            high = middle
    return float(round(high))


def _allowed(number: int, text: str) -> frozenset[int]:
    name, low, high = _FIELDS[number]
    allowed: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        try:
            step = int(step_text) if slash else 1
            if span == "*":
                first, last = low, high
            else:
                first_text, dash, last_text = span.partition("-")
                first = _number(number, first_text)
                last = _number(number, last_text) if dash else (high if slash else first)
        except ValueError:
            raise ScheduleError(f"{part!r} is no {name} of a cron expression ({low} to {high})") from None
        if step < 1 or not low <= first <= last <= high:
            raise ScheduleError(f"{part!r} is no {name} of a cron expression ({low} to {high}, ranges upwards)")
        allowed |= set(range(first, last + 1, step))
    return frozenset(allowed)


def _number(number: int, text: str) -> int:
    named = _NAMES.get(number, {}).get(text.lower())
    return int(text) if named is None else named


@dataclass(frozen=True, slots=True)
class Schedule:
    """From each time of `cron` on, for `length_s`, at least so many replicas."""

    cron: Cron
    length_s: float
    replicas: int = 1
    zone: Zone = utc

    @classmethod
    def parsed(cls, cron: str, length_s: float, replicas: int = 1, zone: Zone = utc) -> Schedule:
        """Raises ScheduleError."""
        if not MINUTE_S <= length_s <= LONGEST_S:
            raise ScheduleError(f"a schedule lasts from a minute to {LONGEST_S / 86_400:.0f} days, not {length_s} s")
        if replicas < 1:
            raise ScheduleError(f"a schedule asks for one replica or more, not {replicas}")
        return cls(Cron.parsed(cron), float(length_s), replicas, zone)

    def asked_for(self, since_s: float, until_s: float) -> tuple[tuple[float, float], ...]:
        """The intervals that touch [since, until), joined where they overlap."""
        joined: list[tuple[float, float]] = []
        for at_s in self.cron.times(since_s - self.length_s, until_s, self.zone):
            end_s = at_s + self.length_s
            if joined and at_s <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
            elif end_s > since_s:
                joined.append((at_s, end_s))
        return tuple(joined)


@dataclass(frozen=True, slots=True)
class Asked:
    """So many replicas from then to then."""

    begins_s: float
    ends_s: float
    replicas: int


def asked_for(schedules: tuple[Schedule, ...], since_s: float, until_s: float) -> tuple[Asked, ...]:
    """By any schedule, in [since, until). The calendar is walked here; `floors` is cheap."""
    return tuple(
        Asked(begins_s, ends_s, schedule.replicas)
        for schedule in schedules
        for begins_s, ends_s in schedule.asked_for(since_s, until_s)
    )


def floors(asked: tuple[Asked, ...], now_s: float, step_s: float, steps: int) -> tuple[int, ...]:
    """The most replicas that are asked for within each step; () if none are."""
    floor = [0] * steps
    for each in asked:
        first = max(math.floor((each.begins_s - now_s) / step_s), 0)
        last = min(math.ceil((each.ends_s - now_s) / step_s), steps)
        for step in range(first, last):
            floor[step] = max(floor[step], each.replicas)
    return tuple(floor) if any(floor) else ()
