"""Stoker against other autoscalers on recorded traffic, at three worths of waiting: what each would have cost.

Two traces of 14 days (`autoscaler_load`): the first seven days to learn from, the last seven scored; each peer's own
parameters are tuned on days 6 and 7 over `GRID`, its best ones at each weight are scored. Then the hours of language
models, traffic made to mislead forecasts, how fast a simulation is (in CPU time, as machines are shared), and one round
of decisions for 10,000 functions.
Limits: every simulation is of one seed; the oracle is a strong plan, and a bound only where devices suffice.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoscaler.forecast import Costs
from autoscaler.forecasting.credit import SHARE, STARTS
from autoscaler.simulator.engine import simulate
from autoscaler.simulator.peers.named import peer
from autoscaler.simulator.peers.oracle import Replays, strongest
from autoscaler.simulator.policy import Fixed, Policy
from autoscaler.simulator.result import Prices, Result
from autoscaler.simulator.stoker import Stoker
from autoscaler.simulator.workload import Workload
from tests.benchmarks import autoscaler_runs, report
from tests.benchmarks.autoscaler_load import (
    CLUSTER,
    DAY_S,
    Load,
    azure_functions,
    functions_for,
    hours,
    servegen,
)
from tests.benchmarks.autoscaler_round import round_of_decisions

WEIGHTS = (1.0, 10.0, 100.0)
JUDGED = (1.0, 10.0)
"""At these, a share of the way to the oracle is promised."""
PROMISED_SHARE = 0.30
WARM_UP_S = 3600.0
PROCESSES = int(os.environ.get("STOKER_BENCH_PROCESSES", "2"))
GRID: dict[str, tuple[str, ...]] = {
    "knative": tuple(
        f"knative:utilisation={use},stable_window_s={window_s},scale_to_zero_grace_s={grace_s}"
        for use in (0.7, 1.0)
        for window_s in (6, 30, 60, 300)
        for grace_s in (6, 30)
    ),
    "keepalive": tuple(f"keepalive:{seconds}" for seconds in (5, 15, 30, 60, 120, 300, 600, 1200)),
    "reactive": tuple(f"reactive:factor={factor}" for factor in (0.25, 0.5, 1.0, 2.0, 4.0)),
    "histogram": tuple(
        f"histogram:range_s={range_s},cv_least={cv},tail={tail}"
        for range_s in (3600, 14400)
        for cv in (2.0, 5.0)
        for tail in (0.9, 0.99)
    ),
}
BY_WEIGHT = frozenset({"reactive", "stoker", "oracle"})
"""Policies that decide by the weight; a simulation of any other gives its cost at all of them."""

_LOADS: dict[str, Load] = {}
"""Read before the processes are forked."""
_REPLAYS: dict[tuple[str, float, float], Replays] = {}
REFIT_S = 300.0
"""Live, forecasts are made anew every minute; on a day of ServeGen clients every five cost no more."""


@dataclass(frozen=True, slots=True)
class Job:
    load: str
    policy: str
    weight: float
    begin_s: float
    since_s: float
    until_s: float

    @property
    def key(self) -> tuple[str, str, float]:
        return (self.load, self.policy, self.weight)


SET_CLOCK = "stoker:set clock"
CLOCK_STEPS = tuple(
    (6 * 3600.0 * (number + 1), by_s)
    for number, by_s in enumerate((600.0, -600.0, 3600.0, -3600.0, -7200.0, 10.0, -10.0, DAY_S, -DAY_S, 7200.0) * 4)
)
"""Four times a day, in whole windows."""


def policy_of(told: str, workload: Workload) -> Policy:
    if told == SET_CLOCK:
        return Stoker(refit_s=REFIT_S, clock_steps=CLOCK_STEPS)
    if told.startswith("stoker"):
        return Stoker(forecasts=told != "stoker:reactive", refit_s=REFIT_S)
    return peer(told, workload)


def run(job: Job) -> dict[str, Any]:
    load, begin_s = _LOADS[job.load], time.process_time()
    prices = Prices(job.weight)
    if job.policy == "oracle":
        # What n replicas throughout would come to is the same at every weight, and kept by the process.
        span = (job.load, job.begin_s, job.until_s)
        if span not in _REPLAYS:
            _REPLAYS[span] = Replays(load.workload.between(job.begin_s, job.until_s))
        replays = _REPLAYS[span]
        _, result = strongest(
            replays.workload, CLUSTER, prices, begin_s=job.begin_s, since_s=job.since_s, until_s=job.until_s,
            replays=replays,
        )  # fmt: skip
    else:
        policy = policy_of(job.policy, load.workload)
        result = simulate(
            load.workload, CLUSTER, policy, 0, prices, begin_s=job.begin_s, since_s=job.since_s, until_s=job.until_s
        )
    cpu_s = time.process_time() - begin_s
    print(f"{job.load} {job.policy} at {job.weight:g}: {cpu_s:.1f} s of CPU", file=sys.stderr, flush=True)
    found = {"cpu_s": cpu_s, **summary(result)}
    autoscaler_runs.keep(_kept_as(job), found)
    return {"job": job, **found}


def _kept_as(job: Job) -> tuple[Any, ...]:
    """A load of fewer functions or days has the same name and is another."""
    load = _LOADS[job.load]
    return (*job.key, job.begin_s, job.since_s, job.until_s, len(load.workload), load.length_s)


def summary(result: Result) -> dict[str, Any]:
    return {
        "objective": {weight: result.objective(weight) for weight in WEIGHTS},
        "restarts": {weight: result.restarts(weight) for weight in WEIGHTS},
        "idle_device_s": result.total("held_device_s") - result.total("full_batch_device_s"),
        "held_device_s": result.total("held_device_s"),
        "waited_s": result.total("waited_s"),
        "p50_s": result.quantile_s(0.5),
        "p99_s": result.quantile_s(0.99),
        "requests": int(result.total("requests")),
        "refused": int(result.total("refused")),
        "cold": int(result.total("cold_requests")),
        "starts": int(result.total("starts")),
        "stopped_before_ready": int(result.total("stopped_before_ready")),
        "no_room": result.no_room,
    }


def run_all(jobs: Iterable[Job]) -> dict[tuple[str, str, float], dict[str, Any]]:
    # The longest first.
    jobs = sorted(
        dict.fromkeys(jobs),
        key=lambda job: ("oracle", "stoker").index(job.policy) if job.policy in ("oracle", "stoker") else 2,
    )
    known = autoscaler_runs.kept()
    there = {job.key: {"job": job, **known[_kept_as(job)]} for job in jobs if _kept_as(job) in known}
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("fork")) as pool:
        missing = [job for job in jobs if job.key not in there]
        return {**there, **{found["job"].key: found for found in pool.map(run, missing)}}


@dataclass(frozen=True, slots=True)
class Times:
    """On the trace's clock."""

    tuned_from_s: float
    scored_from_s: float
    scored_until_s: float


def times_of(load: Load) -> Times:
    half_s = load.length_s / 2
    return Times(half_s - max(half_s * 2 / 7, DAY_S / 4), half_s, load.length_s)


def grid_of(quick: bool) -> dict[str, tuple[str, ...]]:
    return (
        {name: told[:: 4 if name in ("knative", "histogram") else 2] for name, told in GRID.items()} if quick else GRID
    )


def tuned(load: Load, quick: bool) -> tuple[dict[str, dict[float, str]], list[dict[str, Any]]]:
    """Of each peer: the parameters that cost least on the sample of the days to learn from, at each weight. And what
    each of the grid came to there: the curve of cost against waiting."""
    times, jobs = times_of(load), []
    for name, told in grid_of(quick).items():
        for each in told:
            for weight in WEIGHTS if name in BY_WEIGHT else WEIGHTS[:1]:
                jobs.append(
                    Job(
                        load.name, each, weight, times.tuned_from_s - WARM_UP_S, times.tuned_from_s,
                        times.scored_from_s,
                    )
                )  # fmt: skip
    found = run_all(jobs)

    def cost(name: str, each: str, weight: float) -> float:
        return float(found[load.name, each, weight if name in BY_WEIGHT else WEIGHTS[0]]["objective"][weight])

    best = {
        name: {weight: min(told, key=lambda each: cost(name, each, weight)) for weight in WEIGHTS}
        for name, told in grid_of(quick).items()
    }
    curve = [
        {"policy": told, "weight": weight if told.partition(":")[0] in BY_WEIGHT else None,
         "idle_device_s": each["idle_device_s"], "waited_s": each["waited_s"]}
        for (_, told, weight), each in found.items()
    ]  # fmt: skip
    return best, curve


def show_curve(load: Load, curve: list[dict[str, Any]], results: dict[str, dict[float, dict[str, Any]]]) -> None:
    report.table(
        f"{load.name}: cost against waiting, peers over their grids on the days to tune on",
        ["policy", "weight", "idle device-s", "waited s"],
        [
            [each["policy"], each["weight"] or "any", f"{each['idle_device_s']:,.0f}", f"{each['waited_s']:,.0f}"]
            for each in sorted(curve, key=lambda each: (each["policy"].partition(":")[0], each["idle_device_s"]))
        ],
    )
    points = {
        (name, f"{each['idle_device_s']:,.0f}", f"{each['waited_s']:,.0f}")
        for name, found in results.items()
        for each in found.values()
    }
    report.table(
        f"{load.name}: the same on the scored days, as tuned for each weight", ["policy", "idle device-s", "waited s"],
        sorted(points),
    )  # fmt: skip


def scored(load: Load, parameters: dict[str, dict[float, str]]) -> dict[str, dict[float, dict[str, Any]]]:
    times, jobs, wanted = times_of(load), [], {}
    for weight in WEIGHTS:
        for name in ("stoker", *parameters, "oracle"):
            told = parameters[name][weight] if name in parameters else name
            job = Job(
                load.name, told, weight if name in BY_WEIGHT else WEIGHTS[0], times.scored_from_s - WARM_UP_S,
                times.scored_from_s, times.scored_until_s,
            )  # fmt: skip
            wanted[name, weight] = job
            jobs.append(job)
    found = run_all(jobs)
    names = ("stoker", *parameters, "oracle")
    return {name: {weight: found[wanted[name, weight].key] for weight in WEIGHTS} for name in names}


def compare(load: Load, quick: bool) -> tuple[bool, dict[str, Any]]:
    parameters, curve = tuned(load, quick)
    results = scored(load, parameters)
    show_curve(load, curve, results)
    rows, holds, judged = [], True, {}
    for weight in WEIGHTS:
        peers = {name: results[name][weight]["objective"][weight] for name in parameters}
        best = min(peers, key=lambda name: peers[name])
        ours = results["stoker"][weight]["objective"][weight]
        bound = results["oracle"][weight]["objective"][weight]
        share = (peers[best] - ours) / (peers[best] - bound) if peers[best] > bound else math.nan
        judged[weight] = {"best_peer": best, "share_of_the_way": share, "below_every_peer": ours < peers[best]}
        for name in ("stoker", *parameters, "oracle"):
            found = results[name][weight]
            told = parameters[name][weight] if name in parameters else ""
            told = "/".join(part.rpartition("=")[2] for part in told.partition(":")[2].split(","))
            rows.append(
                [
                    f"{weight:g}", name, told, f"{found['objective'][weight]:,.0f}", f"{found['idle_device_s']:,.0f}",
                    f"{found['waited_s']:,.0f}", f"{found['p50_s']:.2f}", f"{found['p99_s']:.2f}",
                    found["starts"], found["restarts"][weight], found["stopped_before_ready"], found["refused"],
                    f"{found['cpu_s']:.0f}",
                ]
            )  # fmt: skip
    report.table(
        f"{load.name}: J = idle device-seconds + weight x seconds waited; "
        f"{results['stoker'][WEIGHTS[0]]['requests']:,} requests",
        ["weight", "policy", "tuned", "J", "idle device-s", "waited s", "p50", "p99", "starts", "restarts",
         "unready", "refused", "CPU s"],
        rows,
    )  # fmt: skip
    for weight in WEIGHTS:
        said = judged[weight]
        detail = f"{said['share_of_the_way']:.0%} of the way from {said['best_peer']} to the oracle"
        holds &= report.verdict(
            f"{load.name}, weight {weight:g}: below every tuned peer", said["below_every_peer"], detail
        )
        if weight in JUDGED:
            enough = said["share_of_the_way"] >= PROMISED_SHARE
            holds &= report.verdict(f"{load.name}, weight {weight:g}: at least 30 % of the way", enough, detail)
    unready = sum(results["stoker"][weight]["stopped_before_ready"] for weight in WEIGHTS)
    holds &= report.verdict(f"{load.name}: no replica stopped before it was ready", unready == 0, str(unready))
    told_results = {
        name: {weight: {**each, "job": each["job"].policy} for weight, each in found.items()}
        for name, found in results.items()
    }
    return holds, {"notes": load.notes, "tuned": parameters, "judged": judged, "curve": curve, "results": told_results}


def compare_hours(parameters: dict[str, dict[float, str]]) -> dict[str, Any]:
    """An hour cannot be learned from: what the policies cost with what was tuned on the 14 days."""
    jobs, rows, found_all = [], [], {}
    for load in hours():
        _LOADS[load.name] = load
        for weight in WEIGHTS:
            for name in ("stoker", *parameters, "oracle"):
                told = parameters[name][weight] if name in parameters else name
                jobs.append(Job(load.name, told, weight, 0.0, 0.0, load.length_s))
    found = run_all(jobs)
    for job in jobs:
        each = found[job.key]
        cost = each["objective"][job.weight]
        rows.append([job.load, f"{job.weight:g}", job.policy.partition(":")[0], f"{cost:,.0f}",
                     f"{each['idle_device_s']:,.0f}", f"{each['waited_s']:,.0f}", each["starts"]])  # fmt: skip
        found_all[f"{job.load} {job.weight:g} {job.policy}"] = {**each, "job": job.policy}
    report.table(
        "Hours of language models", ["trace", "weight", "policy", "J", "idle device-s", "waited s", "starts"], rows
    )
    return found_all


# --- traffic that misleads ---


def misleading(kind: str, days: float) -> Workload:
    """One function; what held for the first half does not in the second."""
    rng = np.random.default_rng(7)
    end_s = days * DAY_S
    regular = np.arange(30.0, end_s, 120.0)
    half = regular < end_s / 2
    if kind == "phase flips":
        night = (regular // 43_200 % 2 == 0) == half  # calls by day, then by night
        arrival_s = regular[night]
    elif kind == "clock steps":
        arrival_s = regular[regular % 3600 < 1800]  # half of each hour, by a clock that is set four times a day
    elif kind == "silence":
        arrival_s = regular[half]
    elif kind == "spikes":
        spikes = rng.uniform(end_s / 2, end_s, 40)
        arrival_s = np.concatenate([regular[half], (spikes[:, None] + rng.exponential(2.0, (40, 30))).ravel()])
    else:  # gaps that are always a little longer than what held before
        gaps_s = 60.0 * 1.25 ** (np.arange(int(end_s / 60)) % 20)
        arrival_s = np.cumsum(gaps_s)
        arrival_s = arrival_s[arrival_s < end_s]
    arrival_s = np.sort(arrival_s[arrival_s < end_s])
    count = len(arrival_s)
    function = replace(functions_for(("misled",))[0], name="misled")
    return Workload(
        (function,), arrival_s, np.zeros(count, np.int32), np.full(count, 500, np.int32), np.full(count, 100, np.int32)
    )


KINDS = ("phase flips", "silence", "spikes", "growing gaps", "clock steps")


def _misled(kind: str) -> str:
    return SET_CLOCK if kind == "clock steps" else "stoker"


def compare_misleading(quick: bool) -> tuple[bool, dict[str, Any]]:
    days = 2.0 if quick else 10.0
    jobs = []
    for kind in KINDS:
        _LOADS[kind] = Load(kind, misleading(kind, days), days * DAY_S, ())
        for weight in WEIGHTS:
            jobs += [Job(kind, told, weight, 0.0, 0.0, days * DAY_S) for told in (_misled(kind), "stoker:reactive")]
    found = run_all(jobs)
    rows, holds, results = [], True, {}
    for kind in KINDS:
        function = _LOADS[kind].workload.functions[0]
        for weight in WEIGHTS:
            told = (_misled(kind), "stoker:reactive")
            ours, reactive = (found[kind, each, weight]["objective"][weight] for each in told)
            start_s = function.starts.expected_s() or 0.0
            credit = STARTS * Costs(start_s, function.devices, weight).of_start() + SHARE * max(reactive, 0.0)
            held = ours - reactive <= credit
            rows.append([kind, f"{weight:g}", f"{ours:,.0f}", f"{reactive:,.0f}", f"{credit:,.0f}", held])
            results[f"{kind} {weight:g}"] = {"stoker": ours, "reactive": reactive, "credit": credit}
            holds &= held
    report.table("Traffic that misleads", ["kind", "weight", "stoker", "reactive", "credit", "within"], rows)
    report.verdict("at most the stated credit worse than reactive", holds, f"{len(rows)} cases")
    return holds, results


# --- how fast ---


def _timed(job: tuple[str, str, float]) -> tuple[float, float, int]:
    name, told, share = job
    load = _LOADS[name]
    workload = load.workload.between(0.0, load.length_s * share)
    policy: Policy = Fixed(1) if told == "fixed" else policy_of(told, workload)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin_s = time.process_time()
    simulate(workload, CLUSTER, policy, until_s=load.length_s * share)
    return (
        time.process_time() - begin_s,
        (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024.0,
        len(workload),
    )


def speed(load: Load) -> tuple[bool, dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    results = []
    for share in (0.5, 1.0):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            results.append(pool.submit(_timed, (load.name, "fixed", share)).result())
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        stoker_s, _, requests = pool.submit(_timed, (load.name, "stoker", 1.0)).result()
    (_, half_bytes, half), (fixed_s, whole_bytes, whole) = results
    per_request = (whole_bytes - half_bytes) / max(whole - half, 1)
    holds = report.verdict(
        f"{load.name}, {load.length_s / DAY_S:.0f} days within 5 minutes on one core",
        stoker_s < 300,
        f"{requests:,} requests in {stoker_s:.0f} s as Stoker decides, {fixed_s:.0f} s with nothing to decide",
    )
    # What grows faster than requests would show between the first half and the second.
    linear = whole_bytes < 3.0 * max(half_bytes, 32e6)
    holds &= report.verdict("memory linear in requests", linear, f"{per_request:.0f} bytes a request more")
    return holds, {"stoker_s": stoker_s, "fixed_s": fixed_s, "requests": requests, "bytes_per_request": per_request}


def loads(quick: bool) -> Sequence[Load]:
    if quick:
        return servegen(10, 60_000, 3.0), azure_functions(2, 1.0)
    return servegen(), azure_functions()


def main(quick: bool) -> bool:
    begin_s, holds, results = time.perf_counter(), True, {}
    autoscaler_runs.begin()
    for load in loads(quick):
        _LOADS[load.name] = load
        report.console.print(f"{load.name}: {len(load.workload):,} requests; {'; '.join(load.notes)}")
    for name in list(_LOADS):
        held, results[name] = compare(_LOADS[name], quick)
        holds &= held
        report.save("autoscaler", {"whole": False, "weights": WEIGHTS, "cluster": str(CLUSTER), **results})
    results["hours"] = compare_hours(results["servegen"]["tuned"])
    held, results["misleading"] = compare_misleading(quick)
    holds &= held
    held, results["speed"] = speed(_LOADS["servegen"])
    holds &= held
    held, results["round"] = round_of_decisions(*((1000, 100) if quick else (10_000, 1000)))
    holds &= held
    wall_s = time.perf_counter() - begin_s
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(each.ru_utime + each.ru_stime for each in used)
    limit_s = 300 if quick else 3600
    holds &= report.verdict(
        "the whole within its time", wall_s < limit_s, f"{wall_s:.0f} of {limit_s} s, {cpu_s:.0f} s of CPU"
    )
    report.save(
        "autoscaler", {"weights": WEIGHTS, "cluster": str(CLUSTER), "wall_s": wall_s, "cpu_s": cpu_s, **results}
    )
    return holds


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
