"""Any process of the slot killed or stopped at any moment: nothing stays behind, nothing dead counts as running."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from function_runtime.protocol import ReplicaState
from tests.support.replica_client import AgentProcess, stub_spec, wait_for, work


def test_a_killed_replica_has_failed_and_may_be_tried_again(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    os.kill(status.pid, signal.SIGKILL)
    failed = agent.until(status.replica_id, ReplicaState.FAILED, within_s=60)
    assert failed.exit == "signal 9" and failed.error is not None and failed.error.retry
    parts = failed.time
    unreported = parts.held_us - parts.cold_us - parts.attributed_us - parts.idle_us - parts.overhead_us
    assert 0 <= unreported < 10_000_000
    assert failed.memory_returned


def test_a_killed_agent_takes_its_replicas_with_it(agent: AgentProcess) -> None:
    for _ in range(2):
        agent.ready(stub_spec())
    assert len(agent.serving()) == 3
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: not agent.family(), 5.0, "the end of the family")


def test_even_a_stopped_replica_dies_with_its_agent(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    os.kill(status.pid, signal.SIGSTOP)
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: not agent.family(), 5.0, "the end of the family")


def test_a_stopped_replica_is_killed_and_counts_as_failed(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    os.kill(status.pid, signal.SIGSTOP)
    failed = agent.until(status.replica_id, ReplicaState.FAILED, within_s=60)
    assert failed.exit == "signal 9"


def test_a_replica_killed_while_it_loads_has_failed(agent: AgentProcess) -> None:
    spec = stub_spec({"STOKER_STUB_START_S": "30"})
    agent.start_replica(spec)
    loading = agent.until(spec.replica_id, ReplicaState.LOADING)
    os.kill(loading.pid, signal.SIGKILL)
    failed = agent.until(spec.replica_id, ReplicaState.FAILED, within_s=60)
    assert failed.error is not None and failed.error.retry
    assert failed.time.cold_us == failed.time.held_us


def test_replicas_of_a_stopped_agent_end_when_its_lease_lapses(start_agent: Callable[..., AgentProcess]) -> None:
    agent = start_agent("--orphan-s", "2")
    events = agent.events()
    status = agent.ready(stub_spec())
    next(e for e in events if e.replica is not None and e.replica.memory.rss_bytes)
    os.kill(agent.process.pid, signal.SIGSTOP)
    replica = psutil.Process(status.pid)
    wait_for(lambda: replica.status() == psutil.STATUS_ZOMBIE, what="the replica's end")
    os.kill(agent.process.pid, signal.SIGCONT)
    failed = agent.until(status.replica_id, ReplicaState.FAILED, within_s=60)
    assert failed.exit == "exit 3"


def test_the_next_agent_clears_what_its_predecessor_left(agent: AgentProcess) -> None:
    agent.ready(stub_spec())
    agent.process.kill()
    agent.process.wait()
    agent.start()
    assert agent.state().replicas == ()
    assert [p.pid for p in agent.serving()] == [agent.process.pid]
    status = agent.ready(stub_spec())
    with agent.connect(status) as link:
        link.outcome(link.submit(work()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_however_the_agent_ends_nothing_is_left(agent: AgentProcess, number: signal.Signals) -> None:
    agent.ready(stub_spec())
    agent.process.send_signal(number)
    agent.process.wait(10)
    wait_for(lambda: not agent.family(), 5.0, "the end of the family")


def test_a_stopped_agent_does_not_stop_its_replicas(start_agent: Callable[..., AgentProcess]) -> None:
    agent = start_agent("--orphan-s", "60")
    status = agent.ready(stub_spec({"STOKER_STUB_TOKEN_S": "0.001"}, max_context_tokens=100_000))
    os.kill(agent.process.pid, signal.SIGSTOP)
    try:
        with agent.connect(status) as link:
            request = link.submit(work(max_tokens=3000))
            assert link.outcome(request).last_seq == 3000
    finally:
        os.kill(agent.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("seed", range(6))
def test_kills_at_random_moments_leave_no_dead_replica_counted_as_living(agent: AgentProcess, seed: int) -> None:
    moments = random.Random(seed)
    specs = [stub_spec({"STOKER_STUB_START_S": f"{moments.random() / 5:.3f}"}) for _ in range(4)]
    for spec in specs:
        agent.start_replica(spec)
        time.sleep(moments.random() / 10)
        victims = [p for p in agent.serving() if p.pid != agent.process.pid]
        if victims:
            number = moments.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
            with contextlib.suppress(psutil.Error):
                moments.choice(victims).send_signal(number)
        if moments.random() < 0.3:
            agent.end_replica(moments.choice(specs[: specs.index(spec) + 1]).replica_id, grace_s=0)

    def settled() -> bool:
        """Every replica is ended, or ready with a process that answers."""
        for status in agent.state().replicas:
            if status.state in (ReplicaState.ENDED, ReplicaState.FAILED):
                assert status.exit or not status.pid
                continue
            if status.state is not ReplicaState.READY or psutil.Process(status.pid).status() == "stopped":
                return False
        return True

    wait_for(settled, what="rest")
    ready = {s.pid for s in agent.state().replicas if s.state is ReplicaState.READY}
    assert {p.pid for p in agent.serving()} == ready | {agent.process.pid}


def test_an_agent_lives_while_any_of_several_control_planes_reads_its_events(tmp_path: Path) -> None:
    with AgentProcess(tmp_path / "slot", "--orphan-s", "2") as agent:
        first, second = agent.events(), agent.events()
        states = [next(events).state for events in (first, second)]
        assert states[0] is not None and states[0] == states[1]
        spec = stub_spec()
        agent.start_replica(spec)
        for events in (first, second):
            assert any(
                event.replica is not None
                and (event.replica.replica_id, event.replica.state) == (spec.replica_id, ReplicaState.READY)
                for event in events
            )
        first.close()
        begin_s = time.monotonic()
        for _ in second:
            if time.monotonic() - begin_s > 4:
                break
        assert agent.process.poll() is None
        assert agent.replica(spec.replica_id).state is ReplicaState.READY
        second.close()
        agent.process.wait(10)
