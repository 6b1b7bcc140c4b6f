"""Replicas that begin while their checkpoint is still on its way, and what becomes of them when it does not come."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from function_runtime.protocol import Failed, Finished, Peer, ReplicaState, Stage
from model_loader.forms.loading import NAME_AT_WORK, RATES_NAME
from model_loader.importer import import_model
from model_loader.recipe import prepare
from tests.function_runtime.worker.conftest import TinyModel
from tests.model_loader.test_forms import FakeAgent
from tests.support.checkpoints import make_tiny_llama
from tests.support.replica_client import AgentProcess, wait_for, work

PROMPT = tuple(range(10, 60))


@pytest.fixture(scope="module")
def wide_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes long enough to prepare that it can be caught at it."""
    folder = tmp_path_factory.mktemp("wide")
    return make_tiny_llama(
        folder / "model", layers=6, hidden=1024, heads=8, kv_heads=4, vocab=4000, dtype="bfloat16", seed=4
    )


@pytest.fixture
def wide(wide_source: Path, tmp_path: Path) -> TinyModel:
    return TinyModel(import_model(f"file://{wide_source}", tmp_path / "models"))


def half_written(agent: AgentProcess) -> list[Path]:
    return [path for path in agent.pool_directory.glob(".*.prepared.*.tmp") if path.stat().st_size]


@contextlib.contextmanager
def loader_held(agent: AgentProcess) -> Iterator[psutil.Process]:
    """The loader, stopped in the middle. It runs for a moment now and then: the agent ends what stands still."""
    wait_for(lambda: half_written(agent), 60, "a form that arrives")
    loader = next(p for p in agent.family() if p.name() == NAME_AT_WORK)
    over = threading.Event()

    def hold() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.wait(0.4):
                os.kill(loader.pid, signal.SIGCONT)
                time.sleep(0.003)
                os.kill(loader.pid, signal.SIGSTOP)

    os.kill(loader.pid, signal.SIGSTOP)
    holding = threading.Thread(target=hold)
    holding.start()
    try:
        if not half_written(agent):
            pytest.skip("the load was over before it could be stopped")
        yield loader
    finally:
        over.set()
        holding.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(loader.pid, signal.SIGCONT)


@pytest.fixture(scope="module", autouse=True)
def warm(native_agent: AgentProcess, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The template has imported everything: a worker is there at once."""
    folder = tmp_path_factory.mktemp("warm")
    model = TinyModel(import_model(f"file://{make_tiny_llama(folder / 'model')}", folder / "models"))
    first = native_agent.ready(model.spec(), within_s=120)
    native_agent.end_replica(first.replica_id, grace_s=0)
    native_agent.until(first.replica_id, ReplicaState.ENDED)


def test_a_replica_is_ready_before_its_weights_are_and_answers_when_they_come(
    native_agent: AgentProcess, wide: TinyModel
) -> None:
    status = native_agent.start_replica(wide.spec())
    with loader_held(native_agent):
        ready = native_agent.until(status.replica_id, ReplicaState.READY, within_s=120)
        assert half_written(native_agent)
        link = native_agent.connect(ready)
        request = link.submit(work(PROMPT, max_tokens=3, ignore_eos=True, write_kv=False))
    with link:
        assert isinstance(link.outcome(request), Finished)
        assert len(link.tokens(request)) == 3

    def stages() -> dict[str, Stage]:
        (status,) = [r for r in native_agent.state().replicas if r.replica_id == ready.replica_id]
        return {stage.name: stage for stage in status.stages}

    wait_for(lambda: "arrive" in stages(), 120, "the end of the load")
    assert stages()["prepare"].tier == "arriving"
    assert "made" in stages()["arrive"].detail
    native_agent.end_replica(ready.replica_id, grace_s=0)
    native_agent.until(ready.replica_id, ReplicaState.ENDED)


def test_the_loaders_death_fails_the_request_so_that_it_is_tried_again_and_ends_the_replica(
    native_agent: AgentProcess, wide_source: Path, tmp_path: Path
) -> None:
    other = make_tiny_llama(
        tmp_path / "other", layers=6, hidden=1024, heads=8, kv_heads=4, vocab=4000, dtype="bfloat16", seed=9
    )
    model = TinyModel(import_model(f"file://{other}", tmp_path / "models"))
    status = native_agent.start_replica(model.spec())
    with loader_held(native_agent) as loader:
        ready = native_agent.until(status.replica_id, ReplicaState.READY, within_s=120)
        link = native_agent.connect(ready)
        request = link.submit(work(PROMPT, max_tokens=3, write_kv=False))
        os.kill(loader.pid, signal.SIGKILL)
    with link:
        outcome = link.outcome(request)
        assert isinstance(outcome, Failed)
        assert outcome.retry
        assert not link.tokens(request)
    failed = native_agent.until(ready.replica_id, ReplicaState.FAILED, within_s=120)
    assert failed.error is not None and failed.error.retry
    assert not half_written(native_agent)
    again = native_agent.ready(model.spec(), within_s=120)
    native_agent.end_replica(again.replica_id, grace_s=0)
    native_agent.until(again.replica_id, ReplicaState.ENDED)


def test_a_checkpoint_altered_since_its_import_ends_the_replica_with_the_loads_error(
    native_agent: AgentProcess, tmp_path: Path
) -> None:
    source = make_tiny_llama(tmp_path / "altered", layers=2, hidden=512, heads=8, kv_heads=4, vocab=6000, seed=8)
    model = TinyModel(import_model(f"file://{source}", tmp_path / "models"))
    path = source / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 10)
        file.write(b"\x77" * 5)
    status = native_agent.start_replica(model.spec())
    failed = native_agent.until(status.replica_id, ReplicaState.FAILED, within_s=120)
    assert failed.error is not None
    assert failed.error.code == "model_integrity_failed"
    assert "model.safetensors" in failed.error.message


def test_an_altered_checkpoint_whose_form_a_peer_has_is_served_after_an_attempt_or_two(
    native_agent: AgentProcess, tmp_path: Path
) -> None:
    source = make_tiny_llama(tmp_path / "altered", layers=2, hidden=256, seed=11)
    model = TinyModel(import_model(f"file://{source}", tmp_path / "models"))
    prepare(model.manifest, "float32", tmp_path / "form")
    path = source / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 10)
        file.write(b"\x77" * 5)
    (native_agent.pool_directory / RATES_NAME).write_text(json.dumps({"make": 1e12, "copy as is": 1e12}))
    peer = FakeAgent((tmp_path / "form").read_bytes())
    try:
        for attempt in (1, 2, 3):
            spec = msgspec.structs.replace(model.spec(), peers=(Peer(peer.address.url, peer.address.token),))
            status = native_agent.start_replica(spec)
            settled = native_agent.until(status.replica_id, ReplicaState.READY, ReplicaState.FAILED, within_s=120)
            if settled.state is ReplicaState.READY:
                with native_agent.connect(settled) as link:
                    outcome = link.outcome(link.submit(work(PROMPT, max_tokens=3, write_kv=False)))
                if isinstance(outcome, Finished):
                    break
                assert isinstance(outcome, Failed) and outcome.retry and attempt < 3, outcome
            else:
                assert settled.error is not None and settled.error.retry and attempt < 3, settled.error
        else:
            pytest.fail("the form of the peer was never used")
    finally:
        peer.shutdown()
        peer.server_close()
        (native_agent.pool_directory / RATES_NAME).unlink()
    entry = next(entry for entry in native_agent.state().pool if entry.identity == model.manifest.identity)
    assert "copied from peer" in entry.load and "make: " in entry.load
    native_agent.end_replica(settled.replica_id, grace_s=0)
    native_agent.until(settled.replica_id, ReplicaState.ENDED, ReplicaState.FAILED)
