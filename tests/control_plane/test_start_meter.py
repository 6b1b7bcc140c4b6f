"""Starts and loads as numbers and as spans."""

from __future__ import annotations

import msgspec
import pytest

from control_plane.start_meter import StartMeter, pool_families
from control_plane.traces import Traces, open_traces
from function_runtime.protocol import (
    EngineOptions,
    LoadTotals,
    PoolEntry,
    ReplicaError,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    SlotState,
    Stage,
)

STAGES = (
    Stage("prepare", 1_000_000, 500_000, nbytes=4_000_000, tier="peer", detail="copied from peer"),
    Stage("build", 1_500_000, 20_000),
    Stage("exit", 9_000_000, 5),
)


def status(state: ReplicaState = ReplicaState.READY, **fields: object) -> ReplicaStatus:
    spec = ReplicaSpec("r1", "f", 1, "default", "", "c0ffee", EngineOptions())
    known = ReplicaStatus("r1", "f", 1, state, spec, created_us=900_000, ready_us=1_600_000, stages=STAGES)
    return msgspec.structs.replace(known, **fields)


def test_each_start_is_counted_once_by_stage_and_tier() -> None:
    meter = StartMeter()
    for _ in range(3):
        meter.see({"r1": status()})
    assert {labels: sum(seen.counts) for labels, seen in meter.stages.items()} == {
        ("f", "prepare", "peer"): 1,
        ("f", "build", ""): 1,
    }
    assert meter.stages["f", "prepare", "peer"].total == 0.5
    meter.see({})
    meter.see({"r2": status(replica_id="r2", ready_us=0)})
    assert sum(meter.stages["f", "build", ""].counts) == 1


def test_pools_and_loads_of_every_slot_are_told() -> None:
    slot = SlotState(
        "s0", 1, "i", True, 0, 0, 1000, 600,
        pool=(PoolEntry("k", "c0ffee", "ready", 600), PoolEntry("l", "beef", "loading", 0)),
        loads=LoadTotals({"make": 2, "peer": 1}, {"disk": 500, "peer": 300}, 1.5, 9, 1, 2, 3),
    )  # fmt: skip
    told = {
        (sample.name, *sample.labels.values()): sample.value
        for family in pool_families({"s0": slot})
        for sample in family.samples
    }
    assert told["stoker_pool_used_bytes", "s0"] == 600
    assert told["stoker_pool_entries", "s0", "loading"] == 1
    assert told["stoker_loads_total", "s0", "peer"] == 1
    assert told["stoker_load_bytes_total", "s0", "disk"] == 500
    assert told["stoker_load_chunks_total", "s0", "bad"] == 1
    assert told["stoker_load_retries_total", "s0"] == 2
    assert told["stoker_load_seconds_total", "s0"] == 1.5
    assert told["stoker_load_failures_total", "s0"] == 3


def test_a_start_is_a_span_with_one_below_it_for_each_stage() -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter))
    starting = status(ReplicaState.LOADING, ready_us=0)
    traces.replica_changed(starting, None)
    traces.replica_changed(status(), starting)
    traces.replica_changed(status(), status())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert sorted(spans) == ["build", "cold start f", "prepare"]
    start, prepare = spans["cold start f"], spans["prepare"]
    assert (start.start_time, start.end_time) == (900_000_000, 1_600_000_000)
    assert prepare.parent.span_id == start.context.span_id
    assert prepare.attributes["stoker.tier"] == "peer" and prepare.attributes["stoker.bytes_per_s"] == 8e6
    exporter.clear()
    error = ReplicaError("prepare_failed", "no", retry=True)
    traces.replica_changed(status(ReplicaState.FAILED, ready_us=0, error=error), starting)
    failed = next(span for span in exporter.get_finished_spans() if span.parent is None)
    assert failed.status.description == "prepare_failed: no"


def test_every_load_is_a_span_whoever_it_was_for() -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter), now_ns=lambda: 9_000_000_000)
    found = PoolEntry("old", "beef", "ready", 100, load="left by an earlier agent, every chunk verified")
    loading = PoolEntry("k", "c0ffee" * 4, "loading", 600)
    empty = SlotState("s0", 1, "i", True, 0, 0, 1000, 600, pool=(loading,))
    how = "copied from peer: 600 bytes read, 1 MB/s; 2 chunks verified"
    ready = msgspec.structs.replace(loading, state="ready", dtype="bfloat16", load=how, load_s=0.5)
    full = msgspec.structs.replace(empty, pool=(ready, found))
    traces.slot_changed(full, None)
    traces.slot_changed(full, msgspec.structs.replace(empty, incarnation="another"))
    assert not exporter.get_finished_spans()
    traces.slot_changed(empty, None)
    traces.slot_changed(full, empty)
    traces.slot_changed(full, full)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.start_time, span.end_time) == ("load c0ffeec0ffee", 8_500_000_000, 9_000_000_000)
    assert span.attributes["stoker.detail"] == how and span.attributes["stoker.bytes_per_s"] == 1200
    traces.leads = lambda: False
    traces.slot_changed(full, empty)
    assert len(exporter.get_finished_spans()) == 1


def test_a_start_is_told_by_one_gateway_and_by_none_that_did_not_see_it() -> None:
    told: list[object] = []

    class Processor:
        def on_end(self, span: object) -> None:
            told.append(span)

    traces = Traces(Processor())
    traces.replica_changed(status(), None)
    traces.leads = lambda: False
    traces.replica_changed(status(), status(ReplicaState.LOADING, ready_us=0))
    assert told == []


def test_what_hinders_a_span_hinders_no_start(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_end(self, span: object) -> None:
            raise RuntimeError("no")

    Traces(Broken()).replica_changed(status(), status(ReplicaState.LOADING, ready_us=0))
    assert "event=trace_lost" in caplog.text


def test_traces_are_off_unless_the_usual_variables_ask() -> None:
    assert open_traces({}) is None
    assert open_traces({"OTEL_TRACES_EXPORTER": "none"}) is None
    assert open_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}) is None
