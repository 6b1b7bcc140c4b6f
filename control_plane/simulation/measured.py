"""What was measured of functions, beside an export of their traffic: `FILE.functions.json`.

Replays of an export are then of the very functions that served it, as those of a journal are. Limits: a file that does
not decode, or says what no function can be, is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from autoscaler.service import ServiceModel
from autoscaler.simulator.workload import SimFunction
from autoscaler.start_times import StartTimes
from control_plane.simulation.trace import BadTrace, Trace

_Some = Annotated[float, msgspec.Meta(gt=0)]
_AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Function(msgspec.Struct):
    tenant: str
    name: str
    model_bytes: Annotated[int, msgspec.Meta(ge=0)]
    devices: _Count
    objective_s: _Some
    min_replicas: Annotated[int, msgspec.Meta(ge=0)]
    max_replicas: _Count
    prefill_tokens_per_s: _Some
    step_base_s: _AtLeastZero
    step_per_request_s: _AtLeastZero
    step_per_context_token_s: _AtLeastZero
    max_requests: _Count
    kv_tokens: Annotated[int, msgspec.Meta(ge=0)]
    starts: Any
    target_concurrency: float = 0.0
    keep_alive_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    ends_s: _AtLeastZero = 0.0
    way_s: _AtLeastZero = 0.0


def beside(path: Path) -> Path:
    return path.with_name(path.name + ".functions.json")


def write_measured(path: Path, functions: Sequence[SimFunction]) -> None:
    """`path`: of the export."""
    told = [
        _Function(
            each.tenant, each.name, each.model_bytes, each.devices, each.objective_s, each.min_replicas,
            each.max_replicas, each.service.prefill_tokens_per_s, each.service.step_base_s,
            each.service.step_per_request_s, each.service.step_per_context_token_s, each.service.max_requests,
            each.service.kv_tokens, _json(each), each.target_concurrency, each.keep_alive_s, each.ends_s, each.way_s,
        )
        for each in functions
    ]  # fmt: skip
    beside(path).write_bytes(msgspec.json.format(msgspec.json.encode(told)) + b"\n")


def _json(function: SimFunction) -> Any:
    starts = function.starts
    return msgspec.json.decode(starts.to_json()) if isinstance(starts, StartTimes) else {}


def with_measured(path: Path, trace: Trace, assumed: Sequence[SimFunction]) -> tuple[SimFunction, ...]:
    """`assumed`, but for those that were measured. Raises `BadTrace`."""
    known = beside(path)
    if not known.exists():
        return tuple(assumed)
    try:
        told = msgspec.json.decode(known.read_bytes(), type=list[_Function])
        made = {(each.tenant, each.name): _made(each) for each in told}
    except (OSError, ValueError) as error:
        raise BadTrace(known, None, f"not what an export writes: {error}") from error
    tenants = trace.tenants or ("default",) * len(trace.names)
    keys = zip(tenants, trace.names, strict=True)
    return tuple(made.get(key, other) for key, other in zip(keys, assumed, strict=True))


def _made(told: _Function) -> SimFunction:
    service = ServiceModel(
        told.prefill_tokens_per_s, told.step_base_s, told.step_per_request_s, told.step_per_context_token_s,
        told.max_requests, told.kv_tokens, told.devices,
    )  # fmt: skip
    if service.step_s(1) <= 0:
        raise ValueError(f"{told.name}: a step takes no time")
    starts = StartTimes.from_json(msgspec.json.encode(told.starts).decode())
    if starts.expected_s() is None:
        raise ValueError(f"{told.name}: no start was measured")
    return SimFunction(
        told.name, told.tenant, told.model_bytes, service, starts, told.devices, told.objective_s,
        min_replicas=told.min_replicas, max_replicas=told.max_replicas, target_concurrency=told.target_concurrency,
        keep_alive_s=told.keep_alive_s, ends_s=told.ends_s, way_s=told.way_s,
    )  # fmt: skip
