"""New revisions roll over, old ones go, and no request is lost on the way; deleted functions wind up."""

from __future__ import annotations

import asyncio

from control_plane.functions import ImportState, RevisionError
from control_plane.spec import parse_mapping
from function_runtime.protocol import ReplicaError
from tests.control_plane.gateway.conftest import Plane, Stream, body, text_of, until
from tests.control_plane.gateway.fakes import token_text


def revisions(plane: Plane) -> list[int]:
    return sorted(replica.spec.revision for replica in plane.slot.living)


async def test_a_new_revision_takes_over_when_it_is_ready_and_nothing_is_lost(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy()
    running = await plane.post(body(stream=True, max_tokens=60))
    stream = Stream(running)
    events = [await anext(stream.events())]
    plane.slot.behaviour.start_s = 0.2
    await plane.deploy(labels={"version": "two"})
    during = [asyncio.ensure_future(plane.post(body())) for _ in range(5)]
    assert [(await task).status for task in during] == [200] * 5
    # While the new one starts, the old one serves.
    assert {work.request_id for work in plane.slot.living[0].works} >= {
        (await (await task).json())["id"] for task in during
    }
    await until(lambda: 2 in revisions(plane))
    events += await stream.all()
    assert text_of(events) == "".join(token_text(7, 0, position) for position in range(60))
    await until(lambda: revisions(plane) == [2])
    async with plane.post(body()) as response:
        assert response.status == 200
    assert [spec.revision for spec in plane.slot.started] == [1, 2]


async def test_rolling_back_is_a_rollover_too(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        assert response.status == 200
    await plane.deploy(labels={"version": "two"})
    await until(lambda: revisions(plane) == [2])
    function = await plane.context.functions.rollback("fn", "default")
    _, identity, manifest = plane.checkpoint
    await plane.context.functions.set_import(
        "fn", "default", function.revision, ImportState.READY, identity=identity, manifest_path=manifest
    )
    await until(lambda: revisions(plane) == [3])
    async with plane.post(body()) as response:
        assert response.status == 200


async def test_while_a_new_revision_is_imported_the_old_one_serves(plane: Plane) -> None:
    await plane.deploy()
    uri = plane.checkpoint[0]
    spec = parse_mapping({"name": "fn", "model": uri, "engine": "stub", "labels": {"version": "two"}})
    await plane.context.functions.put(spec, "default")
    async with plane.post(body()) as response:
        assert response.status == 200
    assert revisions(plane) == [1]
    error = RevisionError("format_error", "the file is truncated")
    await plane.context.functions.set_import("fn", "default", 2, ImportState.FAILED, error=error)
    async with plane.post(body()) as response:
        assert response.status == 200
    assert revisions(plane) == [1]


async def test_a_new_revision_that_cannot_start_leaves_the_old_one_serving(plane: Plane) -> None:
    await plane.deploy()
    async with plane.post(body()) as response:
        assert response.status == 200
    plane.slot.behaviour.start_error = ReplicaError("integrity_error", "altered", False)
    await plane.deploy(labels={"version": "two"})
    await until(lambda: len(plane.slot.started) == 2)
    await until(lambda: plane.context.loop.unusable(("default", "fn"), 2))
    async with plane.post(body()) as response:
        assert response.status == 200
    assert revisions(plane) == [1]
    assert len(plane.slot.started) == 2


async def test_a_request_waits_for_the_import_of_the_first_revision(plane: Plane) -> None:
    uri, identity, manifest = plane.checkpoint
    spec = parse_mapping({"name": "fn", "model": uri, "engine": "stub"})
    await plane.context.functions.put(spec, "default")
    async with plane.post(body(), x_stoker_no_wait="1") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "model_loading")
    task = asyncio.ensure_future(plane.post(body()))
    await until(lambda: plane.context.serving._imports)
    await plane.context.functions.set_import(
        "fn", "default", 1, ImportState.READY, identity=identity, manifest_path=manifest
    )
    assert (await task).status == 200


async def test_a_failed_import_reaches_the_waiting_request(plane: Plane) -> None:
    spec = parse_mapping({"name": "fn", "model": plane.checkpoint[0], "engine": "stub"})
    await plane.context.functions.put(spec, "default")
    task = asyncio.ensure_future(plane.post(body()))
    await until(lambda: plane.context.serving._imports)
    plane.context.serving.import_again = lambda revision: False
    error = RevisionError("format_error", "model.gguf is truncated: 100 bytes needed, 50 found")
    await plane.context.functions.set_import("fn", "default", 1, ImportState.FAILED, error=error)
    response = await task
    answer = (await response.json())["error"]
    assert (response.status, answer["code"]) == (503, "model_unusable")
    assert "100 bytes needed, 50 found" in answer["message"]


async def test_deleting_a_function_refuses_what_waits_and_drains_what_runs(plane: Plane) -> None:
    plane.slot.behaviour.token_s = 0.01
    await plane.deploy(scaling={"max_concurrency": 1, "target_concurrency": 1})
    running = asyncio.ensure_future(plane.post(body(max_tokens=20)))
    replica = await plane.replica()
    await until(lambda: replica.works)
    waiting = asyncio.ensure_future(plane.post(body()))
    await until(lambda: any(lane.waiting for lane in plane.context.dispatcher.lanes))
    await plane.context.functions.delete("fn", "default")
    refused = await waiting
    assert (refused.status, (await refused.json())["error"]["code"]) == (404, "function_deleted")
    assert (await running).status == 200
    await until(lambda: not plane.slot.living)


async def test_min_replicas_are_there_before_anybody_asks(plane: Plane) -> None:
    await plane.deploy(scaling={"min_replicas": 2, "max_replicas": 2})
    await until(lambda: len(plane.slot.living) == 2)
    await plane.slot.kill(plane.slot.living[0])
    await until(lambda: len(plane.slot.living) == 2)
    assert len(plane.slot.started) == 3


async def test_a_stream_that_waits_for_an_import_gets_heartbeats(plane: Plane) -> None:
    uri, identity, manifest = plane.checkpoint
    await plane.context.functions.put(parse_mapping({"name": "fn", "model": uri, "engine": "stub"}), "default")
    async with plane.post(body(stream=True)) as response:
        stream = Stream(response)
        reading = asyncio.ensure_future(stream.all())
        await until(lambda: len(stream.comments) >= 2)
        await plane.context.functions.set_import(
            "fn", "default", 1, ImportState.READY, identity=identity, manifest_path=manifest
        )
        events = await reading
    assert all("import" in comment for comment in stream.comments[:2])
    assert text_of(events) == "".join(token_text(7, 0, position) for position in range(5))


async def test_a_stream_that_waited_for_an_import_in_vain_ends_with_its_error(plane: Plane) -> None:
    uri = plane.checkpoint[0]
    await plane.context.functions.put(parse_mapping({"name": "fn", "model": uri, "engine": "stub"}), "default")
    plane.context.serving.import_again = lambda revision: False
    async with plane.post(body(stream=True)) as response:
        stream = Stream(response)
        reading = asyncio.ensure_future(stream.all())
        await until(lambda: stream.comments)
        error = RevisionError("format_error", "truncated")
        await plane.context.functions.set_import("fn", "default", 1, ImportState.FAILED, error=error)
        events = await reading
    assert events[0][1]["error"]["code"] == "model_unusable"
    assert events[1][1] == "[DONE]"


async def test_deploying_the_same_spec_again_retries_a_failed_import(plane: Plane) -> None:
    spec = parse_mapping({"name": "fn", "model": plane.checkpoint[0], "engine": "stub"})
    await plane.context.functions.put(spec, "default")
    error = RevisionError("source_missing", "no such file")
    await plane.context.functions.set_import("fn", "default", 1, ImportState.FAILED, error=error)
    wanted: list[ImportState] = []
    plane.context.importing.want = lambda revision: wanted.append(revision.state)  # type: ignore[method-assign]
    again = await plane.context.functions.put(spec, "default")
    assert (again.revision, again.current.state, again.current.error) == (1, ImportState.IMPORTING, None)
    assert wanted == [ImportState.IMPORTING]
