"""How a function is scaled, told: what is known of its load, what was forecast and what came, what its starts were for.

Limits: histories and forecasts are the leader's; another gateway tells what is written down (starts and their causes).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from control_plane.decisions import Decision
from control_plane.lanes import FunctionKey
from control_plane.load_meter import WINDOW_S

if TYPE_CHECKING:
    from control_plane.context import AppContext
    from control_plane.forecasting import Said
    from control_plane.functions import Function
    from control_plane.observations import FunctionLoad

SOON_S: Final = 60.0
WINDOWS_SHOWN: Final = 6


def scaling_body(context: AppContext, function: Function, decisions: list[Decision]) -> dict[str, Any]:
    key = (function.tenant, function.name)
    starts = [decision for decision in decisions if decision.kind == "start"]
    causes = Counter(str(decision.inputs.get("cause", "unknown")) for decision in starts)
    body: dict[str, Any] = {
        "mode": function.spec.scaling.mode,
        "leads": context.loop.leads,
        "starts": [
            {
                "at_us": decision.at_us,
                "replica_id": decision.replica_id,
                "cause": decision.inputs.get("cause"),
                "restart": bool(decision.inputs.get("restart")),
                "reason": decision.reason,
            }
            for decision in starts
        ],
        "causes": dict(causes),
    }
    load = context.loop.observations.of(key)
    if context.loop.leads and load is not None:
        body |= _known(context, key, load)
    return body


def _known(context: AppContext, key: FunctionKey, load: FunctionLoad) -> dict[str, Any]:
    starting, now_s = context.loop.starting, time.monotonic()
    return {
        "load": _windows(load),
        "start_times_s": {
            tier: {
                "mean": load.starts.expected_s(tier),
                "p90": load.starts.quantile_s(0.9, tier),
                "stages": {stage: sum(kept) / len(kept) for stage, kept in load.starts.stages(tier).items() if kept},
            }
            for tier in load.starts.tiers
        },
        "restarts_in_hour": starting.restarts_of(key, now_s)[0],
        "started_ahead": {what: starting.ahead[key[1], what] for what in ("used", "wasted")},
        "forecast": _forecast(context, key, now_s),
        "forecast_against_actual": [_held_against(said, load) for said in context.loop.forecasting.said(key)],
    }


def _windows(load: FunctionLoad) -> list[dict[str, Any]]:
    """The last few windows that were watched; null: nobody saw it."""
    until_s = load.history.observed_until_s
    if until_s is None:
        return []
    since_s = until_s - WINDOWS_SHOWN * WINDOW_S
    columns = {
        name: load.history.series(name, WINDOW_S, since_s, until_s)
        for name in ("arrivals", "refused", "peak_concurrency", "first_token_s_max", "late")
    }
    starts = columns["arrivals"][0].tolist()
    values = {name: [None if value != value else value for value in pair[1].tolist()] for name, pair in columns.items()}
    return [
        {"at_us": round(start_s * 1e6), **{name: values[name][place] for name in values}}
        for place, start_s in enumerate(starts)
    ]


def _forecast(context: AppContext, key: FunctionKey, now_s: float) -> dict[str, Any] | None:
    forecast = context.loop.forecasting.of(key)
    if forecast is None:
        return None
    choosing = context.loop.forecasting.choosing(key)
    return {
        "source": forecast.source,
        "made_s_ago": round(now_s - forecast.made_s, 3),
        "valid": forecast.valid(now_s),
        "arrivals_per_s": forecast.rate_at(now_s),
        "warm_s": _finite(forecast.warm),
        "clock_s": _from_now(forecast.clock, now_s),
        "floor": forecast.floor_until(now_s, now_s + SOON_S),
        "service_s": forecast.service_s,
        "costs": [
            {"forecast": each.name, "decides": each.contest, "device_s": round(each.cost, 3), "acts": each.acting}
            for each in (choosing.standings() if choosing is not None else ())
        ],
    }


def _held_against(said: Said, load: FunctionLoad) -> dict[str, Any]:
    came = load.history.total("arrivals", WINDOW_S, said.at_s, said.at_s + SOON_S)
    over = (load.history.observed_until_s or 0.0) >= said.at_s + SOON_S
    gap_s, was_warm = None, None
    for start_s, length_s in zip(load.history.gap_starts_s.tolist(), load.history.gaps_s.tolist(), strict=True):
        if start_s + length_s > said.at_s:
            gap_s = length_s
            if said.warm is not None:
                was_warm = any(opens_s <= length_s < closes_s for opens_s, closes_s in said.warm)
            break
    return {
        "at_us": round(said.at_s * 1e6),
        "source": said.source,
        "expected_arrivals": said.expected,
        "arrivals": came if over else None,
        "warm_s": _finite(said.warm),
        "next_gap_s": gap_s,
        "warm_at_its_end": was_warm,
    }


def _from_now(spans: tuple[tuple[float, float, float], ...] | None, now_s: float) -> list[list[float | None]] | None:
    """Held from, ready at (null: none is started for it) and until, in seconds from now."""
    if spans is None:
        return None
    return [[round(at_s - now_s, 3) if math.isfinite(at_s) else None for at_s in span] for span in spans]


def _finite(windows: tuple[tuple[float, float], ...] | None) -> list[list[float | None]] | None:
    """Intervals as JSON has them: an end at infinity is null."""
    if windows is None:
        return None
    return [[opens_s, None if closes_s == float("inf") else closes_s] for opens_s, closes_s in windows]
