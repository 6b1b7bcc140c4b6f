"""`stoker down`: the service of a data directory ends, then its agents with their replicas.

The service is asked to drain first, so that what replicas cost is booked before they go. Ends are awaited on pidfds,
not polled; a process that outstays its grace is asked once more, then killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import urllib.request
from pathlib import Path
from typing import Any, Final

from control_plane.backends.home import pool_directory
from control_plane.cli.data_dir import DataDir
from control_plane.cli.failure import CommandError
from control_plane.cli.output import Advance, print_json, progress

INSIST_S: Final = 5.0
"""What a process that was told twice gets before it is killed."""
CALL_S: Final = 5.0


def end_service(data_dir: Path | None, grace_s: float, as_json: bool) -> None:
    place = DataDir.at(data_dir)
    with progress("ending", quiet=as_json) as advance:
        ended = end_all(place, grace_s, advance)
    if ended["control_plane_pid"] is None and not ended["agent_pids"]:
        raise CommandError(
            f"nothing runs on {place.path}",
            "name the directory that `stoker up` was given with --data-dir",
            code="not_running",
        )
    if as_json:
        print_json(ended)
        return
    agents = len(ended["agent_pids"])
    print(f"ended: {'control plane, ' if ended['control_plane_pid'] else ''}{agents} agent{'s' * (agents != 1)}")


def end_all(place: DataDir, grace_s: float, advance: Advance = lambda stage, done, total: None) -> dict[str, Any]:
    """Ends what runs on a data directory and gives its shared memory back; says what that was."""
    holder = place.holder()
    if holder is not None:
        advance("control plane (running requests finish)", 0, 2)
        end_process(holder.pid, grace_s)
    told = {int(agent["pid"]): agent for agent in place.agents()}
    # An agent that has only just been started has not yet said how to reach it: its command line says whose it is.
    pids = sorted({pid for pid in told if is_alive(pid)} | set(agent_pids(place)))
    for pid in pids:
        advance("agents and replicas", 1, 2)
        if pid in told:
            end_agent(told[pid], grace_s)
        else:
            end_process(pid, grace_s)
    for slot in sorted((place.path / "slots").glob("*")):
        shutil.rmtree(pool_directory(place.path, slot, f"slot-{slot.name}"), ignore_errors=True)
    return {
        "data_dir": str(place.path),
        "control_plane_pid": holder.pid if holder else None,
        "agent_pids": pids,
    }


def agent_pids(place: DataDir) -> list[int]:
    """Living agents whose slot lies in the data directory."""
    slots = os.fsencode(str(place.path / "slots")) + b"/"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"function_runtime.agent" in words and any(word.startswith(slots) for word in words):
                    found.append(int(entry.name))
    return found


def end_process(pid: int, grace_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        watch = os.pidfd_open(pid)
        try:
            for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGTERM, INSIST_S), (signal.SIGKILL, None)):
                signal.pidfd_send_signal(watch, number)
                if await_end(watch, patience_s):
                    return
        finally:
            os.close(watch)


def end_agent(agent: dict[str, Any], grace_s: float) -> None:
    """Asks the agent to shut down; what does not answer is ended as a process, and its replicas with it."""
    pid = int(agent["pid"])
    with contextlib.suppress(ProcessLookupError):
        watch = os.pidfd_open(pid)
        try:
            asked = urllib.request.Request(
                f"http://{agent['host']}:{agent['port']}/v1/shutdown",
                json.dumps({"grace_s": grace_s}).encode(),
                {"Authorization": f"Bearer {agent['token']}", "Content-Type": "application/json"},
                method="POST",
            )
            with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=CALL_S):
                pass
            if not await_end(watch, grace_s + INSIST_S):
                signal.pidfd_send_signal(watch, signal.SIGKILL)
                await_end(watch, None)
        finally:
            os.close(watch)


def await_end(watch: int, patience_s: float | None) -> bool:
    """Whether the process behind a pidfd ended in time."""
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    return bool(poller.poll(None if patience_s is None else patience_s * 1000))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0
