"""One trace a request, whatever happens to it: cold starts, lost replicas and gateways; and nothing where it is off."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from control_plane.gateway.acceptance import Params
from control_plane.request_trace import RequestTrace
from control_plane.settings import HttpSettings, Settings, TraceSettings
from control_plane.trace_context import Caller, TraceSeed, parse_traceparent
from control_plane.traces import Told, Traces
from function_runtime.protocol import ReplicaState, Stage
from tests.control_plane.gateway.conftest import Plane, Stream, body, until
from tests.control_plane.gateway.fakes import Behaviour, FakeSlot
from tests.support.collector import Collector, Span

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{CALLER}-01"
LONG = 40


class StagedSlot(FakeSlot):
    """Whose agent tells of the stages of a start."""

    def _tell(self, replica_id: str, **changes: Any) -> None:
        if changes.get("state") is ReplicaState.READY:
            begin_us = self.statuses[replica_id].created_us
            changes["stages"] = (Stage("worker", begin_us, 10), Stage("prepare", begin_us + 10, 20, 4096, "disk"))
        super()._tell(replica_id, **changes)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield collector


@pytest.fixture
async def traced(tmp_path: Path, checkpoint: tuple[str, str, str], collector: Collector) -> AsyncIterator[Plane]:
    """Only requests that bring a trace are told of."""
    settings = Settings(
        data_dir=tmp_path / "data", http=HttpSettings(heartbeat_s=0.05), traces=TraceSettings(share=0.0)
    )
    slot = StagedSlot(Behaviour(token_s=0.005))
    plane = Plane(settings, slot, checkpoint)
    await plane.start()
    await plane.deploy()
    yield plane
    await plane.stop()
    await slot.shut()


async def told(collector: Collector, trace: str = TRACE) -> dict[str, list[Span]]:
    """The spans of a trace by name, once its call is over."""

    def whole(spans: list[Span]) -> bool:
        return any(span.trace == trace and span.name.startswith("POST") for span in spans)

    spans = await asyncio.to_thread(collector.wait, whole)
    found: dict[str, list[Span]] = {}
    for span in sorted((span for span in spans if span.trace == trace), key=lambda span: span.begin_ns):
        found.setdefault(span.name, []).append(span)
    return found


def tree(spans: dict[str, list[Span]]) -> list[tuple[str, str]]:
    """(span, its parent) by name, the caller's as such; every parent is there."""
    names = {span.id: name for name, group in spans.items() for span in group} | {CALLER: "caller"}
    assert len(names) == sum(map(len, spans.values())) + 1  # ids are unique
    return sorted((name, names[span.parent]) for name, group in spans.items() for span in group)


WORK = "text_completion fn"
CALL = "POST /v1/completions"
ONCE = [(CALL, "caller"), ("accept", CALL), ("settle", WORK), (WORK, CALL)]
TURN = [("attempt", WORK), ("commit", "attempt"), ("decode", "attempt"), ("prefill", "attempt")]


async def test_a_cold_request_is_one_trace_with_the_start_it_waited_for(traced: Plane, collector: Collector) -> None:
    response = await traced.post(body(), traceparent=SAMPLED)
    request_id = response.headers["x-request-id"]
    spans = await told(collector)
    cold = [("queue", WORK), ("cold start fn", "queue"), ("worker", "cold start fn"), ("prepare", "cold start fn")]
    assert tree(spans) == sorted([*ONCE, *TURN, *cold, ("place", WORK)])
    call, work = spans[CALL][0], spans[WORK][0]
    assert call.kind == 2 and call.attributes["http.route"] == "/v1/completions"
    assert call.attributes["http.response.status_code"] == 200
    assert call.attributes["stoker.request"] == request_id == work.attributes["gen_ai.response.id"]
    assert work.attributes["gen_ai.operation.name"] == "text_completion"
    assert work.attributes["gen_ai.request.model"] == "fn" and work.attributes["gen_ai.request.seed"] == 7
    assert work.attributes["gen_ai.usage.output_tokens"] == 5
    assert work.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert spans["queue"][0].attributes["stoker.cold_start"] is True
    assert spans["prepare"][0].attributes["stoker.tier"] == "disk"
    assert spans["decode"][0].attributes["stoker.decode.tokens"] == 5
    assert spans["commit"][0].attributes["stoker.commit.tokens"] == 5
    assert all(call.begin_ns <= span.begin_ns <= span.end_ns <= call.end_ns for each in spans.values() for span in each)
    # The start has a trace of its own as well, which its copy is linked to.
    own = next(span for span in collector.spans if span.name == "cold start fn" and span.trace != TRACE)
    assert own.parent == "" and spans["cold start fn"][0].links == (own.id,)
    assert collector.resources[0]["service.name"] == "stoker"
    assert collector.resources[0]["service.instance.id"] == traced.context.gateway_id
    # Whoever finds a replica ready waits for none, and nobody's start is told.
    other = "5" * 32
    await traced.post(body(), traceparent=f"00-{other}-{CALLER}-01")
    assert tree(await told(collector, other)) == sorted([*ONCE, *TURN, ("place", WORK)])


async def test_a_killed_replica_is_an_attempt_that_the_next_one_is_linked_to(
    traced: Plane, collector: Collector
) -> None:
    async with traced.post(body(stream=True, max_tokens=LONG), traceparent=SAMPLED) as response:
        stream = Stream(response)
        async for place, _ in stream.events():
            if place == 10:
                await traced.slot.kill(traced.slot.living[0])
    spans = await told(collector)
    first, second = spans["attempt"]
    names = [name for name, _ in tree(spans)]
    assert names.count("attempt") == names.count("prefill") == names.count("decode") == 2
    assert (first.links, second.links) == ((), (first.id,))
    assert first.attributes["stoker.outcome"] == "lost" and "was lost" in first.error
    assert second.attributes["stoker.outcome"] == "finished" and second.error == ""
    assert second.attributes["stoker.epoch"] == 2 and second.attributes["stoker.after_token"] >= 10
    load = spans["load kv"][0]
    assert load.parent == second.id
    assert load.attributes["stoker.kv.recomputed_tokens"] == second.attributes["stoker.after_token"]
    tokens = [span.attributes["stoker.decode.tokens"] for span in spans["decode"]]
    assert sum(tokens) >= LONG
    assert spans[WORK][0].attributes["gen_ai.usage.output_tokens"] == LONG
    assert len(spans[WORK]) == len(spans[CALL]) == 1 and spans[CALL][0].error == ""


@pytest.mark.parametrize("replica_lives", [True, False])
async def test_an_adopted_request_is_told_of_by_its_heir_in_the_same_trace(
    traced: Plane, collector: Collector, replica_lives: bool
) -> None:
    response = await traced.post(body(stream=True, max_tokens=LONG), traceparent=SAMPLED)
    request_id = response.headers["x-request-id"]
    async for place, _ in Stream(response).events():
        if place == 10:
            break
    first_gateway = traced.context.gateway_id
    replica = traced.slot.living[0]
    await traced.die()
    assert traced.context.traces is not None
    await asyncio.to_thread(traced.context.traces.close)  # what the dead one told is on its way already
    assert CALL not in {span.name for span in collector.spans}
    if not replica_lives:
        await traced.slot.kill(replica)
    await traced.start()
    assert traced.context.gateway_id != first_gateway
    async with traced.get(f"/v1/completions/{request_id}/stream?starting_after=10") as again:
        await Stream(again).all()
    spans = await told(collector)
    assert dict(tree(spans))[CALL] == "caller" and dict(tree(spans))["accept"] == CALL
    assert {parent for name, parent in tree(spans) if name == "attempt"} == {WORK}
    if replica_lives:
        (attempt,) = spans["attempt"]
        assert attempt.attributes["stoker.outcome"] == "finished" and attempt.attributes["stoker.adopted"] == 1
        assert attempt.attributes["stoker.epoch"] == 1
    else:
        first, second = spans["attempt"]
        assert first.error == "its gateway was lost" and second.links == (first.id,)
    assert spans[CALL][0].begin_ns <= spans["accept"][0].begin_ns
    assert spans[WORK][0].attributes["gen_ai.usage.output_tokens"] == LONG


async def test_a_refused_request_is_a_call_with_its_reason(traced: Plane, collector: Collector) -> None:
    traced.context.dispatcher.unusable = lambda key, identity: "it is broken"
    response = await traced.post(body(), traceparent=SAMPLED)
    assert response.status == 503
    spans = await told(collector)
    assert tree(spans) == [(CALL, "caller")]
    call = spans[CALL][0]
    assert call.attributes["error.type"] == "model_unusable" and "it is broken" in call.error
    assert call.attributes["http.response.status_code"] == 503


async def test_a_callers_decision_is_followed_and_others_are_drawn(traced: Plane, collector: Collector) -> None:
    for header in (f"00-{TRACE}-{CALLER}-00", "nonsense"):
        assert (await traced.post(body(), traceparent=header)).status == 200
    assert (await traced.post(body())).status == 200
    traces = traced.context.traces
    assert traces is not None
    assert traces.seed([SAMPLED, SAMPLED], 1) is None  # two are none
    traces._share = 1.0
    response = await traced.post(body())
    spans = await asyncio.to_thread(collector.wait, lambda spans: any(span.name == CALL for span in spans))
    (call,) = [span for span in spans if span.name == CALL]
    assert call.attributes["stoker.request"] == response.headers["x-request-id"] and call.parent == ""


async def test_without_a_collector_nothing_is_made(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for kind in (RequestTrace, Told):
        monkeypatch.setattr(kind, "__init__", lambda self, *_, **__: made.append(type(self).__name__))
    await plane.deploy()
    assert plane.context.traces is None
    assert (await plane.post(body(), traceparent=SAMPLED)).status == 200
    assert made == []


async def test_a_dead_collector_costs_nothing_but_its_spans(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, slot: FakeSlot, checkpoint: tuple[str, str, str]
) -> None:
    with socket.socket() as deaf:  # takes connections and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "32")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
        monkeypatch.setattr("control_plane.traces.CLOSE_S", 0.05)
        plane = Plane(settings, slot, checkpoint)
        await plane.start()
        await plane.deploy()
        for _ in range(8):
            assert (await plane.post(body())).status == 200
        assert plane.context.traces is not None
        assert len(plane.context.traces._processor._batch_processor._queue) <= 32
        await plane.stop()


async def test_what_breaks_in_a_span_breaks_no_request(plane: Plane, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_end(self, span: object) -> None:
            raise RuntimeError("no")

        def force_flush(self) -> None:
            return

    plane.context.traces = Traces(Broken())
    await plane.deploy()
    response = await plane.post(body(), traceparent=SAMPLED)
    assert response.status == 200
    await until(lambda: not plane.context.dispatcher.requests)
    assert f"event=trace_lost request={response.headers['x-request-id']}" in caplog.text


def test_what_the_journal_keeps_is_read_by_older_and_newer_gateways() -> None:
    class Older(msgspec.Struct, frozen=True, array_like=True):
        identity: str
        conversation: str = ""

    class Newer(msgspec.Struct, frozen=True, array_like=True):
        identity: str
        conversation: str = ""
        trace: TraceSeed | None = None

    seed = TraceSeed(TRACE, CALLER, 5)
    stored = msgspec.msgpack.encode(Newer("i", "c", seed))
    assert msgspec.msgpack.decode(stored, type=Older) == Older("i", "c")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Older("i", "c")), type=Newer).trace is None
    assert Params.__struct_fields__[-1] == "trace"


@pytest.mark.parametrize(
    ("header", "caller"),
    [
        (SAMPLED, Caller(TRACE, CALLER, True)),
        (f" 00-{TRACE}-{CALLER}-02 ", Caller(TRACE, CALLER, False)),
        (f"cc-{TRACE}-{CALLER}-03-what-the-future-will-be-like", Caller(TRACE, CALLER, True)),
        (f"00-{TRACE}-{CALLER}-01-more", None),
        (f"ff-{TRACE}-{CALLER}-01", None),
        (f"00-{'0' * 32}-{CALLER}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{CALLER}-01", None),
        ("", None),
    ],
)
def test_a_traceparent_is_read_by_the_letter(header: str, caller: Caller | None) -> None:
    assert parse_traceparent(header) == caller
