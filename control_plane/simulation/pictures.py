"""What a comparison shows: replicas and queue over time, and cost against waiting for each policy.

Limits: times are hours of the scored time; the picture over time is of the first weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from control_plane.simulation.study import Row
from control_plane.simulation.svg import Chart, Panel, Series

NOTE_WIDTH: Final = 150
BINS: Final = 320
GREY: Final = 7


def over_time(rows: Sequence[Row], notes: Sequence[str]) -> Chart:
    """Of each policy, by the samples of its simulation: devices held on average, the longest queue."""
    names = list(dict.fromkeys(row.policy for row in rows))
    first = [next(row for row in rows if row.policy == name) for name in names]
    held = [_binned(row, 1, longest=False) for row in first]
    waiting = [_binned(row, 4, longest=True) for row in first]
    most_held = max((max(ys, default=0.0) for _, ys in held), default=0.0)
    most_waiting = max((max(ys, default=0.0) for _, ys in waiting), default=0.0)
    panels = []
    for place, name in enumerate(names):
        devices = Series("devices held", *held[place], fill=True, colour=place)
        queue = Series("requests waiting", *waiting[place], fill=True, colour=GREY)
        last = place + 1 == len(names)
        panels.append(Panel(name, "", (devices,), height=78, y_most=most_held, joined=True))
        panels.append(Panel("", "", (queue,), height=44, y_most=most_waiting, joined=not last))
    title = f"Replicas and queue over time (a second of waiting is worth {rows[0].weight:g} device-seconds)"
    return Chart(title, "hours", tuple(panels), _short(notes))


def _binned(row: Row, column: int, *, longest: bool) -> tuple[list[float], list[float]]:
    """(hours, values) of `BINS` stretches of time: the most or the mean of each."""
    series = row.result.series
    parts = np.array_split(series, min(BINS, len(series))) if len(series) else []
    hours = [float(part[0, 0] - row.result.since_s) / 3600 for part in parts]
    return hours, [float(part[:, column].max() if longest else part[:, column].mean()) for part in parts]


def cost_against_waiting(rows: Sequence[Row], notes: Sequence[str]) -> Chart:
    """Idle device-hours against mean seconds to the first token; nearer to the lower left is better."""
    names = list(dict.fromkeys(row.policy for row in rows))
    made = []
    for name in names:
        mine = [row for row in rows if row.policy == name]
        points = sorted({(_mean_s(row), row.idle_device_s / 3600) for row in mine})
        labels = {(_mean_s(row), row.idle_device_s / 3600): f"{row.weight:g}" for row in mine}
        several = len(points) > 1
        made.append(
            Series(
                name,
                [point[0] for point in points],
                [point[1] for point in points],
                points=True,
                labels=[labels[point] if several else "" for point in points],
            )
        )
    panel = Panel(
        "Device-hours held beyond full batches",
        "device-hours",
        made,
        height=400,
        log_x=all(point > 0 for each in made for point in each.xs),
        log_y=all(point > 0 for each in made for point in each.ys),
    )
    told = "numbers beside points: the weight of waiting a policy was given; policies without one do not look at it"
    return Chart("Cost against waiting", "mean seconds to the first token", (panel,), (told, *_short(notes)))


def _mean_s(row: Row) -> float:
    return row.waited_s / max(row.requests, 1)


def _short(notes: Sequence[str]) -> tuple[str, ...]:
    return tuple(note if len(note) <= NOTE_WIDTH else note[: NOTE_WIDTH - 1] + "…" for note in notes)
