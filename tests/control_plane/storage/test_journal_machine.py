"""Random lives of requests over several gateways, each with a connection of its own to one file.

The model knows who owns what; the journal must agree after every step: the log has no gap, no double, no change;
accepted = done + cancelled + failed + refused + unfinished; every attempt's device time is charged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from control_plane.database import Database
from control_plane.errors import Fenced, StorageUnavailable
from control_plane.journal import Journal, Outcome, RequestState
from function_runtime.protocol import DeviceTime
from tests.control_plane.storage.builders import events, new_request, query
from tests.support.postgres import PostgresServer

ENDS = (RequestState.DONE, RequestState.CANCELLED, RequestState.FAILED, RequestState.REFUSED)
GATEWAYS = 3
LIVE_MAX = 3
picks = st.integers(0, 10_000)
authors = st.sampled_from([None] * 6 + list(range(GATEWAYS)))
"""Which gateway writes; None is the owner, so that most writes are the ones that should succeed."""
staleness = st.sampled_from([0] * 4 + [1])


@dataclass
class Modelled:
    id: str
    owner: int
    epoch: int = 0
    state: RequestState = RequestState.QUEUED
    log: int = 0
    device: DeviceTime = field(default_factory=DeviceTime)
    charged_us: int = 0

    @property
    def live(self) -> bool:
        return not self.state.ended

    def close_attempt(self) -> None:
        if self.state is RequestState.RUNNING:
            self.charged_us += self.device.prefill_us + self.device.decode_us
        self.device = DeviceTime()


class JournalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Modelled] = []
        self.databases: list[Database] = []
        self.journals: list[Journal] = []

    @contextlib.contextmanager
    def place(self) -> Iterator[Path | str]:
        """A fresh database."""
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
            yield Path(directory) / "stoker.db"

    @initialize()
    def start(self) -> None:
        self.ending = contextlib.ExitStack()
        where = self.ending.enter_context(self.place())
        self.runner = asyncio.Runner()
        for number in range(GATEWAYS):
            database = self.runner.run(Database.open(where))
            self.databases.append(database)
            self.journals.append(Journal(database, f"gw-{number}"))

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            for database in self.databases:
                self.runner.run(database.close())
            self.runner.close()
            self.ending.close()

    def pick(self, number: int) -> Modelled | None:
        """Mostly one that lives; the model's ended ones now and then."""
        live = [request for request in self.requests if request.live]
        among = self.requests if number % 8 == 0 or not live else live
        return among[number // 8 % len(among)] if among else None

    @precondition(lambda self: sum(request.live for request in self.requests) < LIVE_MAX)
    @rule(gateway=st.integers(0, GATEWAYS - 1), durability=st.sampled_from(["process", "host"]))
    def accept(self, gateway: int, durability: str) -> None:
        new = new_request(durability=durability)
        accepted = self.runner.run(self.journals[gateway].accept(new))
        assert not accepted.attached
        self.requests.append(Modelled(new.id, gateway))

    @rule(author=authors, number=picks)
    def assign(self, author: int | None, number: int) -> None:
        request = self.pick(number)
        if request is None:
            return
        gateway = request.owner if author is None else author
        try:
            epoch = self.runner.run(self.journals[gateway].assign(request.id, f"rep-{number % 4}", "slot-0"))
        except Fenced:
            assert gateway != request.owner or not request.live
            return
        assert gateway == request.owner and request.live
        request.close_attempt()
        request.epoch += 1
        assert epoch == request.epoch
        request.state = RequestState.RUNNING

    @rule(
        author=authors, number=picks, stale=staleness, shift=st.sampled_from([0, 0, 1, -1]),
        count=st.integers(1, 4), device_us=st.integers(0, 1000),
    )  # fmt: skip
    def append(self, author: int | None, number: int, stale: int, shift: int, count: int, device_us: int) -> None:
        request = self.pick(number)
        if request is None:
            return
        gateway = request.owner if author is None else author
        epoch, first = request.epoch - stale, request.log + 1 + shift
        if first < 1:
            return
        device = DeviceTime(request.device.prefill_us + 1, request.device.decode_us + device_us)
        written = self.runner.run(_await(self.journals[gateway], request.id, epoch, first, count, device))
        ours = gateway == request.owner and not stale
        if ours and shift == 0 and request.state is RequestState.RUNNING:
            assert written
            request.log += count
            request.device = device
        else:
            assert written == (ours and first + count - 1 <= request.log)

    @rule(number=picks, count=st.integers(1, 3))
    def race(self, number: int, count: int) -> None:
        """All gateways append the same place at once: at most the owner's is written, once."""
        request = self.pick(number)
        if request is None:
            return
        device = DeviceTime(request.device.prefill_us, request.device.decode_us + 1)

        async def run() -> list[bool]:
            return await asyncio.gather(
                *(
                    _await(journal, request.id, request.epoch, request.log + 1, count, device)
                    for journal in self.journals
                )
            )

        written = self.runner.run(run())
        running = request.state is RequestState.RUNNING
        assert written == [running and gateway == request.owner for gateway in range(GATEWAYS)]
        if running:
            request.log += count
            request.device = device

    @rule(author=authors, number=picks, stale=staleness)
    def lose_the_replica(self, author: int | None, number: int, stale: int) -> None:
        request = self.pick(number)
        if request is None:
            return
        gateway = request.owner if author is None else author
        lost = self.runner.run(self.journals[gateway].requeue(request.id, request.epoch - stale, "replica lost"))
        expected = gateway == request.owner and not stale and request.state is RequestState.RUNNING
        assert lost == expected
        if expected:
            request.close_attempt()
            request.state = RequestState.QUEUED

    @rule(dead=st.integers(0, GATEWAYS - 1), heir=st.integers(0, GATEWAYS - 1))
    def kill_a_gateway(self, dead: int, heir: int) -> None:
        """It is declared dead and another adopts; the dead one does not know and goes on writing."""
        alive = {f"gw-{number}" for number in range(GATEWAYS) if number != dead}
        adopted = self.runner.run(self.journals[heir].adopt(alive))
        if dead != heir:
            for request in self.requests:
                if request.live and request.owner == dead:
                    request.owner = heir
        mine = {request.id for request in self.requests if request.live and request.owner == heir}
        assert {record.id for record in adopted} == mine
        for record in adopted:
            request = next(each for each in self.requests if each.id == record.id)
            assert (record.epoch, record.state, record.last_seq) == (request.epoch, request.state, request.log)

    @rule(
        author=authors, number=picks, stale=staleness, state=st.sampled_from(ENDS),
        missing=st.sampled_from([0, 1]), device_us=st.integers(0, 1000),
    )  # fmt: skip
    def finish(
        self, author: int | None, number: int, stale: int, state: RequestState, missing: int, device_us: int
    ) -> None:
        request = self.pick(number)
        if request is None:
            return
        gateway = request.owner if author is None else author
        device = DeviceTime(request.device.prefill_us, request.device.decode_us + device_us)
        outcome = Outcome(state, last_seq=request.log + missing, device=device)
        ours = gateway == request.owner and not stale
        try:
            written = self.runner.run(self.journals[gateway].finish(request.id, request.epoch - stale, outcome))
        except StorageUnavailable:
            assert ours and request.live and missing
            return
        assert written == ours
        if ours and request.live:
            assert not missing
            if request.state is RequestState.RUNNING:
                request.device = device
            request.close_attempt()
            request.state = state

    @invariant()
    def the_log_has_no_gap_no_double_no_change(self) -> None:
        for request in self.requests:
            log = self.runner.run(self.journals[0].log(request.id))
            assert [(event.token_id, event.text) for event in log] == [
                (seq, f"t{seq}") for seq in range(1, request.log + 1)
            ]

    @invariant()
    def everything_accepted_is_somewhere(self) -> None:
        rows = self.runner.run(self.databases[0].read(query("SELECT state, COUNT(*) FROM requests GROUP BY state")))
        found = dict(rows)
        expected: dict[str, int] = {}
        for request in self.requests:
            expected[request.state.value] = expected.get(request.state.value, 0) + 1
        assert found == expected
        assert sum(found.values()) == len(self.requests)

    @invariant()
    def every_attempt_is_charged_once(self) -> None:
        rows = self.runner.run(
            self.databases[0].read(
                query("SELECT request_id, SUM(device_us) FROM ledger WHERE kind = 'request' GROUP BY request_id")
            )
        )
        charged = dict(rows)
        for request in self.requests:
            assert charged.get(request.id, 0) == request.charged_us


async def _await(journal: Journal, request_id: str, epoch: int, first: int, count: int, device: DeviceTime) -> bool:
    payload, _ = events(first, count)
    return await journal.append(request_id, epoch, first, payload, count, device, 0)


JournalMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestJournalMachine = JournalMachine.TestCase


class PostgresJournalMachine(JournalMachine):
    server: ClassVar[PostgresServer]

    @contextlib.contextmanager
    def place(self) -> Iterator[Path | str]:
        with self.server.database() as url:
            yield url


@pytest.fixture(scope="module")
def given_server(postgres: PostgresServer) -> None:
    PostgresJournalMachine.server = postgres


PostgresJournalMachine.TestCase.settings = settings(
    max_examples=8, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPostgresJournalMachine = pytest.mark.usefixtures("given_server")(PostgresJournalMachine.TestCase)
