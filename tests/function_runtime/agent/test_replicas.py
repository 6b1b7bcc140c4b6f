"""Replicas from the agent's side: started, specialised, reported, ended; the agent's own rules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from function_runtime.protocol import ReplicaState, Tokens
from tests.support.replica_client import (
    AgentError,
    AgentProcess,
    new_replica_id,
    stub_spec,
    wait_for,
    work,
)


def test_a_replica_is_started_specialised_and_ended_as_a_process(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    assert status.pid and status.port and status.token and status.ready_us >= status.created_us
    assert {"worker", "build", "listen"} <= {stage.name for stage in status.stages}
    agent.end_replica(status.replica_id, reason="no load")
    ended = agent.until(status.replica_id, ReplicaState.ENDED)
    assert ended.exit == "exit 0" and ended.end_reason == "no load" and ended.memory_returned
    assert status.pid not in {process.pid for process in agent.family()}
    assert ended.time.held_us == agent.replica(status.replica_id).time.held_us


def test_asking_twice_for_a_replica_makes_one(agent: AgentProcess) -> None:
    spec = stub_spec()
    first, second = agent.start_replica(spec), agent.start_replica(spec)
    assert first.token == second.token and first.created_us == second.created_us
    agent.until(spec.replica_id, ReplicaState.READY)
    assert agent.start_replica(spec).state is ReplicaState.READY
    assert len(agent.state().replicas) == 1


def test_the_answer_does_not_wait_for_the_replica(agent: AgentProcess) -> None:
    spec = stub_spec({"STOKER_STUB_START_S": "30"})
    assert agent.start_replica(spec).state is ReplicaState.STARTING
    agent.until(spec.replica_id, ReplicaState.LOADING)
    agent.end_replica(spec.replica_id)
    ended = agent.until(spec.replica_id, ReplicaState.ENDED)
    assert ended.exit == "signal 9" and ended.time.cold_us == ended.time.held_us


def test_a_start_that_fails_says_why_and_whether_to_try_again(agent: AgentProcess) -> None:
    spec = stub_spec({"STOKER_STUB_FAIL": "model_format_invalid"})
    agent.start_replica(spec)
    failed = agent.until(spec.replica_id, ReplicaState.FAILED)
    assert failed.error is not None
    assert failed.error.code == "model_format_invalid" and failed.error.retry is False
    assert not agent.state().replicas[0].ready_us
    log = agent.call("GET", f"/v1/replicas/{spec.replica_id}/log?tail=1").decode()
    assert "model_format_invalid" in log


def test_a_start_that_takes_too_long_is_given_up(agent: AgentProcess) -> None:
    spec = msgspec.structs.replace(stub_spec({"STOKER_STUB_START_S": "30"}), start_timeout_s=1.0)
    agent.start_replica(spec)
    failed = agent.until(spec.replica_id, ReplicaState.FAILED)
    assert failed.error is not None and failed.error.code == "start_timeout" and failed.error.retry


def test_several_replicas_live_side_by_side(agent: AgentProcess) -> None:
    specs = [stub_spec() for _ in range(3)]
    for spec in specs:
        agent.start_replica(spec)
    statuses = [agent.until(spec.replica_id, ReplicaState.READY) for spec in specs]
    assert len({status.pid for status in statuses}) == 3
    assert len({status.token for status in statuses}) == 3
    for status in statuses:
        with agent.connect(status) as link:
            assert link.welcome.replica_id == status.replica_id


def test_the_event_stream_begins_with_the_state_and_beats(agent: AgentProcess) -> None:
    events = agent.events()
    first = next(events)
    assert first.state is not None and first.state.slot_id == "slot-0"
    spec = stub_spec()
    agent.start_replica(spec)
    seen: list[ReplicaState] = []
    for event in events:
        if event.replica is not None:
            seen.append(event.replica.state)
            if event.replica.state is ReplicaState.READY and event.replica.memory.rss_bytes:
                break
    assert seen[:3] == [ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY]


@pytest.mark.parametrize("path", ["/v1/state", "/v1/events", "/v1/replicas/x/log"])
def test_without_the_token_nothing_is_answered(agent: AgentProcess, path: str) -> None:
    for token in ("", "wrong", agent.info.token[:-1]):
        with pytest.raises(AgentError) as refused:
            agent.call("GET", path, token=token)
        assert refused.value.status == 401


@pytest.mark.parametrize(
    "method, path, body, status",
    [
        ("POST", "/v1/replicas", {"replica_id": 3}, 400),
        ("POST", "/v1/replicas", None, 400),
        ("POST", "/v1/warm", {"workers": -1}, 400),
        ("POST", "/v1/warm", {"workers": "many"}, 400),
        ("DELETE", "/v1/replicas/rep-unknown", None, 404),
        ("DELETE", "/v1/replicas/rep-unknown?grace_s=nan", None, 400),
        ("GET", "/v1/replicas/..%2f..%2fagent.json/log", None, 404),
        ("GET", "/v1/nothing", None, 404),
    ],
)
def test_bad_calls_are_refused(agent: AgentProcess, method: str, path: str, body: object, status: int) -> None:
    with pytest.raises(AgentError) as refused:
        agent.call(method, path, body)
    assert refused.value.status == status


def test_a_replica_id_that_is_a_path_is_refused(agent: AgentProcess) -> None:
    with pytest.raises(AgentError) as refused:
        agent.start_replica(msgspec.structs.replace(stub_spec(), replica_id="../../x"))
    assert refused.value.status == 400


def test_a_slot_has_one_agent(agent: AgentProcess) -> None:
    second = subprocess.run(
        [
            *(sys.executable, "-m", "function_runtime.agent", "--slot-dir", str(agent.directory)),
            *("--slot-id", "slot-0", "--pool-dir", str(agent.pool_directory)),
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 2 and str(agent.info.pid) in second.stderr


def test_how_to_reach_the_agent_is_private_and_goes_with_it(agent: AgentProcess) -> None:
    info = agent.directory / "agent.json"
    assert info.stat().st_mode & 0o777 == 0o600
    assert json.loads(info.read_text())["pid"] == agent.process.pid
    agent.call("POST", "/v1/shutdown", {"grace_s": 0})
    assert agent.process.wait(10) == 0
    assert not info.exists()


def test_shutdown_drains_replicas_first(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec({"STOKER_STUB_TOKEN_S": "0.02"}))
    with agent.connect(status) as link:
        request = link.submit(work(max_tokens=20))
        link.next(Tokens)
        agent.call("POST", "/v1/shutdown", {"grace_s": 20})
        assert link.outcome(request).last_seq == 20
        link.settle(request)
        assert agent.process.wait(10) == 0
    wait_for(lambda: not agent.family())


def test_nobody_reads_the_events_so_the_agent_ends_everything(start_agent: Callable[..., AgentProcess]) -> None:
    agent = start_agent("--orphan-s", "1.5")
    events = agent.events()
    status = agent.ready(stub_spec())
    for _ in range(6):
        next(events)
    assert agent.process.poll() is None
    events.close()
    assert agent.process.wait(15) == 0
    wait_for(lambda: not agent.family())
    assert status.pid


def test_replicas_outlive_who_asked_for_them(agent: AgentProcess) -> None:
    events = agent.events()
    next(events)
    status = agent.ready(stub_spec({"STOKER_STUB_TOKEN_S": "0.02"}))
    link = agent.connect(status)
    request = link.submit(work(max_tokens=30))
    link.next(Tokens)
    link.close()
    events.close()
    adopted = next(agent.events()).state
    assert adopted is not None and adopted.replicas[0].state is ReplicaState.READY
    with agent.connect(adopted.replicas[0]) as successor:
        successor.attach(request, 0)
        assert successor.outcome(request).last_seq == 30


def test_final_states_are_kept_for_who_was_away(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    agent.end_replica(status.replica_id)
    agent.until(status.replica_id, ReplicaState.ENDED)
    (known,) = agent.state().replicas
    assert known.state is ReplicaState.ENDED and known.time.held_us > 0
    assert agent.end_replica(status.replica_id).state is ReplicaState.ENDED
    assert new_replica_id() != status.replica_id
