"""One round of decisions: every function decided upon, what is to start placed, the slots counted.

Of the functions nine in ten are at zero (a quarter of those with a forecast's window ahead), one in twenty idle and
warm, one in twenty busy on one to four replicas; one in a hundred has a request waiting at zero and starts. What is
observed of each is put together within the time. Limits: forecasts are looked up and not made: they are made anew in
the background, once a window each. Counted in CPU time of the one thread that does it, as machines are shared.
"""

from __future__ import annotations

import random
import time
from typing import Any

from autoscaler.decision import Observed, Phase, ReplicaView, ScalingSpec
from autoscaler.forecast import Forecast
from autoscaler.homes import DISK, STORE, Device, Homes, Resident, SlotHome
from autoscaler.placement import place
from autoscaler.scaling import decide
from autoscaler.service import ServiceModel
from autoscaler.slot_scaling import SlotClass, SlotDemand, SlotPhase, SlotView, decide_slots
from autoscaler.work import Work
from tests.benchmarks import report

LIMIT_S = 1.0
ROUNDS = 5
GB = 10**9
NOW_S = 100_000.0
SERVICE = ServiceModel(25_000.0, 0.011, 0.0001, 6e-8, 64, 400_000)


def make_slots(count: int, chance: random.Random) -> list[SlotHome]:
    slots = []
    for number in range(count):
        devices = []
        for _ in range(8):
            taken = chance.random() < 0.5
            resident = Resident(f"r{number}", f"f{chance.randrange(10_000)}", nbytes=20 * GB, kv_bytes=20 * GB)
            devices.append(
                Device((40 if taken else 80) * GB, (resident,) if taken else (), (0.3,) * 5 if taken else ())
            )
        pool = frozenset(f"f{chance.randrange(10_000)}" for _ in range(20))
        slots.append(
            SlotHome(
                f"slot{number:04d}", tuple(devices), warm_workers=2, replicas=4, pool=pool,
                bytes_per_s={DISK: 6e9, STORE: 3e9},
            )
        )  # fmt: skip
    return slots


def round_of_decisions(functions: int = 10_000, slots: int = 1000) -> tuple[bool, dict[str, Any]]:
    chance = random.Random(11)
    kinds = [
        "waiting"
        if (drawn := chance.random()) < 0.01
        else "busy"
        if drawn < 0.06
        else "idle"
        if drawn < 0.11
        else "zero"
        for _ in range(functions)
    ]
    spec = ScalingSpec(max_replicas=8, target_concurrency=None)
    gaps = [tuple(chance.expovariate(0.01) for _ in range(64)) for _ in range(64)]
    forecasts = [
        Forecast(
            "idle_histogram", NOW_S - 30.0, rate=(0.2,) * 20, rate_high=(0.4,) * 20,
            warm=((50.0, 80.0), (900.0, 960.0)), service_s=4.0, valid_until_s=NOW_S + 600,
        )
        for _ in range(64)
    ]  # fmt: skip
    homes = Homes(make_slots(slots, chance))
    views = tuple(SlotView(home.slot_id, SlotPhase.READY, 0.0, 4.0) for home in homes)
    kind_of_slots = [SlotClass("default", 8, max_slots=slots)]
    walls, seen = [], {}
    for _ in range(ROUNDS):
        begin_s, started, placed = time.process_time(), 0, 0
        for index, kind in enumerate(kinds):
            waiting = running = 0
            replicas: tuple[ReplicaView, ...] = ()
            if kind == "busy":
                replicas = tuple(
                    ReplicaView(f"r{each}", Phase.READY, 20, NOW_S - 500.0) for each in range(1 + index % 4)
                )
                running = 20 * len(replicas)
            elif kind == "idle":
                replicas = (ReplicaView("r", Phase.READY, 0, NOW_S - 500.0),)
            elif kind == "waiting":
                waiting = 3
            observed = Observed(
                waiting=waiting, replicas=replicas, peak_demand=waiting + running, window_covered_s=15.0,
                last_activity_s=NOW_S if waiting or running else NOW_S - 20.0 - index % 3000, generation=index,
                cold_start_s=4.7, gaps_s=gaps[index % 64], cold_start_high_s=6.0, service=SERVICE, prompt_tokens=1000.0,
                output_tokens=130.0, waiting_tokens=1000 * waiting, running_tokens=1100 * running,
                arrivals_in_10_s=running // 3, arrivals_in_60_s=2 * running,
                peaks=((NOW_S - 30.0, running + 10), (NOW_S - 5.0, running + 2)) if running else (),
            )  # fmt: skip
            decision = decide(spec, observed, forecasts[index % 64] if index % 4 == 0 else None, NOW_S)
            for _ in range(decision.desired - len(replicas)):
                started += 1
                work = Work(
                    f"f{index}", identity=f"f{index}", device_bytes=20 * GB, weights_bytes=16 * GB, in_store=True,
                    start_s=3.5, waiting=waiting,
                )  # fmt: skip
                placed += place(work, homes, NOW_S) is not None
        decide_slots(kind_of_slots, {"default": SlotDemand(views, watched_s=3600.0)}, NOW_S)
        walls.append(time.process_time() - begin_s)
        seen = {"started": started, "placed": placed}
    best_s = min(walls)
    report.table(
        "One round of decisions",
        ["functions", "slots", "starts placed", "best of 5, s", "median, s", "microseconds a function"],
        [[functions, slots, seen["placed"], best_s, report.median(walls), f"{1e6 * best_s / functions:.0f}"]],
    )
    holds = report.verdict(
        f"{functions:,} functions and {slots:,} slots within {LIMIT_S:g} s", report.median(walls) < LIMIT_S,
        f"{report.median(walls):.2f} s, {seen['started']} starts",
    )  # fmt: skip
    return holds, {"functions": functions, "slots": slots, "cpu_s": walls, **seen}
