"""`python -m tests.benchmarks [NAME ...] [--quick]`: every benchmark, or those named; exit 1 if a figure was missed."""

from __future__ import annotations

import importlib
import os
import sys

from tests.benchmarks import report

NAMES = (
    "output", "cold", "throughput", "control", "journal_load", "kills", "store_reads", "faults", "resume", "kv_trace",
    "kv_replay", "kv_cost", "kv_forms", "fuzz_headers", "load_checkpoint",
    "cold_path", "load_faults", "autoscaler",
    "live_prewarm", "live_replay", "pod_cycles", "pods_first_token", "control_loop",
)  # fmt: skip


def main() -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded, as a worker's template has it
    os.environ.setdefault("TQDM_DISABLE", "1")  # the reference prints bars of its own
    if flags := [argument for argument in sys.argv[1:] if argument.startswith("-") and argument != "--quick"]:
        print(f"{__doc__}\nNames: {', '.join(NAMES)}; {' '.join(flags)} is not known", file=sys.stderr)
        return 2
    quick = "--quick" in sys.argv
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or list(NAMES)
    unknown = set(names) - set(NAMES)
    if unknown:
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    held = {}
    for name in names:
        report.console.rule(name)
        held[name] = importlib.import_module(f"tests.benchmarks.{name}").main(quick)
    missed = [name for name, holds in held.items() if not holds]
    report.console.print(f"missed: {', '.join(missed)}" if missed else "every figure holds")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
