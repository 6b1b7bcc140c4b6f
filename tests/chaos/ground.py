"""The service under fire: which processes and objects there are to be hit, and how each fault hits them.

Processes are hit by signals; the store's files, and the database's, by what a bad disk or a second process does to
them; PostgreSQL and SeaweedFS by what becomes of servers. Limits: a disk that is full is a limit on the size of files
(EFBIG where a disk says ENOSPC), for the processes that are there at that moment.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from function_runtime.protocol import KvChunk
from tests.chaos.books import Books, PostgresBooks, StoredKv
from tests.chaos.checks import Damaged
from tests.chaos.damage import damage
from tests.chaos.load import Progress
from tests.chaos.schedule import Fault
from tests.chaos.twins import TwinChunk
from tests.support.faulty_proxy import FaultyProxy
from tests.support.postgres import PostgresServer
from tests.support.seaweed import Seaweed
from tests.support.service import HttpError, Service

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


@dataclass(frozen=True, slots=True)
class Servers:
    """What a service may stand on beside its data directory, and what the harness does to it."""

    postgres: PostgresServer
    database_url: str
    seaweed: Seaweed
    proxy: FaultyProxy
    """Between the service and SeaweedFS."""


PROXY_FAULTS: dict[str, dict[str, Any]] = {
    "hung": {"hang": 1.0},
    "slow": {"delay_s": 0.7},
    "503": {"unavailable": 0.7},
    "reset": {"reset": 0.7},
    "flips bits": {"flip": 1.0, "methods": ("GET",)},
}


class Ground:
    """The service under fire: who can be hit, and how."""

    def __init__(
        self,
        service: Service,
        function: str,
        twins: Sequence[TwinChunk],
        progress: Progress,
        servers: Servers | None = None,
    ) -> None:
        self.service = service
        self.function = function
        self._servers = servers
        self.books = PostgresBooks(servers.database_url) if servers else Books(service.data_dir / "stoker.db")
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
            case "store" if self._servers is not None:
                done.hit = self._store_fails(self._servers, detail, fault)
            case "database" if self._servers is not None:
                done.hit = self._database_away(self._servers.postgres, detail, fault)
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
                wait_until(lambda: not _runs(pid), DEAD_WITHIN_S)
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

    def _store_fails(self, servers: Servers, how: str, fault: Fault) -> str:
        """S3 is gone or misbehaves while a replica dies, whose requests another one wants to read there."""
        if how == "killed":
            servers.seaweed.kill()
        else:
            servers.proxy.set(seed=fault.draw, **PROXY_FAULTS[how])
        try:
            hit = self._kill(["replica"], fault.draw)
            self._progress.wait(self._progress.tokens + 80, 6.0)
        finally:
            if how == "killed":
                servers.seaweed.start()
            met = servers.proxy.set()
        return f"{hit}, {met}"

    # --- the database ---------------------------------------------------------------------------------------------

    def _database_away(self, postgres: PostgresServer, how: str, fault: Fault) -> str:
        away_s = 0.3 + fault.draw % 1700 / 1000
        if how == "killed":
            postgres.kill()
            time.sleep(away_s)
            postgres.start()
        else:
            postgres.signal_all(signal.SIGSTOP)
            time.sleep(away_s)
            postgres.signal_all(signal.SIGCONT)
        return f"{how} for {away_s:.1f} s"

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


def wait_until(holds: Callable[[], bool], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True
