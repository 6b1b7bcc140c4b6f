"""Two `stoker up` on one PostgreSQL, with two slots: whichever process is killed, nothing is lost and nothing is said
twice. The stub engine stands for the model."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.client import Client, Endpoint
from tests.support.checkpoints import make_tiny_llama
from tests.support.postgres import PostgresServer
from tests.support.service import Service

pytestmark = pytest.mark.e2e

TOKENS = 150
PATH = "/v1/completions"
LEASE_S = 3.0
BODY = {"model": "stub", "prompt": "hello", "max_tokens": TOKENS, "seed": 11}


class Reader(threading.Thread):
    """Reads a stream with the client that goes on by itself, at whichever gateway answers."""

    def __init__(self, services: list[Service]) -> None:
        super().__init__(daemon=True)
        client = Client([Endpoint(service.url, service.key) for service in services], give_up_s=60)
        self.stream = client.stream(PATH, BODY)
        self.places: list[int] = []
        self.text = ""
        self.error: Exception | None = None
        self.moved = threading.Condition()
        self.start()

    def run(self) -> None:
        try:
            for event in self.stream:
                with self.moved:
                    self.places.append(event.seq)
                    self.text += event.text()
                    self.moved.notify_all()
        except Exception as error:
            self.error = error
        with self.moved:
            self.moved.notify_all()

    def wait(self, places: int) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: len(self.places) >= places or not self.is_alive(), 60)
        assert len(self.places) >= places, self.error

    def finish(self) -> None:
        self.join(90)
        assert not self.is_alive()
        assert self.error is None, self.error
        assert self.places == list(range(1, TOKENS + 1))


@pytest.fixture(scope="module")
def pair(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    folder = tmp_path_factory.mktemp("pair")
    checkpoint = make_tiny_llama(folder / "tiny")
    with postgres.database() as url:
        env = {"STOKER_STUB_TOKEN_S": "0.02", "STOKER_LEASE_S": str(LEASE_S), "STOKER_DATABASE": url}
        env["STOKER_STORE"] = (folder / "objects").as_uri()
        services = [Service(folder / name, env=env, args=("--slots", "1")) for name in ("one", "two")]
        try:
            for service in services:
                service.start()
            scaling = {"keep_alive": 5, "max_replicas": 2, "target_concurrency": 2, "max_concurrency": 2}
            services[0].deploy("stub", f"file://{checkpoint}", engine="stub", scaling=scaling)
            services[1].wait_imported("stub")
            yield services
        finally:
            for service in services:
                service.close()


@pytest.fixture(scope="module")
def whole(pair: list[Service]) -> str:
    text: str = pair[1].call("POST", PATH, BODY)["choices"][0]["text"]
    return text


def eventually(look: Any, within_s: float = 30.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_both_gateways_know_both_slots_and_all_replicas(pair: list[Service], whole: str) -> None:
    readers = [Reader([pair[number % 2]]) for number in range(4)]
    for reader in readers:
        reader.wait(3)
    eventually(lambda: len(pair[0].replicas()) == 2)
    for service in pair:
        slots = service.call("GET", "/api/v1/slots")["data"]
        assert len(slots) == 2
        # Where there is more to start from may be the same slot for both.
        assert sum(len(slot["replicas"]) for slot in slots) == 2
        on_slots = {replica["replica_id"]: replica["slot_id"] for replica in service.replicas()}
        assert on_slots == {replica["replica_id"]: replica["slot_id"] for replica in pair[0].replicas()}
    for reader in readers:
        reader.finish()
        assert reader.text == whole
        assert reader.stream.resumes == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_gateway_killed_in_mid_stream_is_taken_over(pair: list[Service], whole: str, victim: int) -> None:
    readers = [Reader([pair[victim], pair[1 - victim]]) for _ in range(2)]
    for reader in readers:
        reader.wait(10)
    pids = {replica["pid"] for replica in pair[victim].replicas()}
    assert pair[victim].kill("gateway")
    for reader in readers:
        reader.finish()
        assert reader.text == whole
        assert reader.stream.resumes >= 1
        # The replica that ran it was attached to: nothing was computed twice.
        attempts = pair[1 - victim].call("GET", f"/api/v1/why/{reader.stream.request_id}")["attempts"]
        assert len(attempts) == 1
    assert pids <= {replica["pid"] for replica in pair[1 - victim].replicas(live=False)}
    pair[victim].start()
    eventually(lambda: len(pair[victim].call("GET", "/api/v1/slots")["data"]) == 2)


def test_a_gateway_that_was_stopped_for_a_while_neither_writes_nor_breaks_its_readers(
    pair: list[Service], whole: str
) -> None:
    process = pair[1].process
    assert process is not None
    reader = Reader([pair[1]])
    reader.wait(10)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        request_id = reader.stream.request_id
        whole_there = Client(Endpoint(pair[0].url, pair[0].key)).resume(PATH, str(request_id), 0)
        assert "".join(event.text() for event in whole_there) == whole
    finally:
        os.kill(process.pid, signal.SIGCONT)
    reader.finish()
    assert reader.text == whole


@pytest.mark.parametrize("victim", [0, 1])
def test_an_agent_killed_in_mid_stream_loses_nothing(pair: list[Service], whole: str, victim: int) -> None:
    readers = [Reader([pair[number % 2]]) for number in range(4)]
    for reader in readers:
        reader.wait(10)
    assert pair[victim].kill("agent")
    for reader in readers:
        reader.finish()
        assert reader.text == whole
    for service in pair:
        eventually(lambda service=service: len(service.call("GET", "/api/v1/slots")["data"]) == 2)


def test_several_slots_of_one_gateway(tmp_path: Path) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny")
    env = {"STOKER_STUB_TOKEN_S": "0.02"}
    with Service(tmp_path / "data", env=env, args=("--slots", "2")) as service:
        scaling = {"max_replicas": 2, "target_concurrency": 1, "max_concurrency": 1}
        service.deploy("stub", f"file://{checkpoint}", engine="stub", scaling=scaling)
        eventually(lambda: len(service.call("GET", "/api/v1/slots")["data"]) == 2)
        readers = [Reader([service]) for _ in range(2)]
        for reader in readers:
            reader.wait(5)
        assert {replica["slot_id"] for replica in service.replicas()} == {"slot-0", "slot-1"}
        pid = service.agent_pid(1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for reader in readers:
            reader.finish()
        assert readers[0].text == readers[1].text
