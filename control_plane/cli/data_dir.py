"""The data directory as a command sees it: who holds it, where its service listens, and the local admin key.

`stoker.lock` is held by flock for as long as a `stoker up` lives, so a killed one leaves nothing to clean up; its JSON
says who. Limits: one machine; flock over network file systems is not relied on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from control_plane.cli.failure import CommandError
from control_plane.client import Endpoint
from control_plane.resumption import Unreachable

LOCK_TRIES: Final = 5
LOCK_PAUSE_S: Final = 0.05
"""A command that looks who holds the lock takes it for a moment: `up` tries again a few times before it believes it."""


def default_path() -> Path:
    """STOKER_DATA_DIR, or `stoker` in the user's data home."""
    if named := os.environ.get("STOKER_DATA_DIR"):
        return Path(named)
    home = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return Path(home) / "stoker"


@dataclass(frozen=True, slots=True)
class Holder:
    """The `stoker up` that holds a data directory."""

    pid: int
    url: str
    started_us: int


@dataclass(frozen=True, slots=True)
class DataDir:
    path: Path

    @classmethod
    def at(cls, path: Path | None) -> DataDir:
        return cls(Path(os.path.abspath(path if path is not None else default_path())))

    # --- who holds it -------------------------------------------------------------------------------------------

    @property
    def lock_path(self) -> Path:
        return self.path / "stoker.lock"

    @contextlib.contextmanager
    def hold(self, url: str) -> Iterator[HeldLock]:
        """Holds the directory for this process; refused while another process does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CommandError(
                f"the data directory {self.path} cannot be written: {error.strerror or error}",
                "choose another with --data-dir, or make this one writable",
                code="data_dir_unwritable",
            ) from error
        try:
            self._lock(descriptor)
            lock = HeldLock(descriptor, os.getpid(), time.time_ns() // 1000)
            lock.announce(url)
            yield lock
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        for remaining in reversed(range(LOCK_TRIES)):
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if remaining:
                    time.sleep(LOCK_PAUSE_S)
        holder = self._read_holder()
        who = f"by process {holder.pid} ({holder.url})" if holder else "by another process"
        raise CommandError(
            f"the data directory {self.path} is in use {who}",
            "use that one, end it with `stoker down --data-dir " + str(self.path) + "`, or choose another --data-dir",
            code="data_dir_in_use",
        )

    def holder(self) -> Holder | None:
        """Who holds the directory now; None if nobody does."""
        try:
            descriptor = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._read_holder() or Holder(0, "", 0)
        else:
            return None
        finally:
            os.close(descriptor)

    def _read_holder(self) -> Holder | None:
        try:
            told = json.loads(self.lock_path.read_text())
            return Holder(int(told["pid"]), str(told["url"]), int(told["started_us"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # --- where its service is -----------------------------------------------------------------------------------

    def endpoint(self) -> Endpoint:
        """Raises Unreachable while no service has said where it listens."""
        try:
            url = str(json.loads((self.path / "control.json").read_text())["url"])
        except FileNotFoundError as error:
            raise Unreachable(str(self.path), "no service runs on this data directory", connected=False) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unreachable(str(self.path), f"control.json is unreadable: {error}", connected=False) from error
        return Endpoint(url, os.environ.get("STOKER_API_KEY") or self.admin_key())

    def announce(self, url: str, pid: int) -> None:
        """Says where the service listens, at once and whole: readers never see half a file."""
        written = self.path / "control.json.new"
        written.write_text(json.dumps({"url": url, "pid": pid}))
        written.replace(self.path / "control.json")

    def withdraw(self) -> None:
        (self.path / "control.json").unlink(missing_ok=True)

    def admin_key(self) -> str:
        try:
            return (self.path / "admin.key").read_text().strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise CommandError(
                f"the admin key of {self.path} cannot be read: {error.strerror or error}",
                "run as the user who runs `stoker up`, or set STOKER_API_KEY",
                code="no_key",
            ) from error

    def agents(self) -> list[dict[str, Any]]:
        """How to reach the agents of this machine's slots, whether or not they still live."""
        found: list[dict[str, Any]] = []
        for path in sorted((self.path / "slots").glob("*/agent.json")):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return found


@dataclass(frozen=True, slots=True)
class HeldLock:
    descriptor: int
    pid: int
    started_us: int

    def announce(self, url: str) -> None:
        """Says in the lock file who holds it and where it listens."""
        text = json.dumps({"pid": self.pid, "url": url, "started_us": self.started_us}).encode()
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text, 0)
