"""kill -9 of the process that writes: what it had granted is there, and nothing is torn."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane.database import Database
from control_plane.journal import Journal
from control_plane.ledger import Ledger
from tests.control_plane.storage.builders import query

WRITER = """
import asyncio, sys
from pathlib import Path
from control_plane.database import Database
from control_plane.journal import Journal
from tests.control_plane.storage.builders import done, events, new_request, used

async def main():
    database = await Database.open(sys.argv[1])
    journal = Journal(database, "gw-dead")

    async def stream(name):
        for number in range(1000):
            request_id = f"chatcmpl-{name}-{number}"
            await journal.accept(new_request(id=request_id, durability=sys.argv[2]))
            print("accepted", request_id, 0, flush=True)
            epoch = await journal.assign(request_id, "rep-1", "slot-0")
            for first in range(1, 20, 3):
                await journal.append(request_id, epoch, first, events(first, 3)[0], 3, used(1, first), 0)
                print("written", request_id, first + 2, flush=True)
            await journal.finish(request_id, epoch, done(21, device=used(1, 20)))
            print("done", request_id, 21, flush=True)

    await asyncio.gather(*(stream(f"s{number}") for number in range(4)))

asyncio.run(main())
"""


def granted_by_a_writer_that_is_killed(where: Path | str, durability: str, lines: int) -> dict[str, tuple[str, int]]:
    """Request id -> the last thing it was granted."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(where), durability],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert writer.stdout is not None
    read = [writer.stdout.readline() for _ in range(lines)]
    writer.send_signal(signal.SIGKILL)
    # Lines that were on their way count too: they were printed after the grant.
    read += writer.stdout.read().splitlines(keepends=True)
    writer.stdout.close()
    writer.wait()
    granted: dict[str, tuple[str, int]] = {}
    for line in read:
        if line.endswith("\n"):
            what, request_id, seq = line.split()
            granted[request_id] = (what, int(seq))
    return granted


@pytest.mark.parametrize(("durability", "lines"), [("process", 30), ("process", 101), ("host", 57)])
async def test_what_was_granted_before_a_kill_is_there_after_it(where: Path | str, durability: str, lines: int) -> None:
    granted = granted_by_a_writer_that_is_killed(where, durability, lines)
    assert len(granted) >= 4
    database = await Database.open(where)
    journal = Journal(database, "gw-heir")
    adopted = {record.id: record for record in await journal.adopt()}
    for request_id, (what, seq) in granted.items():
        record = await journal.get(request_id)
        assert record is not None
        log = [event.token_id for event in await journal.log(request_id)]
        assert log == list(range(1, record.last_seq + 1)) and record.last_seq >= seq
        ended = what == "done"
        assert record.state.ended or request_id in adopted
        assert not ended or record.state.ended
        charged = sum(row.device_us for row in await Ledger(database).of_request(request_id))
        assert charged == (21 if record.state.ended else 0)
    states = await database.read(query("SELECT COUNT(*) FROM requests WHERE state NOT IN ('queued', 'running')"))
    rows = await database.read(query("SELECT COUNT(*) FROM ledger WHERE stage = 'total'"))
    assert states == rows
    if isinstance(where, Path):
        assert await database.read(query("PRAGMA integrity_check")) == [("ok",)]
    await database.close()
