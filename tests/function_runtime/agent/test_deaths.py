"""Any process of the slot killed or stopped at any moment: nothing stays behind, nothing dead counts as running."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from function_runtime.protocol import ReplicaState
from tests.support.replica_client import AgentProcess, stub_spec, wait_for, work


def test_a_killed_replica_has_failed_and_may_be_tried_again(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    os.kill(status.pid, signal.SIGKILL)
    failed = agent.until(status.replica_id, ReplicaState.FAILED, within_s=3)
    assert failed.exit == "signal 9" and failed.error is not None and failed.error.retry
    parts = failed.time
    unreported = parts.held_us - parts.cold_us - parts.attributed_us - parts.idle_us - parts.overhead_us
    assert 0 <= unreported < 10_000_000
    assert failed.memory_returned


def test_a_killed_agent_takes_its_replicas_with_it_within_a_second(agent: AgentProcess) -> None:
    for _ in range(2):
        agent.ready(stub_spec())
    assert len(agent.family()) == 3
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: not agent.family(), 1.0, "the end of the family")


def test_even_a_stopped_replica_dies_with_its_agent(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    os.kill(status.pid, signal.SIGSTOP)
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: not agent.family(), 1.0, "the end of the family")


def test_a_stopped_replica_is_killed_and_counts_as_failed(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    os.kill(status.pid, signal.SIGSTOP)
    failed = agent.until(status.replica_id, ReplicaState.FAILED, within_s=12)
    assert failed.exit == "signal 9"


def test_a_replica_killed_while_it_loads_has_failed(agent: AgentProcess) -> None:
    spec = stub_spec({"STOKER_STUB_START_S": "30"})
    agent.start_replica(spec)
    loading = agent.until(spec.replica_id, ReplicaState.LOADING)
    os.kill(loading.pid, signal.SIGKILL)
    failed = agent.until(spec.replica_id, ReplicaState.FAILED, within_s=5)
    assert failed.error is not None and failed.error.retry
    assert failed.time.cold_us == failed.time.held_us


def test_replicas_of_a_stopped_agent_end_when_its_lease_lapses(start_agent: Callable[..., AgentProcess]) -> None:
    agent = start_agent("--orphan-s", "2")
    events = agent.events()
    status = agent.ready(stub_spec())
    next(e for e in events if e.replica is not None and e.replica.memory.rss_bytes)
    os.kill(agent.process.pid, signal.SIGSTOP)
    replica = psutil.Process(status.pid)
    wait_for(lambda: replica.status() == psutil.STATUS_ZOMBIE, 6.0, "the replica's end")
    os.kill(agent.process.pid, signal.SIGCONT)
    failed = agent.until(status.replica_id, ReplicaState.FAILED, within_s=5)
    assert failed.exit == "exit 3"


def test_the_next_agent_clears_what_its_predecessor_left(agent: AgentProcess) -> None:
    agent.ready(stub_spec())
    agent.process.kill()
    agent.process.wait()
    agent.start()
    assert agent.state().replicas == ()
    assert [p.pid for p in agent.family()] == [agent.process.pid]
    status = agent.ready(stub_spec())
    with agent.connect(status) as link:
        link.outcome(link.submit(work()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_however_the_agent_ends_nothing_is_left(agent: AgentProcess, number: signal.Signals) -> None:
    agent.ready(stub_spec())
    agent.process.send_signal(number)
    agent.process.wait(10)
    wait_for(lambda: not agent.family(), 1.0, "the end of the family")
