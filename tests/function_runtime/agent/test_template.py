"""Warm workers and their template: killed or stopped at any moment, a replica still comes, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from function_runtime.protocol import Finished, ReplicaState, SlotState
from model_loader.forms.loading import NAME_AT_WORK
from tests.function_runtime.worker.conftest import TinyModel, tiny_model
from tests.support.replica_client import AgentProcess, wait_for, work

__all__ = ["tiny_model"]
pytestmark = pytest.mark.slow


@pytest.fixture
def warm_agent(start_agent: Callable[..., AgentProcess]) -> AgentProcess:
    agent = start_agent("--warm", "1")
    warm(agent)
    return agent


def warm(agent: AgentProcess, workers: int = 1) -> SlotState:
    def look() -> SlotState | None:
        state = agent.state()
        return state if state.warm_workers == workers and state.template_ready else None

    return wait_for(look, 90, f"{workers} warm workers")


def template_of(agent: AgentProcess) -> psutil.Process:
    """The first of those started with the template's command line; workers carry it too."""
    return next(p for p in agent.family() if p.name() == "stoker-template")


def waiting_workers(agent: AgentProcess) -> list[psutil.Process]:
    return [p for p in agent.family() if p.name() == "stoker-worker"]


def serves(agent: AgentProcess, model: TinyModel) -> bool:
    """A replica is made and answers; whether its worker had been waiting."""
    status = agent.ready(model.spec())
    with agent.connect(status) as link:
        request = link.submit(work(max_tokens=4))
        assert isinstance(link.outcome(request), Finished)
    return status.warm_worker


def test_a_waiting_worker_is_specialised_and_replaced(warm_agent: AgentProcess, tiny_model: TinyModel) -> None:
    assert template_of(warm_agent).num_threads() == 1
    assert serves(warm_agent, tiny_model)
    warm(warm_agent)
    assert serves(warm_agent, tiny_model)
    warm_agent.call("POST", "/v1/warm", {"workers": 0})
    wait_for(lambda: warm_agent.state().warm_workers == 0)
    assert not serves(warm_agent, tiny_model)
    ids = [r.replica_id for r in warm_agent.state().replicas]
    for replica_id in ids:
        warm_agent.end_replica(replica_id, grace_s=0)
        assert warm_agent.until(replica_id, ReplicaState.ENDED).memory_returned
    wait_for(lambda: not waiting_workers(warm_agent))


def test_replicas_outlive_their_template(warm_agent: AgentProcess, tiny_model: TinyModel) -> None:
    status = warm_agent.ready(tiny_model.spec())
    link = warm_agent.connect(status)
    old = template_of(warm_agent)
    old.kill()
    request = link.submit(work(max_tokens=4))
    assert isinstance(link.outcome(request), Finished)
    state = warm(warm_agent)
    assert state.template_ready and template_of(warm_agent).pid != old.pid
    assert warm_agent.replica(status.replica_id).state is ReplicaState.READY
    link.close()


def test_a_killed_agent_takes_template_and_workers_with_it_even_stopped(
    warm_agent: AgentProcess, tiny_model: TinyModel
) -> None:
    warm_agent.ready(tiny_model.spec())
    family = warm_agent.family()
    for process in family:
        if process.pid != warm_agent.process.pid:
            process.suspend()
    warm_agent.process.kill()
    warm_agent.process.wait()
    wait_for(lambda: not warm_agent.family(), 5.0, "the end of the family")
    assert len(family) >= 3


def test_a_stopped_waiting_worker_is_not_waited_for(warm_agent: AgentProcess, tiny_model: TinyModel) -> None:
    (stopped,) = waiting_workers(warm_agent)
    stopped.suspend()
    assert not serves(warm_agent, tiny_model)
    wait_for(lambda: not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE)


def test_a_killed_waiting_worker_is_replaced(warm_agent: AgentProcess, tiny_model: TinyModel) -> None:
    (old,) = waiting_workers(warm_agent)
    old.kill()
    wait_for(lambda: any(worker.pid != old.pid for worker in waiting_workers(warm_agent)))
    warm(warm_agent)
    assert serves(warm_agent, tiny_model)


def test_a_stopped_template_is_replaced(warm_agent: AgentProcess, tiny_model: TinyModel) -> None:
    warm_agent.call("POST", "/v1/warm", {"workers": 0})
    wait_for(lambda: not waiting_workers(warm_agent))
    template = template_of(warm_agent)
    os.kill(template.pid, signal.SIGSTOP)
    assert not serves(warm_agent, tiny_model)
    assert template_of(warm_agent).pid != template.pid


def test_a_template_killed_while_it_imports_is_started_again(
    start_agent: Callable[..., AgentProcess], tiny_model: TinyModel
) -> None:
    agent = start_agent()
    spec = tiny_model.spec()
    agent.start_replica(spec)
    template = wait_for(lambda: [p for p in agent.family() if "function_runtime.template" in p.cmdline()])[0]
    template.kill()
    assert agent.until(spec.replica_id, ReplicaState.READY, within_s=90).pid


def preparation_of(agent: AgentProcess) -> psutil.Process:
    found = wait_for(lambda: [p for p in agent.family() if p.name() == NAME_AT_WORK], what="a preparation")
    return found[0]


def test_a_stopped_preparation_is_given_up(start_agent: Callable[..., AgentProcess], tiny_model: TinyModel) -> None:
    agent = start_agent()
    spec = tiny_model.spec()
    agent.start_replica(spec)
    preparation_of(agent).suspend()
    failed = agent.until(spec.replica_id, ReplicaState.FAILED, within_s=60)
    assert failed.error is not None and failed.error.code == "prepare_failed" and failed.error.retry
    assert serves(agent, tiny_model) is False


def test_a_preparation_dies_with_its_agent_even_stopped(
    start_agent: Callable[..., AgentProcess], tiny_model: TinyModel
) -> None:
    agent = start_agent()
    agent.start_replica(tiny_model.spec())
    preparation_of(agent).suspend()
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: not agent.family(), 5.0, "the end of the family")
