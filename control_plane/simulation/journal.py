"""Stoker's own traffic, asked of the running service: requests, and functions as fast as they were measured to be.

Step times are fitted to what requests took: while a request decodes, its share of the device against the time that
passes says how many ran beside it. Limits: the mean of a request's steps, not each step; a function that was never
started or hardly used is taken to be a model of `ASSUMED`; a device is taken to be one replica's.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from autoscaler.service import ServiceModel
from autoscaler.simulator.workload import SimFunction
from autoscaler.start_times import END, StartTimes
from control_plane.client import Client
from control_plane.errors import InvalidRequest
from control_plane.simulation.sizes import OBJECTIVE_S, Size
from control_plane.simulation.trace import Trace, origin_of

ASSUMED: Final = Size(1.0)
DAY_S: Final = 86_400
SAMPLES_MOST: Final = 20_000
DECODED_LEAST: Final = 4
"""Tokens below which a request says little about steps."""
PREFILL_SHARE_LEAST: Final = 0.1
WAY_QUANTILE: Final = 0.25
TARGET: Final = 8.0
"""`scaling.target_concurrency` of a spec that does not say."""


@dataclass(frozen=True, slots=True)
class OwnTraffic:
    trace: Trace
    functions: tuple[SimFunction, ...]


def from_journal(client: Client, days: float, advance: Callable[[str], None], tenant: str | None = None) -> OwnTraffic:
    """The last `days`. Raises `InvalidRequest` where nothing came."""
    until_s = int(time.time()) + 1
    since_s = int(origin_of(until_s - days * DAY_S))
    query = {} if tenant is None else {"tenant": tenant}
    listed = client.request("GET", "/api/v1/traffic", query=query)["data"]
    columns: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    functions: list[SimFunction] = []
    notes: list[str] = []
    for told in listed:
        advance(str(told["name"]))
        rows = _requests(client, told["name"], {**query, "since": since_s, "until": until_s})
        if not rows:
            continue
        # Null times (never begun, never ended) become 0, which no time is.
        table = np.asarray([[value or 0 for value in row] for row in rows], np.int64)
        columns.append(np.column_stack([table, np.full(len(table), len(functions))]))
        functions.append(_function(told, table, notes))
    if not functions:
        raise InvalidRequest(f"nothing came in the last {days:g} days: there is nothing to replay", code="no_traffic")
    together = np.concatenate(columns)
    together = together[np.argsort(together[:, 0], kind="stable")]
    trace = Trace(
        source="journal",
        names=tuple(function.name for function in functions),
        tenants=tuple(function.tenant for function in functions),
        arrival_s=together[:, 0] / 1e6 - since_s,
        function=together[:, -1].astype(np.int32),
        prompt_tokens=np.maximum(together[:, 1], 1).astype(np.int32),
        output_tokens=np.maximum(together[:, 3], 1).astype(np.int32),
        length_s=float(until_s - since_s),
        origin_s=float(since_s),
        notes=tuple(notes),
    )
    return OwnTraffic(trace, tuple(functions))


def _requests(client: Client, name: str, query: dict[str, Any]) -> list[list[Any]]:
    path = "/api/v1/traffic/" + urllib.parse.quote(name, safe="")
    found: list[list[Any]] = []
    after: dict[str, Any] = {}
    while True:
        page = client.request("GET", path, query={**query, **after}, timeout_s=120.0)
        found += page["data"]
        if page["next"] is None:
            return found
        after = {"after": page["next"]}


def _function(told: dict[str, Any], table: np.ndarray[Any, np.dtype[np.int64]], notes: list[str]) -> SimFunction:
    scaling = told["scaling"]
    max_requests = int(scaling.get("max_concurrency", 32))
    service = service_of(table, max_requests)
    if service is None:
        service = ASSUMED.service()
        notes.append(f"{told['name']}: too few requests to know its speed; taken for a {ASSUMED.parameters_b:g}B model")
    starts = _starts(told)
    ends_s = starts.quantile_s(0.5, None, END) or 0.0
    if not starts.measured:
        starts = ASSUMED.starts()
        notes.append(f"{told['name']}: never started; start times of a {ASSUMED.parameters_b:g}B model are taken")
    return SimFunction(
        name=told["name"],
        tenant=told["tenant"],
        model_bytes=ASSUMED.nbytes,
        service=service,
        starts=starts,
        objective_s=OBJECTIVE_S,
        min_replicas=int(scaling.get("min_replicas", 0)),
        max_replicas=int(scaling.get("max_replicas", 1)),
        target_concurrency=float(scaling.get("target_concurrency", TARGET) or 0),
        keep_alive_s=None if (kept := scaling.get("keep_alive", "auto")) == "auto" else float(kept),
        ends_s=ends_s,
        way_s=way_of(table),
    )


def _starts(told: dict[str, Any]) -> StartTimes:
    """By tier, as the control loop measured them; else what replicas were charged before they were ready."""
    try:
        measured = StartTimes.from_json(told.get("start_times") or "")
    except ValueError:
        measured = StartTimes()
    return measured if measured.measured else StartTimes.of(told["starts_s"])


def way_of(table: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    """Seconds of a request's time to its first token in which neither was it computed nor did it wait for a place: of
    those that waited least, as most of a quiet function's requests meet a start."""
    created_us, _, _, _, first_us, _, prefill_us = table[-SAMPLES_MOST:, :7].T.astype(np.float64)
    answered = (first_us > 0) & (prefill_us > 0)
    if not answered.any():
        return 0.0
    way_us = first_us[answered] - created_us[answered] - prefill_us[answered]
    return max(float(np.quantile(way_us, WAY_QUANTILE)), 0.0) / 1e6


def service_of(table: np.ndarray[Any, np.dtype[np.int64]], max_requests: int) -> ServiceModel | None:
    """Columns as `traffic.Page` has them. None: too little to fit."""
    table = table[-SAMPLES_MOST:]
    _, prompt, cached, output, first_us, finished_us, prefill_us, decode_us = table[:, :8].T.astype(np.float64)
    passed_us = finished_us - first_us
    decoded = (output >= DECODED_LEAST) & (first_us > 0) & (passed_us > 0) & (decode_us > 0)
    step_s = passed_us[decoded] / 1e6 / (output[decoded] - 1)
    beside = np.clip(np.rint(passed_us[decoded] / decode_us[decoded]), 1, max_requests)
    steps = [(int(n), int(n), float(s)) for n, s in zip(beside, step_s, strict=True)]
    service = ServiceModel.fitted(steps, max_requests=max_requests)
    computed = prompt - cached
    prefilled = (computed > 0) & (prefill_us > 0)
    if service is None or not prefilled.any():
        return service
    # The pass that computes a prompt gives the first token as well, for which the model counts a step of its own.
    spent_s = prefill_us[prefilled] / 1e6
    own_s = np.maximum(spent_s - service.step_s(1), PREFILL_SHARE_LEAST * spent_s)
    return replace(service, prefill_tokens_per_s=float(computed[prefilled].sum() / own_s.sum()))
