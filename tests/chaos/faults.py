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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from control_plane.client import Client, Endpoint
from control_plane.resumption import ClientError
from tests.chaos.books import Books
from tests.chaos.checks import Verdict, check_accounts, check_answers, check_delivery, check_kv, check_resumes
from tests.chaos.ground import Done, Ground, Servers, wait_until
from tests.chaos.load import GIVE_UP_S, KINDS, PROMPTS, Answer, Ask, Kind, Progress, Teller, Told, counts, run_lanes
from tests.chaos.schedule import LOCAL, SERVERS, schedule
from tests.chaos.twins import TwinChunk
from tests.support.service import Service

LANES = 8
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
            f"{verdict.exact_resumes} of {verdict.resumes} resumes exact "
            f"(and {verdict.destroyed} whose stored prefix was gone); {verdict.misses_seen} damaged chunks met and "
            f"left out; {len(verdict.rounded)} answers rounded otherwise; {self.orphans} orphan packs\n"
            f"hit {self.hits}\nasked {self.asked}"
        )


def run_faults(
    service: Service,
    function: str,
    twins: Sequence[TwinChunk],
    *,
    seed: int,
    faults: int,
    max_tokens: int,
    kinds: tuple[Kind, ...] = KINDS,
    servers: Servers | None = None,
    on_done: Callable[[Done], None] = lambda done: None,
) -> Report:
    """The whole of it, up to the function's end; `close_and_look` is for what the service leaves behind."""
    report, progress = Report(seed), Progress()
    client = Client(lambda: Endpoint(service.url, service.key), give_up_s=GIVE_UP_S)
    teller = Teller(client, function, max_tokens, progress)
    for kind in kinds:
        for prompt in range(len(PROMPTS) if kind.exact else 0):
            teller.undisturbed(kind, prompt)
    ground = Ground(service, function, twins, progress, servers)
    over = threading.Event()
    threads, report.tolds = run_lanes(
        LANES, teller.tell, lambda number: Ask.drawn(seed, number, kinds, max_tokens), lambda: not over.is_set()
    )
    try:
        for fault in schedule(seed, faults, SERVERS if servers else LOCAL):
            if not progress.wait(progress.tokens + fault.after_tokens, GIVE_UP_S):
                report.verdict.lost.append(f"no client was given anything for {GIVE_UP_S:g} s before fault {fault}")
                break
            done = ground.hit(fault)
            report.faults.append(done)
            on_done(done)
    finally:
        over.set()
    for thread in threads:
        thread.join(2 * GIVE_UP_S)
    judge(report, teller, client, ground)
    return report


def judge(report: Report, teller: Teller, client: Client, ground: Ground) -> None:
    verdict, books, service = report.verdict, ground.books, ground.service
    excused = {code for done in report.faults if done.hit for code in done.fault.kind.excuses}
    check_answers(
        report.tolds,
        lambda told: teller.undisturbed(told.ask.kind, told.ask.prompt),
        lambda told: read_again(client, told),
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
    service.call("DELETE", f"/api/v1/functions/{ground.function}")
    service.wait_zero()
    wait_until(lambda: not books.rows("SELECT 1 FROM replica_accounts WHERE closed_us IS NULL"), 20)
    check_accounts(ends, books.log_faults(), books.ledger_faults(), verdict)


def read_again(client: Client, told: Told) -> Answer | None:
    """The request's log from its beginning, as a reader without a cursor gets it (usage where it was asked for)."""
    repeated = Told.nothing(told.ask)
    try:
        for event in client.resume(told.ask.kind.path, told.request_id):
            repeated.take(event)
    except ClientError as error:
        repeated.texts[0] = f"({error})"
    return replace(repeated.answer, tokens=told.tokens)


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


def close_and_look(service: Service, report: Report) -> None:
    """Ends the service as an operator does; what is left of it is a fault."""
    left = report.verdict.left_behind
    command = [sys.executable, "-m", "control_plane.cli.main", "down", "--data-dir", str(service.data_dir)]
    ended = subprocess.run(command, env=service.env, capture_output=True, text=True, timeout=60)
    if ended.returncode:
        left.append(f"stoker down ended with {ended.returncode}: {ended.stdout[-300:]}{ended.stderr[-300:]}")
    wait_until(lambda: not service.family(), 10)
    left += [f"process {process.pid}" for process in service.family()]
    left += [f"shared memory {path}" for path in service.pool_directories()]
    objects = service.data_dir / "objects"
    if not (service.data_dir / "stoker.db").exists():
        return
    report.orphans = len(
        {str(path.relative_to(objects)) for path in objects.glob("kv/packs/*/*")}
        - Books(service.data_dir / "stoker.db").known_packs()
    )
