"""500 times from zero to answers and back to zero over slots that are pods, under faults of the cluster.

    python -m tests.benchmarks pod_cycles [--quick]      25 instead

Nothing is timed but the way back to zero; what counts is what is lost, left behind, doubled or shared. Limits: the
tests' own cluster, whose kubelet runs the agents as processes of this machine; the stub engine.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import report
from tests.chaos.pod_cycles import Cycles


def main(quick: bool) -> bool:
    seed = int(os.environ.get("STOKER_CHAOS_SEED", random.randrange(1 << 31)))
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder, Cycles(Path(folder), seed) as cycles:
        found = cycles.run(25 if quick else 500, report.console.print)
    report.table("Faults met", ["fault", "times"], sorted(found.faults.items()))
    median_s, slow_s = report.median(found.zero_s), report.percentile(found.zero_s, 0.95)
    report.console.print(
        f"{found.cycles} cycles, seed {seed}: {found.answers} answers over {found.replicas} replicas on {found.slots} "
        f"slots, {found.moved} moved in the middle, {found.resumes} times taken up again by a reader; "
        f"back at zero after {median_s:.1f} s (median), {slow_s:.1f} s (p95)"
    )
    report.save(
        "pod_cycles",
        {
            "seed": seed, "cycles": found.cycles, "answers": found.answers, "slots": found.slots,
            "replicas": found.replicas, "moved": found.moved, "faults": dict(found.faults),
            "problems": found.problems, "zero_s": found.zero_s,
        },
    )  # fmt: skip
    counts = {name: len(getattr(found, name)) for name in ("lost", "orphans", "doubled", "shared", "books")}
    return report.verdict("nothing lost, left behind, doubled or shared", not found.problems, str(counts))


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
