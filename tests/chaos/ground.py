"""The service under fire: how each fault of the schedule hits it.

Processes are hit by signals; the store's files, and the database's, by what a bad disk or a second process does to
them; PostgreSQL and SeaweedFS by what becomes of servers. Limits: a disk that is full is a limit on the size of files
(EFBIG where a disk says ENOSPC), for the processes that are there at that moment.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from tests.chaos.schedule import Fault
from tests.chaos.site import LEASE_S, Bucket, Site
from tests.chaos.spoiling import Spoiler
from tests.chaos.telling import Progress
from tests.chaos.twins import TwinChunk
from tests.chaos.victims import Done, Victims, files_cannot_grow, runs, send_signal, wait_until
from tests.support.postgres import PostgresServer
from tests.support.service import Service

DEAD_WITHIN_S = 15.0
TAKEN_OVER_WITHIN_S = 4 * LEASE_S


PROXY_FAULTS: dict[str, dict[str, Any]] = {
    "hung": {"hang": 1.0},
    "slow": {"delay_s": 0.7},
    "503": {"unavailable": 0.7},
    "reset": {"reset": 0.7},
    "flips bits": {"flip": 1.0, "methods": ("GET",)},
}


class Ground:
    """The service under fire: who can be hit, and how."""

    def __init__(self, place: Site, function: str, twins: Sequence[TwinChunk], progress: Progress) -> None:
        self.place = place
        self.function = function
        self.books = place.books
        self._victims = Victims(place, function)
        self._spoiler = Spoiler(place, function, twins, self._victims)
        self._progress = progress

    def hit(self, fault: Fault) -> Done:
        done = Done(fault, at_tokens=self._progress.tokens)
        kind, _, detail = fault.name.partition(" ")
        match kind:
            case "kill":
                done.hit = self._kill(detail, fault.draw)
            case "stop":
                done.hit = self._stop(detail, fault.draw)
            case "object":
                self._spoiler.damage_object(detail, done)
            case "record":
                self._spoiler.forge_record(detail.removeprefix("forged: "), done)
            case "store" if self.place.bucket is not None:
                done.hit = self._store_fails(self.place.bucket, detail, fault)
            case "database" if self.place.postgres is not None:
                done.hit = self._database_away(self.place.postgres, detail, fault)
            case "store":
                done.hit = self._store_gone(fault) if detail == "gone" else self._store_full(fault)
            case "database":
                done.hit = self._database_locked(fault) if detail == "locked" else self._database_full(fault)
        return done

    # --- processes ------------------------------------------------------------------------------------------------

    def _kill(self, detail: str, draw: int) -> str:
        if detail == "every gateway":
            self._victims.kill_gateways()
            self._victims.start_gateways()
            return "all of them"
        whom, _, until = detail.partition(" until ")
        hit = self._victims.kill(whom.split(" and "), draw)
        if "gateway" in whom:
            gateway = self._victims.gateway(draw)
            if gateway.process is not None:
                gateway.process.wait()
            if until:
                self._taken_over(gateway)
            self._victims.start_gateways()
        return ", ".join(hit)

    def _taken_over(self, gateway: Service) -> None:
        """Until nothing under way is this gateway's any more."""
        owner = (gateway.data_dir / "gateway.id").read_text().strip()
        wait_until(
            lambda: (
                not self.books.rows(
                    "SELECT 1 FROM requests WHERE owner = ? AND state IN ('queued', 'running') LIMIT 1", (owner,)
                )
            ),
            TAKEN_OVER_WITHIN_S,
        )

    def _stop(self, detail: str, draw: int) -> str:
        """Stopped; goes on when others have taken over (replica, or gateway where there is another), when the load has
        (agent), or after a second or two (a gateway)."""
        whom, _, until = detail.partition(" until ")
        pid = self._victims.pid(whom, draw)
        if not pid or not send_signal(pid, signal.SIGSTOP):
            return ""
        try:
            if whom == "replica":
                wait_until(lambda: not runs(pid), DEAD_WITHIN_S)
            elif whom == "agent":
                self._progress.wait(self._progress.tokens + 60, 3.0)
            elif until:
                self._taken_over(self._victims.gateway(draw))
            else:
                time.sleep(0.3 + draw % 1500 / 1000)
        finally:
            send_signal(pid, signal.SIGCONT)
        return f"{whom} {pid}"

    # --- the store ------------------------------------------------------------------------------------------------

    def _store_gone(self, fault: Fault) -> str:
        """Something else lies where the store's folder was: every read misses, every write fails; a replica dies
        meanwhile."""
        objects = self.place.folder
        if objects is None or not (objects / "kv").is_dir():
            return ""
        folder, away = objects / "kv", objects / "kv-away"
        folder.rename(away)
        try:
            folder.write_bytes(b"not a folder")
            hit = self._kill("replica", fault.draw)
            self._progress.wait(self._progress.tokens + 80, 5.0)
        finally:
            folder.unlink(missing_ok=True)
            away.rename(folder)
        return f"folder away, {hit}"

    def _store_full(self, fault: Fault) -> str:
        """No file of a replica can grow: neither its packs nor its log."""
        pids = [row["pid"] for row in self._victims.replicas()]
        with files_cannot_grow(pids):
            self._progress.wait(self._progress.tokens + 80, 5.0)
        return f"replicas {pids}"

    def _store_fails(self, bucket: Bucket, how: str, fault: Fault) -> str:
        """S3 is gone or misbehaves while a replica dies, whose requests another one wants to read there."""
        if how == "killed":
            bucket.seaweed.kill()
        elif how == "stopped":
            bucket.seaweed.pause()
        else:
            bucket.proxy.set(seed=fault.draw, **PROXY_FAULTS[how])
        try:
            hit = self._kill("replica", fault.draw)
            self._progress.wait(self._progress.tokens + 80, 6.0)
        finally:
            if how == "killed":
                bucket.seaweed.start()
            bucket.seaweed.go_on()
            met = bucket.proxy.set()
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
        with contextlib.closing(sqlite3.connect(str(self.place.sqlite), timeout=20.0, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return ""
            time.sleep(held_s)
            other.execute("ROLLBACK")
        return f"locked for {held_s:.1f} s"

    def _database_full(self, fault: Fault) -> str:
        pid = self._victims.pid("gateway", fault.draw)
        if not pid:
            return ""
        with files_cannot_grow([pid]):
            time.sleep(0.3 + fault.draw % 1200 / 1000)
        return f"gateway {pid}"


__all__ = ["Done", "Ground", "wait_until"]
