"""What `make bench-autoscaler` replays: recorded traffic, and the functions and machines that serve it.

Functions are of 1B to 70B parameters in half precision on devices of 80 GB, sizes dealt to clients by a fixed shuffle.
Start times are published ones: from a pool 3.5 s for everything but the weights (DeepServe, ATC'25: Llama 3 8B in
4.75 s with its weights in host memory) and 13 GB/s a device for them (ServerlessLLM on H100: 8B in 1.25 s), 6 GB/s from
a slot's disk and 3.07 GB/s from an object store (Run:ai Model Streamer: 15 GB in 4.88 s); each spread by a log-normal
of sigma 0.2. Step times follow from a device's published bandwidth (3.35 TB/s, 60 % of it reached) and arithmetic
(990 TFLOP/s, 45 % of it). Limits: traces say when and how often, only the hours of language models say how long.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from autoscaler.homes import DISK, POOL, STORE
from autoscaler.service import ServiceModel
from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.workload import SimFunction, Workload
from autoscaler.start_times import StartTimes
from control_plane.simulation.azure_functions import read_azure_functions
from control_plane.simulation.azure_llm import read_azure_llm
from control_plane.simulation.lengths import TokenLengths
from control_plane.simulation.mooncake import read_mooncake
from control_plane.simulation.rates import at_quantiles
from control_plane.simulation.servegen import read_servegen
from control_plane.simulation.trace import Trace

HERE = Path(__file__).resolve()
SEED = 20_260_701
DAY_S = 86_400.0
CLIENTS, REQUESTS_MOST, FEWEST = 60, 2_000_000, 7
OBJECTIVE_S = 30.0
CLUSTER = Cluster(slots=8, devices_per_slot=8, bytes_per_s={DISK: 6e9, STORE: 3.07e9})

GB = 10**9
HELD_BYTES_PER_S, FLOP_PER_S = 0.6 * 3.35e12, 0.45 * 990e12
FIXED_START_S, POOL_BYTES_PER_S = 3.5, 13e9
SPREAD = 0.2


@dataclass(frozen=True, slots=True)
class Size:
    parameters_b: float
    devices: int
    kv_bytes_per_token: int

    @property
    def nbytes(self) -> int:
        return int(2 * self.parameters_b * GB)


SIZES = (
    Size(1, 1, 32_768), Size(3, 1, 114_688), Size(8, 1, 131_072), Size(8, 1, 131_072), Size(13, 1, 204_800),
    Size(32, 2, 262_144), Size(70, 4, 327_680),
)  # fmt: skip


def service_of(size: Size) -> ServiceModel:
    together = 1.0 if size.devices == 1 else 0.8  # what tensor parallelism reaches of its devices
    bandwidth = HELD_BYTES_PER_S * size.devices * together
    room = 0.9 * CLUSTER.device_bytes * size.devices - size.nbytes
    return ServiceModel(
        prefill_tokens_per_s=min(FLOP_PER_S * size.devices * together / (2 * size.parameters_b * GB), 100_000.0),
        step_base_s=0.003 + size.nbytes / bandwidth,
        step_per_request_s=0.0001,
        step_per_context_token_s=size.kv_bytes_per_token / bandwidth,
        max_requests=64,
        kv_tokens=int(room / size.kv_bytes_per_token),
        devices=size.devices,
    )


def starts_of(size: Size) -> StartTimes:
    times = StartTimes()
    pool_s = FIXED_START_S + size.nbytes / (POOL_BYTES_PER_S * size.devices)
    means = {
        STORE: pool_s + size.nbytes / CLUSTER.bytes_per_s[STORE],
        DISK: pool_s + size.nbytes / CLUSTER.bytes_per_s[DISK],
        POOL: pool_s,
    }
    order = np.random.default_rng(SEED).permutation(32)
    for tier, mean_s in means.items():
        for place in order:
            spread = SPREAD * NormalDist().inv_cdf((int(place) + 0.5) / 32)
            times.note(tier, "total", mean_s * math.exp(spread - SPREAD**2 / 2))
    return times


def functions_for(names: tuple[str, ...]) -> tuple[SimFunction, ...]:
    dealt = [SIZES[place % len(SIZES)] for place in range(len(names))]
    order = np.random.default_rng(SEED).permutation(len(names))
    service, starts = {size: service_of(size) for size in SIZES}, {size: starts_of(size) for size in SIZES}
    return tuple(
        SimFunction(
            name=f"{name}-{size.parameters_b:g}b",
            tenant="default",
            model_bytes=size.nbytes,
            service=service[size],
            starts=starts[size],
            devices=size.devices,
            objective_s=OBJECTIVE_S,
            max_replicas=CLUSTER.devices // 2 // size.devices,
        )
        for name, size in ((name, dealt[int(order[place])]) for place, name in enumerate(names))
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
