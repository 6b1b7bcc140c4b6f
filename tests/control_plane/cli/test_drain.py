"""`stoker drain FUNCTION|SLOT`: what is in flight is parked, the command says how far it is, and undoes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from control_plane.client import Client, Endpoint
from tests.control_plane.cli.conftest import Stoker
from tests.support.service import Service

TOKENS = 120
BODY = {"model": "drainable", "prompt": "hello", "max_tokens": TOKENS, "seed": 3}


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self.stream = Client(Endpoint(service.url, service.key)).stream("/v1/completions", BODY)
        self.places: list[int] = []
        self.text = ""
        self.error: Exception | None = None
        self._moved = threading.Condition()
        self.start()

    def run(self) -> None:
        try:
            for event in self.stream:
                with self._moved:
                    self.places.append(event.seq)
                    self.text += event.text()
                    self._moved.notify_all()
        except Exception as error:
            self.error = error

    def wait(self, places: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: len(self.places) >= places, 60), self.error

    def finish(self) -> str:
        self.join(60)
        assert not self.is_alive() and self.error is None, self.error
        assert self.places == list(range(1, TOKENS + 1))
        return self.text


@pytest.fixture(scope="module")
def whole(service: Service, model: str) -> str:
    service.deploy("drainable", model, engine="stub", scaling={"keep_alive": 30})
    return str(service.call("POST", "/v1/completions", BODY)["choices"][0]["text"])


def why(service: Service, reader: Reader) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service.call("GET", f"/api/v1/why/{reader.stream.request_id}")["attempts"]
    return found


@pytest.mark.parametrize("name", [lambda slot: "drainable", lambda slot: slot], ids=["function", "slot"])
def test_what_is_drained_is_parked_and_goes_on_when_it_is_resumed(
    service: Service, stoker: Stoker, whole: str, name: Callable[[str], str]
) -> None:
    (slot,) = (row["slot_id"] for row in service.call("GET", "/api/v1/slots")["data"])
    what = name(slot)
    kind = "slot" if what == slot else "function"
    reader = Reader(service)
    reader.wait(20)
    said = stoker("drain", what, "--reason", "new cable")
    assert said.status == 0, said.err
    waits = "; 1 requests wait until it is resumed" if kind == "function" else ""
    assert said.out == f"{kind} {what} is drained{waits}. Undo: stoker drain {what} --resume\n"
    assert service.replicas() == []
    assert len(reader.places) < TOKENS
    again = stoker("drain", what, "--json").json
    assert (again["kind"], again["drained"], again["in_flight"], again["replicas"]) == (kind, True, 0, 0)
    assert stoker("drain", what, "--resume").out == f"{kind} {what} takes work again\n"
    assert reader.finish() == whole
    attempts = why(service, reader)
    assert [attempt["epoch"] for attempt in attempts] == [1, 2]
    assert attempts[0]["reason"].startswith("parked after token ")
    assert stoker("drain", what, "--resume", "--json").json["drained"] is False


def test_a_drain_that_is_not_waited_for_says_what_is_left(service: Service, stoker: Stoker, whole: str) -> None:
    reader = Reader(service)
    reader.wait(5)
    try:
        said = stoker("drain", "drainable", "--wait", "0")
        assert said.status == 0, said.err
        assert said.out.startswith("function drainable is ")
    finally:
        stoker("drain", "drainable", "--resume")
    assert reader.finish() == whole


def test_what_is_neither_function_nor_slot_is_said(stoker: Stoker, service: Service) -> None:
    said = stoker("drain", "nothing")
    assert said.status == 1
    assert "there is no function and no slot nothing" in said.err
    assert "stoker ps" in said.err
