"""Peers by the names that a command line gives them: `knative`, `keepalive:600`, `reactive`, `histogram`, `oracle`.

Parameters follow the name as `key=value`, separated by commas: `knative:utilisation=0.8,stable_window_s=120`. Limits:
numbers only; which parameters there are is each policy's to say (`PARAMETERS`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from autoscaler.simulator.peers.histogram import Histogram, HistogramSpec
from autoscaler.simulator.peers.keepalive import KeepAlive, Reactive
from autoscaler.simulator.peers.knative import Knative
from autoscaler.simulator.peers.kpa import KpaSpec
from autoscaler.simulator.peers.oracle import Oracle
from autoscaler.simulator.policy import Policy
from autoscaler.simulator.workload import Workload

_LOAD: Final = ("utilisation", "scale_in_s")
_KPA: Final = (
    "stable_window_s", "panic_window_percentage", "panic_threshold", "max_scale_up_rate", "max_scale_down_rate",
    "target_burst_capacity", "scale_down_delay_s", "scale_to_zero_grace_s", "pod_retention_s", "activation_scale",
)  # fmt: skip
_HISTOGRAM: Final = (
    "range_s", "head", "tail", "margin", "cv_least", "gaps_least", "outside_most", "series_margin",
)  # fmt: skip
_WHOLE: Final = frozenset({"activation_scale", "gaps_least"})
PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "knative": ("utilisation", *_KPA),
    "keepalive": ("seconds", *_LOAD),
    "reactive": ("factor", *_LOAD),
    "histogram": (*_HISTOGRAM, *_LOAD),
    "oracle": (),
}


def peer(told: str, workload: Workload) -> Policy:
    """The policy a command line names. `workload`: what the oracle knows. Raises `ValueError` with what is wrong."""
    name, _, rest = told.partition(":")
    if name not in PARAMETERS:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(sorted(PARAMETERS))}")
    given = _given(name, rest)
    load = {key: given.pop(key) for key in _LOAD if key in given and name != "knative"}
    made: Policy
    if name == "knative":
        utilisation = given.pop("utilisation", 0.7)
        made = Knative(utilisation=utilisation, spec=replace(KpaSpec(), **given))  # type: ignore[arg-type]
    elif name == "keepalive":
        made = KeepAlive(given.get("seconds", 600.0), **load)
    elif name == "reactive":
        made = Reactive(**given, **load)
    elif name == "histogram":
        made = Histogram(replace(HistogramSpec(), **given), **load)  # type: ignore[arg-type]
    else:
        made = Oracle(workload)
    made.name = told
    return made


def _given(name: str, rest: str) -> dict[str, float]:
    given: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, is_named, text = part.partition("=")
        if not is_named:
            key, text = "seconds", part
        if key not in PARAMETERS[name]:
            known = ", ".join(PARAMETERS[name]) or "none"
            raise ValueError(f"{name} has no parameter {key!r}; it has {known}")
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{key} of {name} is {text!r} instead of a number") from None
        given[key] = int(value) if key in _WHOLE else value
    return given
