"""What `make bench-autoscaler` replays: recorded traffic, and the functions and machines that serve it.

Functions are models of 1B to 70B parameters with published start and step times (`control_plane.simulation.sizes`),
sizes dealt to clients by a fixed shuffle. Limits: traces say when and how often, only the hours of language models say
how long.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.workload import SimFunction, Workload
from control_plane.simulation.azure_functions import read_azure_functions
from control_plane.simulation.azure_llm import read_azure_llm
from control_plane.simulation.lengths import TokenLengths
from control_plane.simulation.mooncake import read_mooncake
from control_plane.simulation.rates import at_quantiles
from control_plane.simulation.servegen import read_servegen
from control_plane.simulation.sizes import MIX_B, TIER_BYTES_PER_S, functions_of
from control_plane.simulation.trace import Trace

HERE = Path(__file__).resolve()
SEED = 20_260_701
DAY_S = 86_400.0
CLIENTS, REQUESTS_MOST, FEWEST = 60, 2_000_000, 7
CLUSTER = Cluster(slots=8, devices_per_slot=8, bytes_per_s=TIER_BYTES_PER_S)


def functions_for(names: tuple[str, ...]) -> tuple[SimFunction, ...]:
    order = np.random.default_rng(SEED).permutation(len(names)).tolist()
    sizes_b = [MIX_B[place % len(MIX_B)] for place in order]
    return tuple(
        replace(function, name=f"{function.name}-{size_b:g}b", max_replicas=CLUSTER.devices // 2 // function.devices)
        for function, size_b in zip(functions_of(names, sizes_b=sizes_b), sizes_b, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    workload: Workload
    length_s: float
    notes: tuple[str, ...]


def folder() -> Path:
    """Where the traces are: as told, beside the project, or (cut to a few functions and days) with the tests."""
    named = os.environ.get("STOKER_TRACES")
    places = [Path(named)] if named else [HERE.parents[3] / "shared" / "traces"]
    return next((place for place in places if place.is_dir()), HERE.parents[1] / "data" / "traces")


def find(beginning: str) -> Path:
    return next(path for path in sorted(folder().iterdir()) if path.name.startswith(beginning))


def load_of(name: str, trace: Trace, days: float = 14.0) -> Load:
    workload = Workload(
        functions_for(trace.names), trace.arrival_s, trace.function, trace.prompt_tokens, trace.output_tokens,
        trace.origin_s,
    )  # fmt: skip
    return Load(name, workload, min(trace.length_s, days * DAY_S), trace.notes)


def servegen(clients: int = CLIENTS, most: int = REQUESTS_MOST, days: float = 14.0) -> Load:
    rates = read_servegen(find("servegen"), "language").between(0.0, days * DAY_S)
    chosen = rates.of_functions(at_quantiles(rates.requests_by_function(), clients, most))
    return load_of("servegen", chosen.drawn(TokenLengths(), SEED), days)


def azure_functions(functions: int = FEWEST, days: float = 14.0) -> Load:
    rates = read_azure_functions(find("azure_functions")).between(0.0, days * DAY_S)
    totals = rates.requests_by_function()
    fewest = sorted(int(place) for place in np.argsort(totals, kind="stable")[:functions])
    return load_of("azure_functions", rates.of_functions(fewest).drawn(TokenLengths(), SEED), days)


def hours() -> list[Load]:
    """An hour each, one function each."""
    return [
        load_of("azure_llm_code", read_azure_llm(find("azure_llm_2023_code"))),
        load_of("azure_llm_conv", read_azure_llm(find("azure_llm_2023_conv"))),
        load_of("mooncake", read_mooncake(find("mooncake"))),
    ]
