"""A tiny real model, imported once, an agent that serves it, and specs for replicas of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from function_runtime.protocol import EngineOptions, ReplicaSpec
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from tests.support.checkpoints import make_tiny_llama
from tests.support.replica_client import AgentProcess, new_replica_id


class TinyModel:
    """Without a prefix cache a repeated prompt is computed as the first time, so that equal means byte for byte."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def spec(self, kv_store: Path | None = None, **options: Any) -> ReplicaSpec:
        options = {"prefix_cache": False, "threads": 1, "kv_bytes": 64 << 20, **options}
        return ReplicaSpec(
            replica_id=new_replica_id(),
            function="tiny",
            revision=1,
            tenant="default",
            manifest_path=str(self.manifest.path),
            identity=self.manifest.identity,
            options=EngineOptions(**options),
            kv_store=f"file://{kv_store}" if kv_store else "",
        )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    root = tmp_path_factory.mktemp("tiny")
    checkpoint = make_tiny_llama(root / "model", layers=4, hidden=128, heads=4, kv_heads=2)
    return TinyModel(import_model(f"file://{checkpoint}", root / "models"))


@pytest.fixture(scope="module")
def native_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent for a module's tests, because its template imports torch once. Stored KV is loaded whenever there is
    any: what is quicker on a busy machine is no matter of theirs."""
    environment = {"STOKER_KV_LOAD": "always"}
    with AgentProcess(tmp_path_factory.mktemp("native") / "slot", env=environment) as agent:
        yield agent
