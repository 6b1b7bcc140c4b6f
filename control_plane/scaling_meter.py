"""How scaling goes, for Prometheus: what starts were due to, what starting ahead was good for, what forecasts cost.

Limits: counted by the gateway that leads, since it came to lead; forecasts are those of the functions it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from control_plane.context import AppContext


def scaling_families(context: AppContext) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    loop = context.loop
    starting, observations, forecasting = loop.starting, loop.observations, loop.forecasting
    starts = CounterMetricFamily("stoker_starts", "Replicas asked for, by cause", labels=["function", "cause"])
    for (function, cause), count in starting.causes.items():
        starts.add_metric([function, cause], count)
    yield starts
    ahead = CounterMetricFamily(
        "stoker_started_ahead", "Replicas started ahead of need, by what became of them", labels=["function", "outcome"]
    )
    for (function, outcome), count in starting.ahead.items():
        ahead.add_metric([function, outcome], count)
    yield ahead
    restarts = CounterMetricFamily("stoker_restarts", "Starts that followed a stop", labels=["function"])
    for function, count in starting.restarts.items():
        restarts.add_metric([function], count)
    yield restarts
    shares = CounterMetricFamily(
        "stoker_kv_shares", "Replicas told of another share of their device's memory", labels=["change"]
    )
    for change, count in context.kv_sharing.told.items():
        shares.add_metric([change], count)
    yield shares
    refused = CounterMetricFamily(
        "stoker_load_windows_refused", "Windows of load that did not count, by reason", labels=["reason"]
    )
    for reason, count in observations.refused.items():
        refused.add_metric([reason], count)
    yield refused
    yield CounterMetricFamily(
        "stoker_clock_jumps", "Times the wall clock was set", value=context.dispatcher.load.clock_jumps
    )
    yield CounterMetricFamily("stoker_forecast_refits", "Forecasts made anew", value=forecasting.refits)
    yield CounterMetricFamily("stoker_forecast_refit_seconds", "Spent on it", value=forecasting.refit_s)
    yield CounterMetricFamily(
        "stoker_forecast_failures", "Forecasts that could not be made", value=forecasting.failures
    )
    costs = GaugeMetricFamily(
        "stoker_forecast_cost_device_seconds",
        "What a forecast would have cost lately, starts and waiting included, in device-seconds",
        labels=["function", "decides", "forecast", "acts"],
    )
    for known in context.functions.list():
        choosing = forecasting.choosing((known.tenant, known.name))
        for each in choosing.standings() if choosing is not None else ():
            costs.add_metric([known.name, each.contest, each.name, str(each.acting).lower()], each.cost)
    yield costs
