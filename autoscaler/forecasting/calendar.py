"""Civil dates from seconds since the epoch, and back, in a given time zone; nothing of it reads a clock or a file.

A zone is a function from an instant to its offset from UTC in seconds: whoever calls has the database of time zones.
Days are counted as in Howard Hinnant's "chrono-compatible low-level date algorithms". Limits: the Gregorian calendar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

Zone: TypeAlias = Callable[[float], float]
"""Seconds to add to UTC to get the local time at that instant."""


def utc(at_s: float) -> float:
    return 0.0


class Civil(NamedTuple):
    year: int
    month: int
    day: int
    hour: int
    minute: int
    weekday: int
    """0 is Sunday, as cron has it."""


def civil(local_s: float) -> Civil:
    """Of a local time in seconds since 1970-01-01 00:00 local time."""
    days, second = divmod(int(local_s // 1), 86_400)
    shifted = days + 719_468
    era, day_of_era = divmod(shifted, 146_097)
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * day_of_year + 2) // 153
    month = shifted_month + 3 if shifted_month < 10 else shifted_month - 9
    return Civil(
        year_of_era + era * 400 + (month <= 2),
        month,
        day_of_year - (153 * shifted_month + 2) // 5 + 1,
        second // 3_600,
        second % 3_600 // 60,
        (days + 4) % 7,
    )


def instants_of(local_s: float, zone: Zone) -> tuple[float, ...]:
    """The instants at which clocks there show that time: none where summer time skips it, two where it is repeated."""
    offsets = {zone(local_s - 86_400.0), zone(local_s + 86_400.0)}
    found = {local_s - offset for offset in offsets if zone(local_s - offset) == offset}
    return tuple(sorted(found))
