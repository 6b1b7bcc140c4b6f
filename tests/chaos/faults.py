"""Random faults over a mixed load of every kind of request, and what must hold afterwards. Used by the suite and,
larger, by the benchmark.

    undisturbed answers, each made alone -> eight clients at once, without a pause -> faults, by the tokens delivered
    -> everything read again, journal and ledger audited, every process gone

What is drawn comes from one seed (`schedule`, `load.Ask`), which a failure names; `Done` records what was hit.
Limits: the tokens between two faults are the same in every run of a seed, the microsecond is not.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from control_plane.client import Client
from tests.chaos.checks import Verdict, check_accounts, check_answers, check_delivery, check_kv, check_resumes
from tests.chaos.ground import Done, Ground, wait_until
from tests.chaos.load import KINDS, PROMPTS, Ask, Kind, Told, counts
from tests.chaos.schedule import names_for, schedule
from tests.chaos.site import Site, site
from tests.chaos.telling import GIVE_UP_S, Alone, Progress, Teller, run_lanes
from tests.chaos.twins import TwinChunk, collect_twins
from tests.support.checkpoints import make_tiny_llama

LANES = 8
READY_WITHIN_S = 60.0
FUNCTION = "tiny"
MAX_TOKENS = 96
SHAPE = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2}
SCALING = {"keep_alive": 60, "max_replicas": 2, "target_concurrency": 4}
ENGINE = {"prefix_cache": False, "threads": 1}
"""Without the prefix cache a repeated prompt is computed as the first time, so that equal means byte for byte."""
SITES: dict[str, dict[str, Any]] = {
    "one gateway": {},
    "two gateways": {"gateways": 2},
    "PostgreSQL and S3": {"database": True, "bucket": True},
    "two gateways on PostgreSQL": {"gateways": 2, "database": True},
    "two gateways on PostgreSQL and S3": {"gateways": 2, "database": True, "bucket": True},
}
"""What a service stands on."""
ENVIRONMENT = {"STOKER_KV_LOAD": "always"}
"""A tiny model computes faster than any store reads: without this, stored KV would hardly ever be used."""


@dataclass(slots=True)
class Report:
    seed: int
    faults: list[Done] = field(default_factory=list)
    tolds: list[Told] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    states: dict[str, int] = field(default_factory=dict)
    orphans: int = 0
    """Packs that no record names, of replicas that were killed between storing and telling."""

    @property
    def hits(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for done in self.faults:
            found[done.fault.name] = found.get(done.fault.name, 0) + bool(done.hit)
        return found

    @property
    def asked(self) -> dict[str, int]:
        return counts(self.tolds)

    def __str__(self) -> str:
        verdict = self.verdict
        return (
            f"seed {self.seed}: {len(self.faults)} faults, {len(self.tolds)} requests {self.states}; "
            f"{verdict.exact_resumes} of {verdict.resumes} resumes exact; {verdict.misses_seen} damaged chunks met and "
            f"left out; {len(verdict.rounded)} answers rounded otherwise; {self.orphans} orphan packs\n"
            f"hit {self.hits}\nasked {self.asked}"
        )


def under_fire(
    folder: Path,
    kind: str,
    *,
    seed: int,
    faults: int,
    prompts: int = 1,
    alone: Alone | None = None,
    on_done: Callable[[Done], None] = lambda done: None,
) -> Report:
    """A service of one of `SITES`, made in `folder` and ended again. `prompts`: of how many there are twins."""
    checkpoint = make_tiny_llama(folder / "tiny", **SHAPE)
    revision = make_tiny_llama(folder / "revision", seed=1, **SHAPE)
    with site(folder, env=ENVIRONMENT, **SITES[kind]) as place:
        twins = collect_twins(place, checkpoint, revision, ENGINE, prompts)
        place.deploy(FUNCTION, f"file://{checkpoint}", scaling=SCALING, engine_options=ENGINE)
        report = run_faults(
            place, FUNCTION, twins, seed=seed, faults=faults, max_tokens=MAX_TOKENS, alone=alone, on_done=on_done
        )
        close_and_look(place, report)
    return report


def run_faults(
    place: Site,
    function: str,
    twins: Sequence[TwinChunk],
    *,
    seed: int,
    faults: int,
    max_tokens: int,
    kinds: tuple[Kind, ...] = KINDS,
    alone: Alone | None = None,
    on_done: Callable[[Done], None] = lambda done: None,
) -> Report:
    """The whole of it, up to the function's end; `close_and_look` is for what the service leaves behind."""
    report, progress = Report(seed), Progress()
    teller = Teller(
        lambda number: Client(place.places(number), give_up_s=GIVE_UP_S), function, max_tokens, progress, alone
    )
    for kind in kinds:
        for prompt in range(len(PROMPTS) if kind.exact else 0):
            teller.undisturbed(kind, prompt)
    ground = Ground(place, function, twins, progress)
    over = threading.Event()
    threads, report.tolds = run_lanes(
        LANES, teller.tell, lambda number: Ask.drawn(seed, number, kinds, max_tokens), lambda: not over.is_set()
    )
    try:
        for fault in schedule(seed, faults, names_for(place)):
            if not progress.wait(progress.tokens + fault.after_tokens, GIVE_UP_S):
                report.verdict.lost.append(f"no client was given anything for {GIVE_UP_S:g} s before fault {fault}")
                break
            begin_s = time.monotonic()
            done = ground.hit(fault)
            done.took_s = time.monotonic() - begin_s
            report.faults.append(done)
            on_done(done)
    finally:
        over.set()
    for thread in threads:
        thread.join(2 * GIVE_UP_S)
    judge(report, teller, ground)
    return report


def judge(report: Report, teller: Teller, ground: Ground) -> None:
    verdict, books, place = report.verdict, ground.books, ground.place
    for service in place.gateways:
        service.wait_ready(READY_WITHIN_S)
    excused = {code for done in report.faults if done.hit for code in done.fault.kind.excuses}
    check_answers(
        report.tolds,
        lambda told: teller.undisturbed(told.ask.kind, told.ask.prompt),
        teller.again,
        verdict,
        lambda told: gives_in_company(teller, told),
    )
    with contextlib.suppress(RuntimeError):
        wait_until(
            lambda: all(end.state in ("done", "cancelled", "refused", "failed") for end in books.ends().values()), 30
        )
    ends, turns = books.ends(), books.turns()
    for ended in ends.values():
        report.states[ended.state] = report.states.get(ended.state, 0) + 1
    check_delivery(report.tolds, ends, excused, verdict)
    damaged = [one for done in report.faults for one in done.damaged]
    check_kv(damaged, turns, verdict)
    check_resumes(turns, verdict)
    place.ask("DELETE", f"/api/v1/functions/{ground.function}")
    if not wait_until(lambda: not place.replicas(), 60):
        verdict.left_behind.append(f"replicas: {[row['replica_id'] for row in place.replicas()]}")
    wait_until(lambda: not books.rows("SELECT 1 FROM replica_accounts WHERE closed_us IS NULL"), 20)
    check_accounts(ends, books.log_faults(), books.ledger_faults(), verdict)


def gives_in_company(teller: Teller, told: Told) -> bool:
    """Whether undisturbed copies, several at a time, give the answer that the run alone did not: then the batch's
    shape is what made the difference."""
    for copies in (2, 3, 5, 8):
        ask = replace(told.ask, kind=replace(told.ask.kind, manner="stream"))
        numbers = iter(range(copies))
        threads, answers = run_lanes(
            copies, teller.tell, lambda number, ask=ask: ask, lambda numbers=numbers: next(numbers, None) is not None
        )
        for thread in threads:
            thread.join(GIVE_UP_S)
        for other in answers:
            whole = all(a.startswith(b) for a, b in zip(other.texts, told.texts, strict=True))
            if whole and (told.left or other.texts == told.texts):
                return True
    return False


def close_and_look(place: Site, report: Report) -> None:
    """Ends the service as an operator does; what is left of it is a fault."""
    left = report.verdict.left_behind
    for service in place.gateways:
        command = [sys.executable, "-m", "control_plane.cli.main", "down", "--data-dir", str(service.data_dir)]
        ended = subprocess.run(command, env=service.env, capture_output=True, text=True, timeout=60)
        if ended.returncode:
            left.append(f"stoker down ended with {ended.returncode}: {ended.stdout[-300:]}{ended.stderr[-300:]}")
        wait_until(lambda: not service.family(), 10)  # noqa: B023
        left += [f"process {process.pid}" for process in service.family()]
        left += [f"shared memory {path}" for path in service.pool_directories()]
    report.orphans = len(set(place.objects.names("kv/packs/")) - place.books.known_packs())
