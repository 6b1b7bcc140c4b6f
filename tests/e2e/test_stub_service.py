"""The whole service as processes, and what it promises when they are killed. The stub engine stands for the model.

All of it twice: with the slot on this machine, and with slots that are pods.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import stub_pods, stub_service
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import HttpError, Service

pytestmark = pytest.mark.e2e

TOKENS = 60
PATH = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "stub", "prompt": "hello", "max_tokens": TOKENS, "seed": 11, **fields}


class Reader(threading.Thread):
    """Reads a stream to its end, or until the connection breaks."""

    def __init__(self, service: Service, path: str = PATH, sent: dict[str, Any] | None = None, **headers: str) -> None:
        super().__init__(daemon=True)
        self.places: list[int] = []
        self.texts: dict[int, str] = {}
        self.request_id = ""
        self.done = False
        self.error: Exception | None = None
        self.moved = threading.Condition()
        self._open = lambda: service.open("POST" if sent else "GET", path, sent, **headers)
        self.start()

    def run(self) -> None:
        try:
            with self._open() as response:
                self.request_id = response.headers["x-request-id"]
                place = 0
                for raw in response:
                    line = raw.strip()
                    if line.startswith(b"id:"):
                        place = int(line[3:])
                    elif line == b"data: [DONE]":
                        self.done = True
                    elif line.startswith(b"data:"):
                        self._take(place, json.loads(line[5:]))
        except Exception as error:
            self.error = error
        with self.moved:
            self.moved.notify_all()

    def _take(self, place: int, event: Any) -> None:
        with self.moved:
            for choice in event.get("choices", ()):
                self.places.append(place)
                self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
            self.moved.notify_all()

    def wait(self, places: int) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: len(self.places) >= places or not self.is_alive(), 60)
        assert len(self.places) >= places, self.error

    def finish(self) -> None:
        self.join(60)
        assert not self.is_alive()


@pytest.fixture(scope="module", params=["machine", "pods"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("stub")
    with stub_service(folder) if request.param == "machine" else stub_pods(folder) as running:
        yield running


@pytest.fixture(scope="module")
def whole(service: Service) -> dict[int, dict[int, str]]:
    """The undisturbed answers, by n."""
    answers = {}
    for n in (1, 2):
        choices = service.call("POST", PATH, body(n=n))["choices"]
        answers[n] = {choice["index"]: choice["text"] for choice in choices}
    return answers


def test_a_burst_wakes_it_once_and_it_goes_back_to_zero(service: Service) -> None:
    service.wait_zero()
    before = len(service.call("GET", "/api/v1/replicas?all=1")["data"])
    readers = [Reader(service, sent=body(stream=True, max_tokens=5)) for _ in range(10)]
    for reader in readers:
        reader.finish()
        assert reader.done, reader.error
    replicas = service.call("GET", "/api/v1/replicas?all=1")["data"]
    assert len(replicas) == before + 1
    assert service.runs(replicas[-1])
    service.wait_zero()
    assert not service.runs(replicas[-1])
    ended = service.call("GET", "/api/v1/replicas?all=1")["data"][-1]
    assert (ended["state"], ended["exit"]) == ("ended", "exit 0")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("victim", ["replica", "agent"])
def test_a_kill_in_mid_stream_loses_and_doubles_nothing(
    service: Service, whole: dict[int, dict[int, str]], victim: str, n: int
) -> None:
    reader = Reader(service, sent=body(stream=True, n=n))
    reader.wait(10)
    assert service.kill(victim)
    reader.finish()
    assert reader.done, reader.error
    assert reader.places == list(range(1, TOKENS * n + 1))
    assert reader.texts == whole[n]
    why = service.call("GET", f"/api/v1/why/{reader.request_id}")
    assert len(why["attempts"]) == 2
    assert why["attempts"][1]["after_seq"] >= 10


@pytest.mark.parametrize("also", [None, "replica", "agent"])
def test_after_a_kill_of_the_control_plane_a_reader_gets_the_rest_and_only_the_rest(
    service: Service, whole: dict[int, dict[int, str]], also: str | None
) -> None:
    reader = Reader(service, sent=body(stream=True))
    reader.wait(10)
    replica = service.replicas()[0]
    service.kill("gateway")
    reader.finish()
    assert not reader.done
    if also == "replica":
        service.kill_replica(replica)
    elif also == "agent":
        service.kill("agent")
    service.start()
    rest = Reader(service, f"{PATH}/{reader.request_id}/stream", Last_Event_ID=str(reader.places[-1]))
    rest.finish()
    assert rest.done, rest.error
    assert reader.places + rest.places == list(range(1, TOKENS + 1))
    assert reader.texts[0] + rest.texts.get(0, "") == whole[1][0]
    if also is None:
        assert [row["pid"] for row in service.replicas()] == [replica["pid"]]


def test_a_drain_lets_streams_finish_and_refuses_new_requests(
    service: Service, whole: dict[int, dict[int, str]]
) -> None:
    reader = Reader(service, sent=body(stream=True))
    reader.wait(5)
    assert service.process is not None
    service.process.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + 5
    refused = None
    while refused is None and time.monotonic() < deadline_s:
        try:
            service.call("GET", "/health/ready", timeout_s=2)
        except HttpError:
            try:
                service.call("POST", PATH, body(max_tokens=1))
            except HttpError as error:
                refused = error
    assert refused is not None
    assert refused.status == 503
    assert refused.headers["Retry-After"]
    reader.finish()
    assert reader.done
    assert reader.texts == whole[1]
    assert service.process.wait(10) == 0
    service.start()


def test_the_control_plane_needs_no_torch(service: Service) -> None:
    assert service.process is not None
    maps = Path(f"/proc/{service.process.pid}/maps").read_text()
    assert "torch" not in maps


def test_what_ended_is_accounted_for(service: Service) -> None:
    service.wait_zero()
    why = service.call("GET", "/api/v1/why/stub")
    states = {request["state"] for request in why["requests"]}
    assert states == {"done"}
    for replica in service.call("GET", "/api/v1/replicas?all=1")["data"]:
        ledger = service.call("GET", f"/api/v1/why/{replica['replica_id']}")["ledger"]
        held_us = replica["time"]["held_us"]
        assert sum(row["device_us"] for row in ledger) == held_us, replica


def test_a_truncated_checkpoint_is_told_to_whoever_asks_and_mended_by_deploying_again(
    service: Service, tmp_path: Path
) -> None:
    checkpoint = make_tiny_llama(tmp_path / "broken")
    weights = next(checkpoint.glob("*.safetensors"))
    whole_bytes = weights.read_bytes()
    weights.write_bytes(whole_bytes[: len(whole_bytes) // 2])
    with pytest.raises(RuntimeError, match="import of broken failed"):
        service.deploy("broken", f"file://{checkpoint}", engine="stub")
    for stream in (False, True):
        with pytest.raises(HttpError) as refused:
            service.call("POST", PATH, body(model="broken", stream=stream))
        assert refused.value.status == 503
        error = json.loads(refused.value.body)["error"]
        assert error["code"] == "model_unusable"
        assert weights.name in error["message"]
    weights.write_bytes(whole_bytes)
    service.deploy("broken", f"file://{checkpoint}", engine="stub")
    assert service.call("POST", PATH, body(model="broken", max_tokens=2))["usage"]["completion_tokens"] == 2
