"""Newer tokens of the object store reach the replicas that run, and what loads for them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from function_runtime.agent.pool import MOST_TOKENS, Pool
from function_runtime.agent.slot import Slot
from function_runtime.protocol import ReplicaState
from function_runtime.serving import Serving
from function_runtime.wire import StoreToken
from model_loader.load_order import LoadOrder


def replica(state: ReplicaState) -> Any:
    said: list[Any] = []
    final = state in (ReplicaState.ENDED, ReplicaState.FAILED)
    here = SimpleNamespace(manifest_path=f"/m/{state.value}")
    return SimpleNamespace(state=state, is_final=final, here=here, worker=SimpleNamespace(say=said.append, said=said))


async def test_replicas_that_serve_are_told_and_those_that_ended_are_not(tmp_path: Path) -> None:
    used: list[tuple[str, str]] = []
    pool: Any = SimpleNamespace(use_store=lambda token, path: used.append((path, token)))
    slot = Slot(slot_id="s", directory=tmp_path, warm=0, open_pool=lambda children, changed: pool)
    states = (ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.LOADING, ReplicaState.ENDED)
    slot._replicas = {state.value: replica(state) for state in states}
    assert slot.renew_store({**{state.value: f"new {state.value}" for state in states}, "unknown": "x"}) == 2
    told = {name: each.worker.said for name, each in slot._replicas.items()}
    assert told == {
        "ready": [StoreToken("new ready")],
        "draining": [StoreToken("new draining")],
        "loading": [],  # it has no ear yet; what loads for it has the new one
        "ended": [],
    }
    assert used == [(f"/m/{name}", f"new {name}") for name in ("ready", "draining", "loading")]


def test_a_replica_goes_on_with_the_token_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_STORE_TOKEN", "old")
    Serving._obey(SimpleNamespace(), StoreToken("new"))  # type: ignore[arg-type]
    assert os.environ["STOKER_STORE_TOKEN"] == "new"


async def test_each_checkpoint_is_loaded_with_its_own_token(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "pool", 1 << 20, SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    pool.use_store("for a", "/m/a")
    pool.use_store("for b", "/m/b")
    order = LoadOrder(Path("/m/a"), "float32", tmp_path / "out.prepared", lambda *_: None)
    assert pool._form_order(order).store_token == "for a"
    for number in range(MOST_TOKENS):
        pool.use_store("another", f"/m/{number}")
    assert pool._form_order(order).store_token == "" and len(pool._store_tokens) == MOST_TOKENS
    await asyncio.sleep(0)
