"""A slot that is stopped until another has taken over, and then goes on, writes neither tokens nor KV nor usage.

    stopped under a stream -> epoch 2 answers from elsewhere -> everything durable is copied -> the dead goes on

Limits: what it would write is judged once it has been awake for `AWAKE_S`, and again when nothing of it is left.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from control_plane.client import Client, Endpoint
from tests.chaos.books import Books
from tests.chaos.killing import audit
from tests.chaos.readers import Reader
from tests.support.checkpoints import make_tiny_llama
from tests.support.replica_client import wait_for
from tests.support.service import Service

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]
TOKENS = 600
AWAKE_S = 2.0
TAKEN_OVER_WITHIN_S = 45.0
"""A stall shows after twenty seconds; an agent that hangs is killed after more than a minute: not waited for."""
PLACES = frozenset({"log_head", "log_tail", "log_previous"})
"""Where a log lies changes when it is compacted; what it says does not."""
BODY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "data", args=("--slots", "2")) as running:
        running.deploy(
            "tiny",
            f"file://{make_tiny_llama(tmp_path / 'tiny', layers=4, hidden=128, heads=4, kv_heads=2)}",
            scaling={"keep_alive": 60, "max_replicas": 2},
            engine_options={"prefix_cache": False, "threads": 1},
            share_prefixes="none",
        )
        yield running


class Durable:
    """What the journal, the ledger and the object store have about a request."""

    def __init__(self, service: Service, request_id: str) -> None:
        self._data_dir, self._request_id = service.data_dir, request_id
        self._books = Books(service.data_dir / "stoker.db")

    def rows(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with contextlib.closing(sqlite3.connect(self._data_dir / "stoker.db", timeout=20)) as db:
            db.row_factory = sqlite3.Row
            for table, column in (
                ("requests", "id"), ("attempts", "request_id"), ("ledger", "request_id"), ("request_kv", "request_id"),
            ):  # fmt: skip
                rows = db.execute(f"SELECT * FROM {table} WHERE {column} = ?", (self._request_id,))
                found[table] = sorted(repr({n: v for n, v in dict(row).items() if n not in PLACES}) for row in rows)
            log = db.execute(
                "WITH RECURSIVE chain (id, previous) AS (SELECT t.id, t.previous FROM requests r JOIN token_log t "
                "ON t.id = r.log_head WHERE r.id = ? UNION ALL SELECT t.id, t.previous FROM token_log t "
                "JOIN chain c ON t.id = c.previous) SELECT t.payload FROM token_log t JOIN chain c ON c.id = t.id "
                "ORDER BY t.first_seq",
                (self._request_id,),
            )
            found["log"] = [event for (payload,) in log for event in msgspec.msgpack.decode(payload)]
        return found

    def objects(self) -> dict[str, bytes]:
        """Those that are not deleted while one looks: KV of a request that is over goes when its replica gets to it."""
        folder, found = self._data_dir / "objects", dict[str, bytes]()
        for path in sorted(folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    found[str(path.relative_to(folder))] = path.read_bytes()
        return found

    def known_packs(self) -> set[str]:
        return self._books.known_packs()


def agent_of(service: Service, pid: int) -> psutil.Process:
    for path in (service.data_dir / "slots").glob("*/agent.json"):
        agent = psutil.Process(json.loads(path.read_text())["pid"])
        if any(child.pid == pid for child in agent.children(recursive=True)):
            return agent
    raise AssertionError(f"no agent has the process {pid}")


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def log_of(service: Service, replica_id: str) -> str:
    return "".join(path.read_text() for path in (service.data_dir / "slots").glob(f"*/replicas/{replica_id}.log"))


def carry_on_elsewhere(
    service: Service, choose: Callable[[psutil.Process], list[psutil.Process]]
) -> tuple[str, str, psutil.Process]:
    """Stops what `choose` takes of a slot under a stream, checks that another replica ends it, and lets it go on.
    Whatever is written about the request by then is to stay as it is. Gives request, replica, and its process."""
    client = Client(lambda: Endpoint(service.url, service.key), give_up_s=120)
    whole = Reader(client, BODY)
    whole.start()
    whole.join(60)
    assert whole.answer is not None, whole.error
    reader = Reader(client, BODY)
    reader.start()
    with reader.moved:
        assert reader.moved.wait_for(lambda: reader.stream.cursor >= 20, 60)
    request_id = reader.request_id
    (first,) = (row for row in service.replicas() if row["running"])
    zombie = psutil.Process(first["pid"])
    stopped = choose(zombie)
    durable = Durable(service, request_id)
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        reader.join(TAKEN_OVER_WITHIN_S)
        assert reader.answer is not None, reader.error or "nobody took over"
        assert reader.answer.texts == whole.answer.texts
        assert reader.seqs == sorted(set(reader.seqs))
        attempts = service.call("GET", f"/api/v1/why/{request_id}")["attempts"]
        assert [attempt["epoch"] for attempt in attempts] == [1, 2]
        assert attempts[1]["replica_id"] != first["replica_id"]
        wait_for(lambda: durable.rows()["ledger"], what="the outcome")
        before, objects = durable.rows(), durable.objects()
    finally:
        for process in stopped:
            if runs(process):
                process.send_signal(signal.SIGCONT)
    wait_for(lambda: not runs(zombie) or "stood still" in log_of(service, first["replica_id"]), 30, what="waking")
    time.sleep(AWAKE_S)
    assert durable.rows() == before
    new = {name: nbytes for name, nbytes in durable.objects().items() if name not in objects}
    assert set(new) <= durable.known_packs(), "objects that nothing names"
    changed = [name for name, content in durable.objects().items() if objects.get(name, content) != content]
    assert not changed
    return request_id, first["replica_id"], zombie


def end_and_audit(service: Service, request_id: str) -> None:
    before = Durable(service, request_id).rows()
    service.call("DELETE", "/api/v1/functions/tiny")
    service.wait_zero()
    assert Durable(service, request_id).rows() == before
    audit(service.data_dir)
    books = Books(service.data_dir / "stoker.db")
    wait_for(lambda: not books.rows("SELECT 1 FROM replica_accounts WHERE closed_us IS NULL"), what="closed accounts")
    assert books.ledger_faults() == []
    assert books.log_faults() == []


def test_a_replica_that_comes_back_from_the_dead_changes_nothing(service: Service) -> None:
    request_id, replica_id, zombie = carry_on_elsewhere(service, lambda replica: [replica])
    assert not runs(zombie), "its agent lives, and had to end it"
    assert replica_id not in {row["replica_id"] for row in service.replicas()}
    end_and_audit(service, request_id)


def test_a_slot_that_comes_back_from_the_dead_changes_nothing(service: Service) -> None:
    request_id, replica_id, zombie = carry_on_elsewhere(
        service, lambda replica: [agent_of(service, replica.pid), replica]
    )
    wait_for(lambda: not runs(zombie), 30, what="the end of a replica that was given up")
    assert replica_id not in {row["replica_id"] for row in service.replicas()}
    wait_for(lambda: len(service.call("GET", "/api/v1/slots")["data"]) == 2, what="both slots")
    end_and_audit(service, request_id)
