"""A PostgreSQL server of the test run: started once, in a directory of its own, on a Unix socket.

`database()` hands out a migrated database without rows: an earlier one that was emptied, which takes milliseconds, or a
clone. `stop`, `kill` and `start` make the server go away and come back. It syncs nothing, so it survives no power loss.
Limits: needs `initdb` and asyncpg; PostgreSQL refuses to run as root, so root steps down to `nobody`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

EMPTY = """
DO $$ DECLARE name TEXT; BEGIN
    PERFORM pg_terminate_backend(pid, 5000) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid();
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'migrations' LOOP
        EXECUTE 'DELETE FROM ' || quote_ident(name);
    END LOOP;
END $$"""
"""Deleting a few rows is a hundred times quicker than truncating or cloning, which make files."""

PORT = 5432
"""Only the name of the socket."""
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "max_wal_size": "4GB",
    "log_min_messages": "fatal",
    "deadlock_timeout": "100ms",
}


def program(name: str) -> str | None:
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return shutil.which(name) or (str(places[0]) if places else None)


def missing() -> str | None:
    """Why no server can be started here."""
    if program("initdb") is None or program("postgres") is None:
        return "no PostgreSQL server is installed"
    try:
        import asyncpg  # noqa: F401
    except ImportError:
        return "asyncpg is not installed"
    return None


class PostgresServer:
    def __init__(self, directory: Path, settings: dict[str, str] | None = None) -> None:
        self.directory = directory
        self._settings = {**SETTINGS, **(settings or {})}
        self._data = directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._emptied: list[str] = []
        self._quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "cwd": directory}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(directory, nobody.pw_uid, nobody.pw_gid)
            self._quiet |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, name: str = "postgres") -> str:
        return f"postgresql://stoker@/{name}?host={self.directory}&port={PORT}"

    # --- coming and going -------------------------------------------------------------------------------------

    def create(self) -> None:
        command = [str(program("initdb")), "-D", str(self._data), "-A", "trust", "-U", "stoker", "--no-sync",
                   "--locale=C", "--encoding=UTF8"]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, **self._quiet)

    def start(self) -> None:
        """Returns when it takes connections. After `kill` its former children must be gone first, so it is asked to
        start until it does."""
        options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        command = [str(program("postgres")), "-D", str(self._data), "-k", str(self.directory), "-p", str(PORT)]
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            with (self.directory / "server.log").open("ab") as log:
                self._process = subprocess.Popen([*command, *options], stderr=log, **self._quiet)
            while self._process.poll() is None and time.monotonic() < until:
                if self.answers():
                    return
                time.sleep(0.02)
            time.sleep(0.05)
        raise RuntimeError(f"PostgreSQL did not start: {(self.directory / 'server.log').read_text()[-1000:]}")

    def answers(self) -> bool:
        import asyncpg

        try:
            self.run("SELECT 1")
        except (OSError, asyncpg.PostgresError):
            return False
        return True

    def stop(self) -> None:
        """Ends its sessions and itself, at once and cleanly."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)
            self._process = None

    def kill(self) -> None:
        """SIGKILL, its sessions included: what was not in its log is lost."""
        if self._process is not None:
            for pid in (self._process.pid, *_children(self._process.pid)):
                os.kill(pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def signal_all(self, number: int) -> None:
        """SIGSTOP and SIGCONT of the server and its sessions: it hangs, connections stay."""
        for pid in (self.pid, *_children(self.pid)):
            os.kill(pid, number)

    # --- databases --------------------------------------------------------------------------------------------

    def run(self, sql: str, name: str = "postgres") -> None:
        self.fetch(sql, name)

    def fetch(self, sql: str, name: str = "postgres") -> list[Any]:
        import asyncpg

        async def fetch() -> list[Any]:
            session = await asyncpg.connect(self.url(name), timeout=10)
            try:
                return list(await session.fetch(sql)) if sql.startswith("SELECT") else [await session.execute(sql)]
            finally:
                await session.close()

        return _beside(lambda: asyncio.run(fetch()))

    def make_template(self) -> None:
        from control_plane.database import Database

        async def migrated() -> None:
            await (await Database.open(self.url("template_stoker"))).close()

        self.run("CREATE DATABASE template_stoker")
        _beside(lambda: asyncio.run(migrated()))

    @contextmanager
    def database(self, *, empty: bool = False) -> Iterator[str]:
        """The URL of a fresh database; `empty`: without any table."""
        if empty or not self._emptied:
            name = f"test_{os.getpid()}_{next(self._numbers)}"
            self.run(f"CREATE DATABASE {name} TEMPLATE {'template0' if empty else 'template_stoker'}")
        else:
            name = self._emptied.pop()
        yield self.url(name)
        if empty:
            self.run(f"DROP DATABASE {name} WITH (FORCE)")
        else:
            self.run(EMPTY, name)
            self._emptied.append(name)


@contextmanager
def server(settings: dict[str, str] | None = None, *, on_disk: bool = False) -> Iterator[PostgresServer]:
    memory = Path("/dev/shm")
    directory = Path(
        tempfile.mkdtemp(prefix="stoker-pg-", dir=memory if os.access(memory, os.W_OK) and not on_disk else None)
    )
    made = PostgresServer(directory, settings)
    try:
        made.create()
        made.start()
        made.make_template()
        yield made
    finally:
        made.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def _beside(work: Callable[[], T]) -> T:
    """On a thread of its own, since the caller may be inside an event loop."""
    outcome: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return outcome[0]
