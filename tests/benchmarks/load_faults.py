"""Five hundred random faults over imports, loads and evictions, and what each property came to.

`python -m tests.benchmarks.load_faults [--faults N] [--seed S]`: in rounds, each with two slots and a seed of its own,
which gives its steps again. Limits: small checkpoints; what a large one takes longer for is not longer here.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from tests.benchmarks import report
from tests.chaos.loads import Found, Loads

FAULTS: Final = 500
ROUND: Final = 50
PROPERTIES: Final = ("wrong", "stuck", "leaked", "unnamed")


def one_round(seed: int, faults: int) -> Found:
    with tempfile.TemporaryDirectory(prefix="stoker-loads-") as folder, Loads(Path(folder), seed) as loads:
        return loads.run(faults)


def run(faults: int, seed: int) -> dict[str, Any]:
    totals: dict[str, Any] = {name: [] for name in PROPERTIES}
    steps: dict[str, int] = {}
    failures = done = 0
    for first in range(0, faults, ROUND):
        round_seed, begin = seed + first // ROUND, time.monotonic()
        found = one_round(round_seed, min(ROUND, faults - first))
        for name in PROPERTIES:
            totals[name] += [f"seed {round_seed}: {text}" for text in getattr(found, name)]
        for step in found.steps:
            kind = step.split(": ", 1)[1].split(", slot")[0]
            steps[kind] = steps.get(kind, 0) + 1
        failures += found.failures
        done += len(found.steps)
        report.console.print(
            f"seed {round_seed}: {len(found.steps)} faults in {time.monotonic() - begin:.0f} s, "
            f"{len(found.problems)} problems"
        )
        report.save("load_faults", {"seed": seed, "faults": done, "failures": failures, "steps": steps, **totals})
    return {"seed": seed, "faults": done, "failures": failures, "steps": steps, **totals}


def main(quick: bool = False, faults: int = 0, seed: int = 0) -> bool:
    told = run(faults or (ROUND if quick else FAULTS), seed or random.randrange(1 << 31))
    report.table("Faults of loads", ["step", "count"], sorted(told["steps"].items()))
    for name in PROPERTIES:
        for text in told[name][:5]:
            report.console.print(f"[red]{name}[/]: {text}")
    return report.verdict(
        "no wrong tensor, no stuck lease, no leaked file, every failure named",
        not any(told[name] for name in PROPERTIES),
        f"{told['faults']} faults, {told['failures']} loads refused with a reason, seed {told['seed']}",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    raise SystemExit(not main(False, given.faults, given.seed))
