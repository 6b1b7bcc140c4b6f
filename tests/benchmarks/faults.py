"""Two thousand random faults over a mixed load, eight requests at a time, and what each property came to.

`python -m tests.benchmarks.faults [--quick] [--faults N] [--seed S]`: the seed of a run gives its faults again, by
what, whom and after how many tokens. Runs in rounds of `ROUND` faults, each with a service of its own, so that what a
round leaves behind is seen, and a failing one is named by its own seed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.chaos.faults import ENVIRONMENT, Report, close_and_look, run_faults
from tests.chaos.twins import collect_twins
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

ROUND = 100
FAULTS, QUICK_FAULTS = 2000, 60
ENGINE = {"prefix_cache": False, "threads": 1}
SHAPE = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2}
NUMBERS = ("faults", "requests", "resumes", "exact_resumes", "destroyed", "misses_seen", "rounded", "orphans")
PROPERTIES = ("lost", "doubled", "changed", "wrong_kv", "refused", "unaccounted", "left_behind")


def one_round(seed: int, faults: int) -> Report:
    with (
        tempfile.TemporaryDirectory(prefix="stoker-faults-") as folder,
        Service(Path(folder) / "data", env=ENVIRONMENT) as service,
    ):
        checkpoint = make_tiny_llama(Path(folder) / "tiny", **SHAPE)
        revision = make_tiny_llama(Path(folder) / "revision", seed=1, **SHAPE)
        twins = collect_twins(service, checkpoint, revision, ENGINE, prompts=2)
        scaling = {"keep_alive": 60, "max_replicas": 2, "target_concurrency": 4}
        service.deploy("tiny", f"file://{checkpoint}", scaling=scaling, engine_options=ENGINE)
        done = run_faults(service, "tiny", twins, seed=seed, faults=faults, max_tokens=96)
        close_and_look(service, done)
        return done


def run(faults: int, seed: int) -> dict[str, Any]:
    totals: dict[str, Any] = {name: [] for name in PROPERTIES}
    hits: dict[str, int] = {}
    asked: dict[str, int] = {}
    states: dict[str, int] = {}
    numbers = dict.fromkeys(NUMBERS, 0)
    for first in range(0, faults, ROUND):
        round_seed, begin = seed + first // ROUND, time.monotonic()
        done = one_round(round_seed, min(ROUND, faults - first))
        verdict = done.verdict
        for name in PROPERTIES:
            totals[name] += [f"seed {round_seed}: {text}" for text in getattr(verdict, name)]
        for into, of in ((hits, done.hits), (asked, done.asked), (states, done.states)):
            for name, count in of.items():
                into[name] = into.get(name, 0) + count
        numbers["faults"] += sum(bool(fault.hit) for fault in done.faults)
        numbers["requests"] += len(done.tolds)
        for name in ("resumes", "exact_resumes", "destroyed", "misses_seen"):
            numbers[name] += getattr(verdict, name)
        numbers["rounded"] += len(verdict.rounded)
        numbers["orphans"] += done.orphans
        report.console.print(f"seed {round_seed}: {time.monotonic() - begin:.0f} s, {len(verdict.problems)} problems")
    return {"seed": seed, **numbers, "states": states, "hits": hits, "asked": asked, **totals}


def show(found: dict[str, Any]) -> None:
    report.table("Faults that hit something", ["fault", "times"], sorted(found["hits"].items()))
    report.table("Requests", ["kind", "asked"], sorted(found["asked"].items()))
    rows = [
        [name, found[name]]
        for name in ("faults", "requests", "resumes", "exact_resumes", "destroyed", "misses_seen", "rounded")
    ]
    rows += [[name, len(found[name])] for name in PROPERTIES]
    report.table(f"Seed {found['seed']}", ["what", "count"], [*rows, ["orphan packs", found["orphans"]]])
    for name in PROPERTIES:
        for text in found[name]:
            report.console.print(f"[red]{name}: {text}", markup=True, highlight=False)


def main(quick: bool, faults: int = 0, seed: int = 0) -> bool:
    seed = seed or random.SystemRandom().randrange(1, 2**31)
    found = run(faults or (QUICK_FAULTS if quick else FAULTS), seed)
    show(found)
    report.save("faults", found)
    share = found["exact_resumes"] / found["resumes"] if found["resumes"] else 0.0
    sound = report.verdict(
        "nothing lost, doubled, changed, refused without cause or left behind, no wrong KV used",
        not any(found[name] for name in PROPERTIES),
        f"{found['faults']} faults, {found['requests']} requests, seed {seed}",
    )
    return report.verdict("95 % of the resumes exact", share >= 0.95, f"{share:.1%} of {found['resumes']}") and sound


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    raise SystemExit(not main(given.quick, given.faults, given.seed))
