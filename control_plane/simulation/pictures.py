"""What a comparison shows: replicas and queue over time, and cost against waiting for each policy.

Limits: times are hours of the scored time; the picture over time is of the first weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from control_plane.simulation.study import Row
from control_plane.simulation.svg import Chart, Panel, Series

NOTE_WIDTH = 150


def over_time(rows: Sequence[Row], notes: Sequence[str]) -> Chart:
    """Of each policy, by the samples of its simulation."""
    names = list(dict.fromkeys(row.policy for row in rows))
    first = {name: next(row for row in rows if row.policy == name) for name in names}
    weight = rows[0].weight

    def lines(column: int, *others: int) -> list[Series]:
        made = []
        for name in names:
            series = first[name].result.series
            values = series[:, column] + sum(series[:, other] for other in others)
            made.append(Series(name, _hours(series, first[name].result.since_s), values.tolist(), steps=True))
        return made

    return Chart(
        f"Replicas and queue over time (waiting weighs {weight:g})",
        "hours",
        (
            Panel("Devices held", "devices", lines(1)),
            Panel("Replicas, ready or starting", "replicas", lines(2, 3)),
            Panel("Requests waiting", "requests", lines(4), height=150),
            Panel("Requests running", "requests", lines(5), height=120),
        ),
        _short(notes),
    )


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


def _hours(series: np.ndarray[tuple[int, ...], np.dtype[np.float64]], since_s: float) -> list[float]:
    hours: list[float] = ((series[:, 0] - since_s) / 3600).tolist()
    return hours


def _short(notes: Sequence[str]) -> tuple[str, ...]:
    return tuple(note if len(note) <= NOTE_WIDTH else note[: NOTE_WIDTH - 1] + "…" for note in notes)
