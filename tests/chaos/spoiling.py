"""Stored KV that is not what the journal says it is: objects damaged or swapped, records forged.

What is hit belongs to requests under way, whose replica is killed then: whoever resumes them reads it. `Damaged` says
what must not be used. Limits: swaps for those of another tenant, dtype and revision need `twins`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from function_runtime.protocol import KvChunk
from tests.chaos.books import StoredKv
from tests.chaos.checks import Damaged
from tests.chaos.damage import damage
from tests.chaos.schedule import Fault
from tests.chaos.site import Site
from tests.chaos.twins import TwinChunk
from tests.chaos.victims import VICTIM_WITHIN_S, Done, Victims, send_signal

DAMAGE_TRIES = 20
SAID_S = 0.15
"""In which what a process said before it was stopped is read and committed, mostly."""
SAID_AT_LAST_S = 3.0
"""In which it is, where a gateway or the database lags."""


class Spoiler:
    def __init__(self, place: Site, function: str, twins: Sequence[TwinChunk], victims: Victims) -> None:
        self._place = place
        self._function = function
        self._twins = twins
        self._whom = victims

    def _live_kv(self) -> dict[str, list[StoredKv]]:
        """By replica that works on it: the stored KV of unfinished requests; waited for."""
        found: dict[str, list[StoredKv]] = {}
        deadline_s = time.monotonic() + VICTIM_WITHIN_S
        while time.monotonic() < deadline_s and not found:
            for row in self._place.books.live_kv(self._function):
                if row.replica_id and row.chunks:
                    found.setdefault(row.replica_id, []).append(row)
            if not found:
                time.sleep(0.02)
        return found

    def _victims(self, draw: int) -> tuple[dict[str, Any], list[StoredKv]] | None:
        """A replica, and the KV that what it runs would be resumed from."""
        found = self._live_kv()
        rows = [row for row in self._whom.replicas() if row["replica_id"] in found]
        if not rows:
            return None
        row = rows[draw % len(rows)]
        return row, found[row["replica_id"]]

    def damage_object(self, how: str, done: Done) -> None:
        """A pack is damaged, then the replica whose requests lie in it is killed: whoever resumes them reads it."""
        draw, (how, _, of) = done.fault.draw, how.partition(": ")
        for _ in range(DAMAGE_TRIES):
            victims = self._victims(draw)
            if victims is None:
                return
            replica, rows = victims
            # It says nothing from here on; what it has said is in the journal a moment later.
            send_signal(replica["pid"], signal.SIGSTOP)
            time.sleep(SAID_S)
            rows = [row for row in self._place.books.live_kv(self._function) if row.replica_id == replica["replica_id"]]
            packs = sorted({chunk.pack for row in rows for chunk in row.chunks})
            spoiled = None
            if packs:
                pack = packs[draw % len(packs)]
                # A request that ended meanwhile has taken its packs with it.
                other = self._other_pack(of, pack, draw) if of else b""
                spoiled = damage(self._place.objects, pack, how, draw >> 8, other)
            if spoiled is None:
                send_signal(replica["pid"], signal.SIGCONT)
                continue
            send_signal(replica["pid"], signal.SIGKILL)
            done.damaged = list(
                self._damaged(
                    done.fault,
                    rows,
                    lambda _, c: c.pack == pack and spoiled.spoils(c.offset, c.nbytes),  # noqa: B023
                    self._written_late(rows),
                )
            )
            done.hit = f"{pack[-12:]} ({len(done.damaged)} chunks), replica {replica['replica_id']}"
            return

    def _other_pack(self, of: str, pack: str, draw: int) -> bytes:
        if of != "request":
            twins = [twin for twin in self._twins if twin.of == of]
            return twins[draw % len(twins)].pack if twins else b"nothing of the kind"
        for other in self._place.objects.names("kv/packs/"):
            if other != pack and (content := self._place.objects.get(other)) is not None:
                return content
        return b"no other pack was there"

    def _written_late(self, rows: Sequence[StoredKv]) -> list[StoredKv]:
        """What is recorded of these requests until others have them: a chunk that was written anew, and of which the
        journal learns after the damage, is loaded in the damaged one's place."""
        epochs = {row.request_id: row.epoch for row in rows}
        late: dict[tuple[str, int], StoredKv] = {}
        deadline_s = time.monotonic() + SAID_AT_LAST_S
        while time.monotonic() < deadline_s:
            now = [row for row in self._place.books.live_kv(self._function) if row.request_id in epochs]
            late.update({(row.request_id, row.number): row for row in now})
            if all(row.epoch > epochs[row.request_id] for row in now):
                break
            time.sleep(0.02)
        return list(late.values())

    def _damaged(
        self,
        fault: Fault,
        rows: Sequence[StoredKv],
        is_hit: Callable[[StoredKv, KvChunk], bool],
        late: Sequence[StoredKv] = (),
    ) -> Iterator[Damaged]:
        """Of all records of these requests (`rows`), those that are hit. `late`: what else was recorded by then."""
        whole = [(row.request_id, c) for row in (*rows, *late) for c in row.chunks if not is_hit(row, c)]
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

    def forge_record(self, of: str, done: Done) -> None:
        """While no gateway lives, the journal's record of a chunk is made to name another's (tenant, dtype,
        revision), whole and with its true digest: only what the chunk says of itself can give it away."""
        victims = self._victims(done.fault.draw)
        if victims is None:
            return
        replica, rows = victims
        self._whom.kill_gateways()
        send_signal(replica["pid"], signal.SIGKILL)
        try:
            rows = [row for row in self._place.books.live_kv(self._function) if row.replica_id == replica["replica_id"]]
            forged: list[tuple[StoredKv, KvChunk]] = []
            for row in rows:
                mine = next((chunk for chunk in row.chunks if chunk.choice == 0 and chunk.start == 0), None)
                fitting = [t for t in self._twins if t.of == of and mine is not None and t.chunk.end == mine.end]
                if mine is None or not fitting:
                    continue
                twin = fitting[done.fault.draw % len(fitting)]
                self._place.objects.put(twin.chunk.pack, twin.pack)
                false = msgspec.structs.replace(twin.chunk, chain=mine.chain, parent=mine.parent)
                self._place.books.forge(row, tuple(false if chunk is mine else chunk for chunk in row.chunks))
                forged.append((row, mine))
            done.damaged = list(self._damaged(done.fault, rows, lambda row, chunk: (row, chunk) in forged))
            if done.damaged:
                done.hit = f"{len(done.damaged)} records, replica {replica['replica_id']}"
        finally:
            self._whom.start_gateways()
