"""A comparison as tables for people (rich), rows for programs (JSON, CSV).

`closed`: how much of the way from the best peer to the oracle a policy has come. Limits: numbers for people have three
digits; files have them all.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from control_plane.simulation.study import OWN, Row, known

if TYPE_CHECKING:
    from rich.table import Table


def record(row: Row) -> dict[str, Any]:
    result = row.result
    return {
        "policy": row.policy,
        "waiting_weight": row.weight,
        "objective_device_s": row.objective,
        "held_device_s": result.total("held_device_s"),
        "starting_device_s": result.total("starting_device_s"),
        "busy_device_s": result.total("busy_device_s"),
        "full_batch_device_s": result.total("full_batch_device_s"),
        "usd": row.usd,
        "requests": row.requests,
        "refused": int(result.total("refused")),
        "waited_s": row.waited_s,
        "first_token_p50_s": result.quantile_s(0.5),
        "first_token_p99_s": result.quantile_s(0.99),
        "cold_requests": int(result.total("cold_requests")),
        "starts": int(result.total("starts")),
        "stops": int(result.total("stops")),
        "restarts_within_break_even": result.restarts(row.weight),
        "stopped_before_ready": int(result.total("stopped_before_ready")),
        "starts_without_room": result.no_room,
    }


def closed(rows: Sequence[Row], row: Row) -> float | None:
    """Share of the way from the best other policy to the oracle; None: one of them is missing, or they are equal."""
    there = [each for each in rows if each.weight == row.weight]
    bound = min((each.objective for each in there if known(each.policy) == "oracle"), default=math.nan)
    peers = [each.objective for each in there if known(each.policy) not in (OWN, "oracle")]
    if not peers or math.isnan(bound) or min(peers) <= bound:
        return None
    return (min(peers) - row.objective) / (min(peers) - bound)


WIDE: Final = 116
"""Characters that all columns need; below, those of `_DISPENSABLE` are left out."""
_HEAD: Final = (
    "policy", "J dev-h", "x best", "held", "idle", "mean s", "p50 s", "p99 s", "cold", "starts", "restarts",
    "refused", "US$",
)  # fmt: skip
_DISPENSABLE: Final = frozenset({"x best", "p50 s", "restarts", "held"})


def table(rows: Sequence[Row], weight: float, width: int = WIDE) -> Table:
    """`held`, `idle`: device-hours, the second beyond what full batches would hold; seconds are to the first token."""
    from rich import box
    from rich.table import Table

    here = [row for row in rows if row.weight == weight]
    least = min(row.objective for row in here)
    left_out = set(_DISPENSABLE) if width < WIDE else set()
    if not any(row.device_usd_per_hour for row in here):
        left_out.add("US$")
    made = Table(
        title=f"a second of waiting is worth {weight:g} device-seconds",
        title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False,
    )  # fmt: skip
    for name in _HEAD:
        if name not in left_out:
            made.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in sorted(here, key=lambda each: each.objective):
        result = row.result
        cells = (
            row.policy,
            _hours(row.objective),
            f"{row.objective / least:.2f}" if least > 0 else "-",
            _hours(result.total("held_device_s")),
            _hours(row.idle_device_s),
            f"{row.waited_s / max(row.requests, 1):.3g}",
            f"{result.quantile_s(0.5):.3g}",
            f"{result.quantile_s(0.99):.3g}",
            f"{int(result.total('cold_requests')):,}",
            f"{int(result.total('starts')):,}",
            f"{result.restarts(row.weight):,}",
            f"{int(result.total('refused')):,}",
            f"{row.usd:,.2f}",
        )
        shown = [cell for name, cell in zip(_HEAD, cells, strict=True) if name not in left_out]
        made.add_row(*shown, style="bold" if known(row.policy) == OWN else "")
    return made


def _hours(device_s: float) -> str:
    hours = device_s / 3600
    return f"{hours:,.1f}" if abs(hours) >= 10 else f"{hours:.3g}"


def write_summary(path: Path, rows: Sequence[Row]) -> None:
    _write(path, [record(row) for row in rows])


def write_functions(path: Path, rows: Sequence[Row]) -> None:
    _write(
        path,
        [
            {
                "policy": row.policy,
                "waiting_weight": row.weight,
                "function": each.name,
                "objective_device_s": each.objective(row.weight),
                "requests": each.requests,
                "refused": each.refused,
                "waited_s": each.waited_s,
                "held_device_s": each.held_device_s,
                "starting_device_s": each.starting_device_s,
                "full_batch_device_s": each.full_batch_device_s,
                "cold_requests": each.cold_requests,
                "starts": each.starts,
                "restarts_within_break_even": each.restarts(row.weight),
            }
            for row in rows
            for each in row.result.functions
        ],
    )


def write_series(path: Path, rows: Sequence[Row]) -> None:
    names = ("time_s", "devices_held", "replicas_ready", "replicas_starting", "waiting", "running")
    _write(
        path,
        [
            {"policy": row.policy, "waiting_weight": row.weight, **dict(zip(names, sample, strict=True))}
            for row in rows
            for sample in row.result.series.tolist()
        ],
    )


def _write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]) if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
