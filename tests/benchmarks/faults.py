"""Two thousand random faults over a mixed load, eight requests at a time, and what each property came to.

`python -m tests.benchmarks.faults [--quick] [--faults N] [--seed S] [--site NAME] [--resume] [--keep FOLDER]`. Runs in
rounds of `ROUND` faults, each with a service of its own: one gateway or two, SQLite or PostgreSQL, a folder or S3 in
turn. A round's seed gives its faults again (`--seed ROUND_SEED --faults N`): by what, whom and after how many tokens,
and on the same kind of service. The results are written after every round, whatever came of it; `--resume` goes on
where they end. Limits: answers of undisturbed runs are made once, on the first service.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.benchmarks import report
from tests.chaos.faults import SITES, Report, under_fire
from tests.chaos.ground import Done
from tests.chaos.site import missing
from tests.chaos.telling import Alone

NAME: Final = "faults"
ROUND: Final = 200
FAULTS, QUICK_FAULTS = 2000, 60
NUMBERS: Final = ("faults", "requests", "resumes", "exact_resumes", "misses_seen", "rounded", "orphans")
PROPERTIES: Final = ("lost", "doubled", "changed", "wrong_kv", "refused", "unaccounted", "left_behind")
TALLIES: Final = ("states", "hits", "asked", "took_s")


def possible_sites() -> tuple[str, ...]:
    """Of all kinds those that this machine can have."""
    found = []
    for name, built in SITES.items():
        reason = missing(database=built.get("database", False), bucket=built.get("bucket", False))
        if reason:
            report.console.print(f"left out: {name}: {reason}")
        else:
            found.append(name)
    return tuple(found)


def one_round(kind: str, seed: int, faults: int, alone: Alone, keep: Path | None) -> dict[str, Any]:
    """Never raises: a round that came to nothing says so. Where it found something its folder is kept in `keep`."""
    folder, begin_s = Path(tempfile.mkdtemp(prefix="stoker-faults-")), time.monotonic()
    done: list[Done] = []

    def tell(fault: Done) -> None:
        done.append(fault)
        print(f"{time.monotonic() - begin_s:7.1f} s  {fault} ({fault.took_s:.1f} s)", flush=True)

    try:
        found = under_fire(folder, kind, seed=seed, faults=faults, alone=alone, on_done=tell)
    except Exception:
        found = Report(seed, done)
        found.verdict.lost.append(f"the round ended after {len(done)} faults: {traceback.format_exc()}")
    told = as_row(kind, found) | {"seconds": round(time.monotonic() - begin_s, 1)}
    if keep is not None and problems_of(told):
        keep.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, keep / f"round-{seed}")
        lines = [*map(str, found.faults), str(found), *found.verdict.problems]
        (keep / f"round-{seed}.txt").write_text("\n".join(lines) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    return told


def as_row(kind: str, found: Report) -> dict[str, Any]:
    verdict = found.verdict
    took_s: dict[str, float] = {}
    for done in found.faults:
        took_s[done.fault.name] = round(took_s.get(done.fault.name, 0.0) + done.took_s, 2)
    numbers = {
        "faults": sum(bool(fault.hit) for fault in found.faults),
        "requests": len(found.tolds),
        "resumes": verdict.resumes,
        "exact_resumes": verdict.exact_resumes,
        "misses_seen": verdict.misses_seen,
        "rounded": len(verdict.rounded),
        "orphans": found.orphans,
    }
    properties = {name: getattr(verdict, name) for name in PROPERTIES}
    tallies = {"states": found.states, "hits": found.hits, "asked": found.asked, "took_s": took_s}
    return {"seed": found.seed, "site": kind, **numbers, **tallies, **properties, "inexact": verdict.inexact}


def problems_of(row: dict[str, Any]) -> int:
    return sum(len(row[name]) for name in PROPERTIES)


def total(seed: int, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"seed": seed} | {name: sum(row[name] for row in rounds) for name in NUMBERS}
    for tally in TALLIES:
        whole[tally] = {}
        for row in rounds:
            for name, count in row[tally].items():
                whole[tally][name] = round(whole[tally].get(name, 0) + count, 2)
    whole["sites"] = {name: sum(row["faults"] for row in rounds if row["site"] == name) for name in SITES}
    for name in (*PROPERTIES, "inexact"):
        whole[name] = [f"seed {row['seed']} ({row['site']}): {text}" for row in rounds for text in row[name]]
    return whole | {"seconds": round(sum(row["seconds"] for row in rounds), 1), "rounds": list(rounds)}


def earlier(seed: int) -> tuple[int, list[dict[str, Any]]]:
    """The rounds of the results there are, with their seed."""
    path = report.RESULTS / f"{NAME}.json"
    if not path.exists():
        return seed, []
    known = json.loads(path.read_text())
    if seed and seed != known["seed"]:
        raise SystemExit(f"{path} is of seed {known['seed']}, not {seed}")
    return known["seed"], known["rounds"]


def run(
    faults: int, seed: int, sites: Sequence[str], rounds: list[dict[str, Any]], keep: Path | None
) -> dict[str, Any]:
    alone = Alone()
    for first in range(0, faults, ROUND):
        round_seed = seed + first // ROUND
        if any(row["seed"] == round_seed for row in rounds):
            continue
        kind = sites[round_seed % len(sites)]
        row = one_round(kind, round_seed, min(ROUND, faults - first), alone, keep)
        rounds.append(row)
        report.save(NAME, total(seed, rounds))
        report.console.print(
            f"seed {round_seed} ({kind}): {row['faults']} faults in {row['seconds']:.0f} s, {problems_of(row)} problems"
        )
    return total(seed, rounds)


def show(found: dict[str, Any]) -> None:
    hits = [[name, count, found["took_s"].get(name, 0.0) / max(count, 1)] for name, count in found["hits"].items()]
    report.table("Faults that hit something", ["fault", "times", "s each"], sorted(hits))
    report.table("On", ["service", "faults"], found["sites"].items())
    report.table("Requests", ["kind", "asked"], sorted(found["asked"].items()))
    rows = [[name, found[name]] for name in NUMBERS if name != "orphans"]
    rows += [[name, len(found[name])] for name in PROPERTIES]
    report.table(f"Seed {found['seed']}", ["what", "count"], [*rows, ["orphan packs", found["orphans"]]])
    for name in PROPERTIES:
        for text in found[name]:
            report.console.print(f"[red]{name}: {text}", markup=True, highlight=False)


def main(
    quick: bool, faults: int = 0, seed: int = 0, only: str = "", resume: bool = False, keep: Path | None = None
) -> bool:
    rounds: list[dict[str, Any]] = []
    if resume:
        seed, rounds = earlier(seed)
    seed = seed or random.SystemRandom().randrange(1, 2**31)
    found = run(faults or (QUICK_FAULTS if quick else FAULTS), seed, [only] if only else possible_sites(), rounds, keep)
    show(found)
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
    parser.add_argument("--site", choices=list(SITES), default="")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    raise SystemExit(not main(given.quick, given.faults, given.seed, given.site, given.resume, given.keep))
