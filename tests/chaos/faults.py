"""Random faults over a mixed load of every kind of request, and what must hold afterwards. Used by the suite and,
larger, by the benchmark.

    undisturbed answers, each made alone -> eight clients at once, without a pause -> faults, by the tokens delivered
    -> everything read again, journal and ledger audited, every process gone

What is drawn comes from one seed (`schedule`, `load.Ask`), which a failure names; `Done` records what was hit.
Limits: the tokens between two faults are the same in every run of a seed, the microsecond is not. Processes are hit by
signals, the store's files and the database's file by what a bad disk or a second process does to them. A disk that is
full is a limit on the size of files (EFBIG where a disk says ENOSPC), for the processes that are there at that moment.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from control_plane.client import Client, Endpoint
from control_plane.resumption import ClientError
from function_runtime.protocol import KvChunk
from tests.chaos.books import Books, StoredKv
from tests.chaos.checks import (
    Damaged,
    Verdict,
    check_accounts,
    check_answers,
    check_delivery,
    check_kv,
    check_resumes,
)
from tests.chaos.damage import damage
from tests.chaos.load import GIVE_UP_S, KINDS, PROMPTS, Answer, Ask, Kind, Progress, Teller, Told, counts, run_lanes
from tests.chaos.schedule import Fault, schedule
from tests.chaos.twins import TwinChunk
from tests.support.service import HttpError, Service

LANES = 8
ENVIRONMENT = {"STOKER_KV_LOAD": "always"}
"""A tiny model computes faster than any store reads: without this, stored KV would hardly ever be used."""
VICTIM_WITHIN_S = 20.0
DEAD_WITHIN_S = 15.0
DAMAGE_TRIES = 20
SAID_S = 0.15
"""In which what a process said before it was stopped is read and committed."""


@dataclass(slots=True)
class Done:
    """A fault as it was carried out."""

    fault: Fault
    hit: str = ""
    """What was hit; empty: nothing was there to be hit."""
    at_tokens: int = 0
    damaged: list[Damaged] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.fault.number:4} at {self.at_tokens:6} {self.fault.name}: {self.hit or 'nothing was there'}"


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


class Ground:
    """The service under fire: who can be hit, and how."""

    def __init__(self, service: Service, function: str, twins: Sequence[TwinChunk], progress: Progress) -> None:
        self.service = service
        self.function = function
        self.books = Books(service.data_dir / "stoker.db")
        self.objects = service.data_dir / "objects"
        self._twins = twins
        self._progress = progress

    def hit(self, fault: Fault) -> Done:
        done = Done(fault, at_tokens=self._progress.tokens)
        kind, _, detail = fault.name.partition(" ")
        match kind:
            case "kill":
                done.hit = self._kill(detail.split(" and "), fault.draw)
            case "stop":
                done.hit = self._stop(detail, fault.draw)
            case "object":
                self._damage_object(detail, done)
            case "record":
                self._forge_record(detail.removeprefix("forged: "), done)
            case "store":
                done.hit = self._store_gone(fault) if detail == "gone" else self._store_full(fault)
            case "database":
                done.hit = self._database_locked(fault) if detail == "locked" else self._database_full(fault)
        return done

    # --- processes ------------------------------------------------------------------------------------------------

    def replicas(self) -> list[dict[str, Any]]:
        """Those of the function that have a process, oldest first; waited for, as one may be starting."""
        deadline_s = time.monotonic() + VICTIM_WITHIN_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(HttpError, OSError):
                found = [r for r in self.service.replicas() if r["pid"] and r["function"] == self.function]
                if found:
                    return sorted(found, key=lambda row: row["created_us"])
            time.sleep(0.05)
        return []

    def _replica(self, draw: int) -> dict[str, Any] | None:
        found = self.replicas()
        return found[draw % len(found)] if found else None

    def _pid(self, whom: str, draw: int) -> int:
        if whom == "replica":
            row = self._replica(draw)
            return row["pid"] if row else 0
        if whom == "agent":
            return self.service.agent_pid() or 0
        process = self.service.process
        return process.pid if process is not None and process.poll() is None else 0

    def _kill(self, victims: list[str], draw: int) -> str:
        pids = {whom: self._pid(whom, draw) for whom in victims}
        hit = [f"{whom} {pid}" for whom, pid in pids.items() if pid and _signal(pid, signal.SIGKILL)]
        if "gateway" in victims:
            self._gateway_again()
        return ", ".join(hit)

    def _gateway_again(self) -> None:
        if self.service.process is not None:
            self.service.process.wait()
        self.service.start()

    def _stop(self, whom: str, draw: int) -> str:
        """Stopped; goes on when others have taken over (replica), when the load has (agent), or after a second or two
        (the one gateway there is, without which nothing moves)."""
        pid = self._pid(whom, draw)
        if not pid or not _signal(pid, signal.SIGSTOP):
            return ""
        try:
            if whom == "replica":
                _wait(lambda: not _runs(pid), DEAD_WITHIN_S)
            elif whom == "agent":
                self._progress.wait(self._progress.tokens + 60, 3.0)
            else:
                time.sleep(0.3 + draw % 1500 / 1000)
        finally:
            _signal(pid, signal.SIGCONT)
        return f"{whom} {pid}"

    # --- the store ------------------------------------------------------------------------------------------------

    def _live_kv(self) -> dict[str, list[StoredKv]]:
        """By replica that works on it: the stored KV of unfinished requests; waited for."""
        found: dict[str, list[StoredKv]] = {}
        deadline_s = time.monotonic() + VICTIM_WITHIN_S
        while time.monotonic() < deadline_s and not found:
            for row in self.books.live_kv(self.function):
                if row.replica_id and row.chunks:
                    found.setdefault(row.replica_id, []).append(row)
            if not found:
                time.sleep(0.02)
        return found

    def _victims(self, draw: int) -> tuple[dict[str, Any], list[StoredKv]] | None:
        """A replica, and the KV that what it runs would be resumed from."""
        found = self._live_kv()
        rows = [row for row in self.replicas() if row["replica_id"] in found]
        if not rows:
            return None
        row = rows[draw % len(rows)]
        return row, found[row["replica_id"]]

    def _damage_object(self, how: str, done: Done) -> None:
        """A pack is damaged, then the replica whose requests lie in it is killed: whoever resumes them reads it."""
        draw, (how, _, of) = done.fault.draw, how.partition(": ")
        for _ in range(DAMAGE_TRIES):
            victims = self._victims(draw)
            if victims is None:
                return
            replica, rows = victims
            # It says nothing from here on; what it has said is in the journal a moment later.
            _signal(replica["pid"], signal.SIGSTOP)
            time.sleep(SAID_S)
            rows = [row for row in self.books.live_kv(self.function) if row.replica_id == replica["replica_id"]]
            packs = sorted({chunk.pack for row in rows for chunk in row.chunks})
            spoiled = None
            if packs:
                pack = packs[draw % len(packs)]
                path = self.objects / pack
                # A request that ended meanwhile has taken its packs with it.
                spoiled = damage(path, how, draw >> 8, self._other_pack(of, path, draw) if of else b"")
            if spoiled is None:
                _signal(replica["pid"], signal.SIGCONT)
                continue
            done.damaged = list(
                self._damaged(
                    done.fault,
                    rows,
                    lambda _, c: c.pack == pack and spoiled.spoils(c.offset, c.nbytes),  # noqa: B023
                )
            )
            _signal(replica["pid"], signal.SIGKILL)
            done.hit = f"{pack[-12:]} ({len(done.damaged)} chunks), replica {replica['replica_id']}"
            return

    def _other_pack(self, of: str, path: Path, draw: int) -> bytes:
        if of != "request":
            twins = [twin for twin in self._twins if twin.of == of]
            return twins[draw % len(twins)].pack if twins else b"nothing of the kind"
        for other in sorted(path.parent.parent.glob("*/*")):
            if other != path:
                with contextlib.suppress(OSError):
                    return other.read_bytes()
        return b"no other pack was there"

    def _damaged(
        self, fault: Fault, rows: Sequence[StoredKv], is_hit: Callable[[StoredKv, KvChunk], bool]
    ) -> Iterator[Damaged]:
        """Of all records of these requests (`rows`), those that are hit."""
        whole = [(row.request_id, c) for row in rows for c in row.chunks if not is_hit(row, c)]
        for row in rows:
            for chunk in row.chunks:
                if is_hit(row, chunk):
                    covered = any(
                        request_id == row.request_id
                        and other.choice == chunk.choice
                        and other.start <= chunk.start < other.end
                        for request_id, other in whole
                    )
                    yield Damaged(
                        fault.number, fault.name, row.request_id, row.epoch, chunk.choice, chunk.start, chunk.end,
                        chunk.choice == 0 and not covered,
                    )  # fmt: skip

    def _forge_record(self, of: str, done: Done) -> None:
        """While the gateway is dead, the journal's record of a chunk is made to name another's (tenant, dtype,
        revision), whole and with its true digest: only what the chunk says of itself can give it away."""
        victims = self._victims(done.fault.draw)
        if victims is None:
            return
        replica, rows = victims
        pids = [self._pid("gateway", 0), replica["pid"]]
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        try:
            rows = [row for row in self.books.live_kv(self.function) if row.replica_id == replica["replica_id"]]
            forged: list[tuple[StoredKv, KvChunk]] = []
            for row in rows:
                mine = next((chunk for chunk in row.chunks if chunk.choice == 0 and chunk.start == 0), None)
                fitting = [t for t in self._twins if t.of == of and mine is not None and t.chunk.end == mine.end]
                if mine is None or not fitting:
                    continue
                twin = fitting[done.fault.draw % len(fitting)]
                path = self.objects / twin.chunk.pack
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(twin.pack)
                false = msgspec.structs.replace(twin.chunk, chain=mine.chain, parent=mine.parent)
                self.books.forge(row, tuple(false if chunk is mine else chunk for chunk in row.chunks))
                forged.append((row, mine))
            done.damaged = list(self._damaged(done.fault, rows, lambda row, chunk: (row, chunk) in forged))
            if done.damaged:
                done.hit = f"{len(done.damaged)} records, replica {replica['replica_id']}"
        finally:
            self._gateway_again()

    def _store_gone(self, fault: Fault) -> str:
        """Something else lies where the store's folder was: every read misses, every write fails; a replica dies
        meanwhile."""
        folder, away = self.objects / "kv", self.objects / "kv-away"
        if not folder.is_dir():
            return ""
        folder.rename(away)
        try:
            folder.write_bytes(b"not a folder")
            hit = self._kill(["replica"], fault.draw)
            self._progress.wait(self._progress.tokens + 80, 5.0)
        finally:
            folder.unlink(missing_ok=True)
            away.rename(folder)
        return f"folder away, {hit}"

    def _store_full(self, fault: Fault) -> str:
        """No file of a replica can grow: neither its packs nor its log."""
        pids = [row["pid"] for row in self.replicas()]
        with _files_cannot_grow(pids):
            self._progress.wait(self._progress.tokens + 80, 5.0)
        return f"replicas {pids}"

    # --- the database ---------------------------------------------------------------------------------------------

    def _database_locked(self, fault: Fault) -> str:
        """Another process holds the write lock, every third time for longer than a write waits."""
        held_s = 5.6 if fault.draw % 3 == 0 else 0.2 + fault.draw % 1000 / 1000
        with contextlib.closing(
            sqlite3.connect(self.service.data_dir / "stoker.db", timeout=20.0, isolation_level=None)
        ) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return ""
            time.sleep(held_s)
            other.execute("ROLLBACK")
        return f"locked for {held_s:.1f} s"

    def _database_full(self, fault: Fault) -> str:
        pid = self._pid("gateway", 0)
        if not pid:
            return ""
        with _files_cannot_grow([pid]):
            time.sleep(0.3 + fault.draw % 1200 / 1000)
        return f"gateway {pid}"


@contextlib.contextmanager
def _files_cannot_grow(pids: Sequence[int]) -> Iterator[None]:
    before: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[pid][1]))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait(holds: Callable[[], bool], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


# --- a run ------------------------------------------------------------------------------------------------------------


def run_faults(
    service: Service,
    function: str,
    twins: Sequence[TwinChunk],
    *,
    seed: int,
    faults: int,
    max_tokens: int,
    kinds: tuple[Kind, ...] = KINDS,
    names: Sequence[str] = (),
    on_done: Callable[[Done], None] = lambda done: None,
) -> Report:
    """The whole of it, up to the function's end; `close_and_look` is for what the service leaves behind."""
    report, progress = Report(seed), Progress()
    client = Client(lambda: Endpoint(service.url, service.key), give_up_s=GIVE_UP_S)
    teller = Teller(client, function, max_tokens, progress)
    for kind in kinds:
        for prompt in range(len(PROMPTS) if kind.exact else 0):
            teller.undisturbed(kind, prompt)
    ground = Ground(service, function, twins, progress)
    over = threading.Event()
    threads, report.tolds = run_lanes(
        LANES, teller.tell, lambda number: Ask.drawn(seed, number, kinds, max_tokens), lambda: not over.is_set()
    )
    try:
        for fault in schedule(seed, faults, names) if names else schedule(seed, faults):
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
        _wait(lambda: all(end.state in ("done", "cancelled", "refused", "failed") for end in books.ends().values()), 30)
    ends, turns = books.ends(), books.turns()
    for ended in ends.values():
        report.states[ended.state] = report.states.get(ended.state, 0) + 1
    check_delivery(report.tolds, ends, excused, verdict)
    damaged = [one for done in report.faults for one in done.damaged]
    check_kv(damaged, turns, verdict)
    check_resumes(turns, verdict)
    service.call("DELETE", f"/api/v1/functions/{ground.function}")
    service.wait_zero()
    _wait(lambda: not books.rows("SELECT 1 FROM replica_accounts WHERE closed_us IS NULL"), 20)
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
    _wait(lambda: not service.family(), 10)
    left += [f"process {process.pid}" for process in service.family()]
    left += [f"shared memory {path}" for path in service.pool_directories()]
    objects = service.data_dir / "objects"
    report.orphans = len(
        {str(path.relative_to(objects)) for path in objects.glob("kv/packs/*/*")}
        - Books(service.data_dir / "stoker.db").known_packs()
    )
