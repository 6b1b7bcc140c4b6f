"""First token from zero with a slot there: slots that are pods beside slots of this machine, in turns, in one run.

    python -m tests.benchmarks pods_first_token [--quick]

Both have one slot with a worker that waits and the checkpoint in its pool; the same model, computed. Limits: the tests'
own cluster, whose pods share this machine: no network lies between, so what is compared is what the backend adds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks import load, report
from tests.benchmarks.cold import stages
from tests.kubernetes.town import POOL, town
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

WITHIN_S = 0.1
REST_S = 0.3
SCALING = {"keep_alive": 0.2, "mode": "advisory"}
ONE_SLOT = {**POOL, "most": 1, "least": 1, "pool": "256Mi"}


def first_token_s(service: Service) -> float:
    service.wait_zero(within_s=120)
    service.wait_warm(within_s=120)
    time.sleep(REST_S)  # what ended is written down, and the worker that took its place has been forked
    return load.stream(service.url, "fn", load.SHORT_PROMPT, 8, service.key).first_token_s


def main(quick: bool) -> bool:
    tries = 7 if quick else 25
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        checkpoint = f"file://{make_tiny_llama(folder / 'tiny', layers=2, hidden=64)}"
        (folder / "pods").mkdir()
        pods = stack.enter_context(town(folder / "pods", ONE_SLOT, warm_workers=1)).service
        services = {"local": stack.enter_context(Service(folder / "local", args=("--warm-workers", "1"))), "pods": pods}
        times: dict[str, list[float]] = {where: [] for where in services}
        split: dict[str, list[dict[str, float]]] = {where: [] for where in services}
        for service in services.values():
            service.deploy("fn", checkpoint, scaling=SCALING)
            first_token_s(service)  # makes the prepared form
        for _ in range(tries):
            for where, service in services.items():
                times[where].append(first_token_s(service))
                split[where].append(stages(service, "fn"))
    medians = {where: report.median(each) for where, each in times.items()}
    by_stage = {
        where: {stage: report.median([row.get(stage, 0.0) for row in rows]) for stage in rows[0]}
        for where, rows in split.items()
    }
    report.table(
        "From zero to the first token with a slot there, ms",
        ["slots", "tries", "median", "p95"],
        [[where, tries, f"{1000 * medians[where]:.1f}", f"{1000 * report.percentile(each, 0.95):.1f}"]
         for where, each in times.items()],
    )  # fmt: skip
    added_s = medians["pods"] - medians["local"]
    found = {
        "tries": tries, "median_s": medians, "added_s": added_s, "ratio": medians["pods"] / medians["local"],
        "all_s": times, "stages_s": by_stage,
    }  # fmt: skip
    report.save("pods_first_token", found)
    words = f"{1000 * added_s:.1f} ms more, {found['ratio']:.2f} of it"
    return report.verdict(f"within {WITHIN_S * 1000:.0f} ms of slots of this machine", added_s < WITHIN_S, words)


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
