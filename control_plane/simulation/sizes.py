"""Functions for names that a trace gives nothing but requests: models of a stated size on devices of a stated kind.

Start times are published ones: everything but the weights 3.5 s (DeepServe, ATC 2025: Llama 3 8B in 4.75 s with its
weights in host memory) and 13 GB/s a device from a pool (ServerlessLLM on H100: 8B in 1.25 s), then 6 GB/s from a disk
and 3.07 GB/s from a store (Run:ai Model Streamer: 15 GB in 4.88 s), spread log-normal with sigma 0.2. Steps follow from
an H100's published bandwidth (3.35 TB/s, 60 % of it reached) and arithmetic (990 TFLOP/s, 45 %). KV a token
is that of published models of the size (Llama 3, Qwen 2.5). Limits: half precision; whoever has measured a function
should replay its journal instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from autoscaler.service import ServiceModel
from autoscaler.simulator.workload import SimFunction
from autoscaler.start_times import TOTAL, StartTimes

GB: Final = 10**9
BYTES_PER_S: Final = 0.6 * 3.35e12
FLOP_PER_S: Final = 0.45 * 990e12
TOGETHER: Final = 0.8
"""What tensor parallelism reaches of its devices."""
FIXED_START_S: Final = 3.5
POOL_BYTES_PER_S: Final = 13e9
TIER_BYTES_PER_S: Final = {"disk": 6e9, "store": 3.07e9}
SPREAD: Final = 0.2
DRAWS: Final = 32
MAX_REQUESTS: Final = 64
OBJECTIVE_S: Final = 30.0
REPLICAS_OF_DEVICES: Final = 16
"""Devices that one function may hold at once."""
KV_BYTES_PER_TOKEN: Final = {1.0: 32_768, 3.0: 114_688, 8.0: 131_072, 14.0: 196_608, 32.0: 262_144, 70.0: 327_680}
"""By billions of parameters: Llama 3.2 1B and 3B, Llama 3 8B and 70B, Qwen 2.5 14B and 32B."""
MIX_B: Final = (1.0, 3.0, 8.0, 8.0, 13.0, 32.0, 70.0)
"""Billions of parameters, dealt to the functions of a trace in turn."""


@dataclass(frozen=True, slots=True)
class Size:
    parameters_b: float
    device_bytes: int = 80 * GB

    @property
    def nbytes(self) -> int:
        return int(2 * self.parameters_b * GB)

    @property
    def devices(self) -> int:
        """The least power of two that leaves a quarter of the memory for KV."""
        return int(1 << max(math.ceil(math.log2(self.nbytes / (0.75 * self.device_bytes))), 0))

    @property
    def kv_bytes_per_token(self) -> int:
        """Of other sizes: between those of their neighbours."""
        known = [math.log(size_b) for size_b in KV_BYTES_PER_TOKEN]
        return int(np.interp(math.log(self.parameters_b), known, list(KV_BYTES_PER_TOKEN.values())))

    def service(self) -> ServiceModel:
        together = 1.0 if self.devices == 1 else TOGETHER
        bandwidth = BYTES_PER_S * self.devices * together
        room = 0.9 * self.device_bytes * self.devices - self.nbytes
        return ServiceModel(
            prefill_tokens_per_s=min(FLOP_PER_S * self.devices * together / (2 * self.parameters_b * GB), 100_000.0),
            step_base_s=0.003 + self.nbytes / bandwidth,
            step_per_request_s=0.0001,
            step_per_context_token_s=self.kv_bytes_per_token / bandwidth,
            max_requests=MAX_REQUESTS,
            kv_tokens=int(room / self.kv_bytes_per_token),
            devices=self.devices,
        )

    def starts(self, seed: int = 0) -> StartTimes:
        times = StartTimes()
        pool_s = FIXED_START_S + self.nbytes / (POOL_BYTES_PER_S * self.devices)
        means = {tier: pool_s + self.nbytes / speed for tier, speed in reversed(TIER_BYTES_PER_S.items())}
        order = np.random.default_rng(seed).permutation(DRAWS)
        for tier, mean_s in {**means, "pool": pool_s}.items():
            for place in order.tolist():
                spread = SPREAD * NormalDist().inv_cdf((place + 0.5) / DRAWS)
                times.note(tier, TOTAL, mean_s * math.exp(spread - SPREAD**2 / 2))
        return times


def functions_of(
    names: Sequence[str],
    tenants: Sequence[str] = (),
    sizes_b: Sequence[float] = MIX_B,
    device_bytes: int = 80 * GB,
    objective_s: float = OBJECTIVE_S,
) -> tuple[SimFunction, ...]:
    """Sizes are dealt in turn, in the order of the names."""
    made = {size_b: Size(size_b, device_bytes) for size_b in sizes_b}
    service = {size_b: size.service() for size_b, size in made.items()}
    starts = {size_b: size.starts() for size_b, size in made.items()}
    functions = []
    for place, name in enumerate(names):
        size_b = sizes_b[place % len(sizes_b)]
        size = made[size_b]
        functions.append(
            SimFunction(
                name=name,
                tenant=tenants[place] if tenants else "default",
                model_bytes=size.nbytes,
                service=service[size_b],
                starts=starts[size_b],
                devices=size.devices,
                objective_s=objective_s,
                max_replicas=max(REPLICAS_OF_DEVICES // size.devices, 1),
            )
        )
    return tuple(functions)


def told(sizes_b: Sequence[float]) -> str:
    return "models of " + ", ".join(f"{size:g}B" for size in sizes_b) + " dealt in turn, with published start times"
