"""200,000 damaged headers of GGUF, safetensors and its index: each refused with one of the package's errors, or sound.

Not a comparison but a search: processes share the seeds, each under a limit of address space, one header in fifty with
its allocations counted, every answer awaited for a bounded time. A finding names its seed;
`python -m tests.benchmarks.fuzz_headers --only gguf --seed 4711 --count 1` has it again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import shutil
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path

from tests.benchmarks import report
from tests.support.checkpoints import make_tiny_llama
from tests.support.gguf_files import make_tiny_gguf
from tests.support.header_fuzz import HANG_S, PEAK_BYTES, SPARE_BYTES, Fuzz, Outcome, limited_memory

COUNTS = {"gguf": 100_000, "safetensors": 80_000, "index": 20_000}
QUICK_SHARE = 20
TRACED_SHARE = 50
PIECE = 1000
"""Seeds a process takes at once."""


def search(kind: str, seeds: range, source: Path, gguf: Path) -> Outcome:
    folder, outcome = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory())), Outcome()
    try:
        fuzz = Fuzz(kind, folder / "m", source, gguf)
        with limited_memory():
            fuzz.run(seeds, outcome)
        tracemalloc.start()
        fuzz.run(range(seeds.start, seeds.start + max(1, len(seeds) // TRACED_SHARE)), outcome, traced=True)
        tracemalloc.stop()
    finally:
        shutil.rmtree(folder)
    return outcome


def main(quick: bool) -> bool:
    counts = {kind: count // (QUICK_SHARE if quick else 1) for kind, count in COUNTS.items()}
    return run(counts, 1_000_000)


def run(counts: dict[str, int], first_seed: int) -> bool:
    totals = {kind: Outcome() for kind in counts}
    with tempfile.TemporaryDirectory() as place:
        source = make_tiny_llama(Path(place) / "m", layers=1, hidden=16, heads=2, kv_heads=1, vocab=270)
        gguf = make_tiny_gguf(Path(place) / "m.gguf", source)
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
            work = {
                pool.submit(search, kind, range(at, min(at + PIECE, first_seed + count)), source, gguf): kind
                for kind, count in counts.items()
                for at in range(first_seed, first_seed + count, PIECE)
            }
            for done in concurrent.futures.as_completed(work):
                _add(totals[work[done]], done.result())
    rows = []
    for kind, outcome in totals.items():
        times = sorted(outcome.seconds)
        rows.append((
            kind, outcome.count, sum(outcome.refused.values()), outcome.accepted, len(outcome.findings),
            f"{report.median(times) * 1e3:.2f}", f"{report.percentile(times, 0.99) * 1e3:.2f}",
            f"{outcome.longest_s * 1e3:.0f}", f"{outcome.peak_bytes / 2**20:.1f}",
        ))  # fmt: skip
    head = ("headers", "read", "refused", "sound", "findings", "ms median", "ms p99", "ms longest", "MiB at most")
    report.table("damaged headers", head, rows)
    findings = [finding for outcome in totals.values() for finding in outcome.findings]
    for finding in findings[:50]:
        report.console.print(finding, markup=False)
    kinds: Counter[str] = Counter()
    for outcome in totals.values():
        kinds += outcome.refused
    report.save(
        "fuzz_headers",
        {
            "counts": {kind: outcome.count for kind, outcome in totals.items()},
            "accepted": {kind: outcome.accepted for kind, outcome in totals.items()},
            "refused_by": dict(kinds),
            "findings": findings,
            "longest_s": max(outcome.longest_s for outcome in totals.values()),
            "peak_bytes": max(outcome.peak_bytes for outcome in totals.values()),
            "limits": {"peak_bytes": PEAK_BYTES, "address_space_bytes": SPARE_BYTES, "hang_s": HANG_S},
        },
    )
    detail = f"{sum(outcome.count for outcome in totals.values())} headers, {len(findings)} findings"
    return report.verdict("damaged headers are refused or sound", not findings, detail)


def _add(total: Outcome, part: Outcome) -> None:
    total.accepted += part.accepted
    total.refused += part.refused
    total.findings += part.findings
    total.seconds += part.seconds
    total.longest_s = max(total.longest_s, part.longest_s)
    total.peak_bytes = max(total.peak_bytes, part.peak_bytes)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(COUNTS))
    parser.add_argument("--seed", type=int, default=1_000_000, help="the first")
    parser.add_argument("--count", type=int)
    given = parser.parse_args()
    chosen = {given.only: given.count or COUNTS[given.only]} if given.only else COUNTS
    raise SystemExit(0 if run(chosen, given.seed) else 1)
