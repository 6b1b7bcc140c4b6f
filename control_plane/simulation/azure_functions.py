"""Azure functions traces: `hash_func,day,1,...,1440`, a function's day a row, a count a minute (2019 release, by way of
Faro).

Limits: when within its minute a request came was not recorded (drawn as a Poisson process given its count), nor were
tokens; day 1 is taken to be 2019-07-15, a Monday, the first of the release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from control_plane.simulation.rates import Rates
from control_plane.simulation.rows import cells, count, in_order
from control_plane.simulation.trace import BadTrace

MINUTES: Final = 1440
HEAD: Final = ("hash_func", "day", *(str(minute) for minute in range(1, MINUTES + 1)))
ORIGIN_S: Final = 1_563_148_800.0
NAME_DIGITS: Final = 12


def read_azure_functions(path: Path) -> Rates:
    places: dict[str, int] = {}
    last_day: dict[str, int] = {}
    functions: list[int] = []
    days: list[int] = []
    counts: list[list[int]] = []
    for line, (name, day_text, *minutes) in cells(path, HEAD):
        day = count(path, line, "day", day_text, most=100_000)
        in_order(path, line, f"the day of {name[:NAME_DIGITS]}", day, last_day.get(name), strictly=True)
        last_day[name] = day
        functions.append(places.setdefault(name, len(places)))
        days.append(day)
        counts.append([count(path, line, f"minute {at}", text) for at, text in enumerate(minutes, 1)])
    if not counts:
        raise BadTrace(path, None, "holds no function")
    first = min(days)
    start_s = (np.asarray(days, np.float64)[:, None] - first) * 86_400 + np.arange(MINUTES) * 60.0
    table = np.asarray(counts, np.int64)
    some = table > 0
    return Rates(
        source=path.name.split(".")[0],
        names=tuple(name[:NAME_DIGITS] for name in places),
        window_s=60.0,
        function=np.broadcast_to(np.asarray(functions, np.int32)[:, None], table.shape)[some],
        start_s=start_s[some],
        count=table[some],
        cv=np.ones(int(some.sum())),
        length_s=(max(days) - first + 1) * 86_400.0,
        origin_s=ORIGIN_S + (first - 1) * 86_400.0,
    )
