"""Who is there to be hit: processes of a service under fire, and what signals do to them.

Limits: a pid that was read may be another's by the time it is hit; nobody is hit twice for that.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.chaos.checks import Damaged
from tests.chaos.schedule import Fault
from tests.chaos.site import Site
from tests.support.service import HttpError, Service

VICTIM_WITHIN_S = 20.0


@dataclass(slots=True)
class Done:
    """A fault as it was carried out."""

    fault: Fault
    hit: str = ""
    """What was hit; empty: nothing was there to be hit."""
    at_tokens: int = 0
    damaged: list[Damaged] = field(default_factory=list)
    took_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.fault.number:4} at {self.at_tokens:6} {self.fault.name}: {self.hit or 'nothing was there'}"


class Victims:
    """The processes of one function's service."""

    def __init__(self, place: Site, function: str) -> None:
        self._place = place
        self._function = function

    def replicas(self) -> list[dict[str, Any]]:
        """Those of the function that have a process, oldest first; waited for, as one may be starting."""
        deadline_s = time.monotonic() + VICTIM_WITHIN_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(HttpError, OSError):
                found = [r for r in self._place.replicas() if r["pid"] and r["function"] == self._function]
                if found:
                    return sorted(found, key=lambda row: row["created_us"])
            time.sleep(0.05)
        return []

    def replica(self, draw: int) -> dict[str, Any] | None:
        found = self.replicas()
        return found[draw % len(found)] if found else None

    def gateway(self, draw: int) -> Service:
        return self._place.gateways[draw % len(self._place.gateways)]

    def pid(self, whom: str, draw: int) -> int:
        """0: there is none."""
        if whom == "replica":
            row = self.replica(draw)
            return row["pid"] if row else 0
        if whom == "agent":
            return self.gateway(draw).agent_pid() or 0
        process = self.gateway(draw).process
        return process.pid if process is not None and process.poll() is None else 0

    def kill(self, whom: Sequence[str], draw: int) -> list[str]:
        """What was hit. A gateway that was is to be started again."""
        pids = {each: self.pid(each, draw) for each in whom}
        return [f"{each} {pid}" for each, pid in pids.items() if pid and send_signal(pid, signal.SIGKILL)]

    def kill_gateways(self) -> None:
        for service in self._place.gateways:
            service.kill("gateway")

    def start_gateways(self) -> None:
        """Those that are dead. Nobody waits for them but the clients: the next fault may meet one that is starting."""
        for service in self._place.gateways:
            if service.process is not None and service.process.poll() is not None:
                service.launch()


@contextlib.contextmanager
def files_cannot_grow(pids: Sequence[int]) -> Iterator[None]:
    """Of these processes, and of what they start meanwhile, which has the limit from them."""
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
        born = [(child, limits) for pid, limits in before.items() for child in descendants(pid) - before.keys()]
        for pid, limits in born:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def send_signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def runs(pid: int) -> bool:
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
