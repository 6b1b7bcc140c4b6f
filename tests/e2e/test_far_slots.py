"""Slots on other machines, by agents that share no folder with the control plane: a call from zero, a death and a
termination in mid-stream, each carried on with KV that went over HTTP."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.collector import Collector, Span
from tests.support.far_slots import FarAgent, FarSlots
from tests.support.replica_client import wait_for
from tests.support.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

TOKENS = 400
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PROMPT = list(range(20, 180))
BODY = {"model": "fn", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True,
        "logprobs": 0}  # fmt: skip


class Town:
    """The service on its machine, and the slots on others."""

    def __init__(self, service: Service, slots: FarSlots, models: Path, collector: Collector) -> None:
        self.service, self.slots, self.collector = service, slots, collector
        self._homes = (service.data_dir, models)

    def where(self) -> tuple[dict[str, Any], FarAgent]:
        """The replica that is ready, and the agent of its slot."""
        row = wait_for(lambda: next((row for row in self.service.replicas() if row["state"] == "ready"), None))
        return row, next(agent for agent in self.slots.agents if agent.slot_id == row["slot_id"])

    def stream(self, act: Callable[[], None] | None = None, **headers: str) -> tuple[str, list[int], str]:
        """Text, places and id of the answer; `act` is called once half of it has come."""
        text, places, request_id = "", list[int](), ""
        for place, event in self.service.events("/v1/completions", BODY, **headers):
            assert "error" not in event, (event, [agent.log() for agent in self.slots.agents])
            request_id = event["id"]
            places.append(place)
            text += "".join(choice["text"] for choice in event["choices"])
            if act is not None and place >= TOKENS // 2:
                act, _ = None, act()
        return text, places, request_id

    def attempts(self, request_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.service.call("GET", f"/api/v1/why/{request_id}")["attempts"]
        return found

    def spans(self, trace: str) -> dict[str, list[Span]]:
        """Those of a trace by name, once its call is over."""
        spans = self.collector.wait(lambda all: any(each.trace == trace and each.kind == 2 for each in all))
        found: dict[str, list[Span]] = {}
        for span in sorted((each for each in spans if each.trace == trace), key=lambda each: each.begin_ns):
            found.setdefault(span.name, []).append(span)
        return found

    def opened_at_home(self) -> set[str]:
        return {name for agent in self.slots.agents for home in self._homes for name in agent.opened_below(home)}


@pytest.fixture
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    models = tmp_path_factory.mktemp("models")
    checkpoint = make_tiny_llama(models / "tiny", layers=4, hidden=128)
    environment = {"STOKER_KV_LINGER_S": "0.01", "STOKER_KV_LOAD": "always"}
    far, hosts = tmp_path_factory.mktemp("far"), ("127.0.0.2", "127.0.0.3")
    with Collector() as collector, FarSlots(far, hosts, "--term-grace-s", "0", env=environment) as slots:
        service = Service(tmp_path_factory.mktemp("home") / "data", args=("--slots", "0", "--warm-workers", "0"))
        service.env |= {**slots.environment, "STOKER_ADVERTISE_URL": service.url}
        service.env |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with service:
            options = {"threads": 1, "kv_bytes": 64 << 20}
            service.deploy("fn", f"file://{checkpoint}", scaling={"keep_alive": 60}, engine_options=options)
            yield Town(service, slots, models, collector)


def test_slots_elsewhere_serve_survive_a_death_and_go_when_they_are_told(town: Town) -> None:
    opened: set[str] = set()
    whole, places, _ = town.stream(lambda: opened.update(town.opened_at_home()))
    assert places == list(range(1, TOKENS + 1))
    row, agent = town.where()
    assert (row["host"], opened) == (agent.host, set())

    def kill() -> None:
        os.kill(town.where()[0]["pid"], signal.SIGKILL)

    text, places, request_id = town.stream(kill, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
    assert (text, places) == (whole, list(range(1, TOKENS + 1)))
    first, second = town.attempts(request_id)
    assert first["reason"].startswith("replica ") and second["exact"]
    assert second["loaded_tokens"] > len(PROMPT), "what was generated before the death was computed again"

    spans = town.spans(TRACE)
    lost, resumed = spans["attempt"]
    assert resumed.links == (lost.id,) and "was lost" in lost.error
    (load,) = (each for each in spans["load kv"] if each.parent == resumed.id)
    assert load.attributes["stoker.kv.loaded_tokens"] == second["loaded_tokens"]
    assert load.attributes["stoker.kv.bytes"] > 0 and load.attributes["stoker.kv.exact"]
    assert {each.attributes["stoker.slot"] for each in (lost, resumed)} <= {each.slot_id for each in town.slots.agents}
    for part in ("prefill", "decode", "commit"):
        assert {each.parent for each in spans[part]} == {lost.id, resumed.id}

    going: list[FarAgent] = []

    def terminate() -> None:
        opened.update(town.opened_at_home())
        going.append(town.where()[1])
        going[0].terminate()

    text, places, request_id = town.stream(terminate)
    assert (text, places) == (whole, list(range(1, TOKENS + 1)))
    first, second = town.attempts(request_id)
    assert first["reason"].startswith("parked after token ") and second["exact"]
    assert first["slot_id"] == going[0].slot_id != second["slot_id"]
    assert second["loaded_tokens"] > len(PROMPT)
    assert wait_for(lambda: going[0].process.poll() is not None) and going[0].process.returncode == 0
    assert opened == set()
    (left,) = town.service.call("GET", "/api/v1/slots")["data"]
    assert set(left["loads"]["read_bytes"]) <= {"store", "peer"}, "weights came from a disk that is not the slot's"
