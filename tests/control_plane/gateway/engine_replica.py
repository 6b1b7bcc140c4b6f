"""A fake replica with a real engine in it: what it says of a request is what a worker would say, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from function_runtime.engine.engine import Engine
from function_runtime.protocol import Accepted, DeviceTime, EngineOptions, Failed, Finished, ReplicaSpec, Tokens, Work
from model_loader.manifest import Manifest
from model_loader.recipe import prepare
from model_loader.tokenizer import Tokenizer
from tests.control_plane.gateway.fakes import Behaviour, FakeReplica

OPTIONS = EngineOptions(threads=1, kv_bytes=8 << 20, step_tokens=16, prefix_cache=False)


class EngineReplica(FakeReplica):
    """Serves one request at a time, so that none is computed in a batch with another."""

    engine: Engine
    steps = 0

    async def _run(self, work: Work) -> None:
        behaviour = self.behaviour
        self.engine.submit(work)
        self._tell(work, Accepted(work.request_id, work.epoch, recomputed_tokens=len(work.produced)))
        seq = len(work.produced) + 1
        while self.engine.has_work:
            while behaviour.silent or (behaviour.stop_after is not None and seq > behaviour.stop_after):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await asyncio.sleep(behaviour.token_s)
            output = self.engine.step()
            self.steps += 1
            for batch in output.tokens:
                seq = batch.first_seq + len(batch.events)
                ends = batch.prefill_ends
                self._tell(
                    work, Tokens(work.request_id, work.epoch, batch.first_seq, batch.events, DeviceTime(1, 1), 0, ends)
                )
            for _, _, error in output.failed:
                self._tell(
                    work, Failed(work.request_id, work.epoch, error.code, error.message, error.retry, DeviceTime())
                )
            for end in output.finished:
                self._tell(work, Finished(work.request_id, work.epoch, end.last_seq, end.cancelled, DeviceTime(1, 1)))


def replica_maker(manifest_path: str, folder: Path) -> Callable[[ReplicaSpec, Behaviour], FakeReplica]:
    """Makes replicas of an imported checkpoint, each with a fresh engine."""
    manifest = Manifest.load(Path(manifest_path))
    prepared = folder / "prepared"
    prepare(manifest, "float32", prepared)

    def make(spec: ReplicaSpec, behaviour: Behaviour) -> FakeReplica:
        replica = EngineReplica(spec, behaviour)
        tokenizer = Tokenizer.load(manifest.directory)
        replica.engine = Engine.load(prepared, manifest.config, tokenizer, manifest.eos_token_ids, OPTIONS)
        return replica

    return make
