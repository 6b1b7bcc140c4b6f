"""The slot: replicas, workers and the warm pool of one place, and the one task per replica that brings it up and down.

    start: worker (waiting | forked) and prepared checkpoint at the same time -> specialise -> ready
    end:   drain within its grace -> exit (or kill) -> lease of the pool released -> memory compared with the baseline

Whatever ends a replica, its process is reaped before its state says so. Limits: final states are kept for
`KEEP_FINAL` replicas, the oldest forgotten first.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from function_runtime import process
from function_runtime.agent.address import LOCAL, Address
from function_runtime.agent.checkpoints import Checkpoint, Checkpoints
from function_runtime.agent.children import Children
from function_runtime.agent.devices import Devices
from function_runtime.agent.events import EventHub, log
from function_runtime.agent.manifests import Manifests
from function_runtime.agent.memory import Baseline, sample
from function_runtime.agent.replica import Replica
from function_runtime.agent.worker_process import WorkerProcess
from function_runtime.agent.workers import STUB, Workers
from function_runtime.errors import LoadError, SlotError, SpecError, WorkerLost
from function_runtime.protocol import (
    PROTOCOL_VERSION,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    SlotEvent,
    SlotState,
)
from function_runtime.wire import Drain, LoadFailed, Prepared, ResizeKv, Specialise, StoreToken
from model_loader.errors import LoaderError
from model_loader.load_order import LoadOutcome

ATTEMPTS: Final = 3
KILL_AFTER_GRACE_S: Final = 8.0
"""Beyond its grace an ending replica has this long for its last flush and its exit."""
TOLD_WITHIN_S: Final = 2.0
"""What a replica whose weights never came has to tell its requests so."""
TOLD_BYTES: Final = 8 * 1024 * 1024
"""A change of the slot's memory by this much is told to who reads the events."""
DEVICE_TOLD_BYTES: Final = 256 * 1024 * 1024
"""The same for the free memory of a device, which others use as well."""
KEEP_FINAL: Final = 500
OpenPool = Callable[[Children, Callable[[], None]], Checkpoints]
"""Makes the pool of a slot, given its children and what to call when it changed."""


def _handed(checkpoint: Checkpoint) -> Prepared:
    return Prepared(checkpoint.path, checkpoint.arriving)


class Slot:
    def __init__(
        self, *, slot_id: str, directory: Path, warm: int, open_pool: OpenPool, address: Address = LOCAL
    ) -> None:
        self.slot_id = slot_id
        self._address = address
        self.directory = directory
        self.incarnation = secrets.token_hex(8)
        self.log_directory = directory / "replicas"
        self.events = EventHub()
        self.children = Children()
        self.workers = Workers(self.children, directory, warm, directory / "agent.log", self.slot_changed)
        self.pool = open_pool(self.children, self.slot_changed)
        self.manifests = Manifests(directory / "manifests")
        self.baseline = Baseline()
        self._devices = Devices()
        self._device_states = self._devices.read()
        self.memory_used_bytes = 0
        self.closing = False
        """It takes no replica any more."""
        self._replicas: dict[str, Replica] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told_memory: tuple[int, ...] = ()
        self._announced = False

    async def open(self) -> None:
        self.log_directory.mkdir(parents=True, exist_ok=True)
        process.adopt_orphans()
        for module in ("function_runtime.template", "function_runtime.stub"):
            for pid in process.processes_with_arguments(module, str(self.directory)):
                log(f"killing pid={pid}, left by an earlier agent")
                os.kill(pid, signal.SIGKILL)
        await self.pool.open()
        self.workers.refill_soon(0.0)

    # --- replicas -------------------------------------------------------------------------------------------------

    def get(self, replica_id: str) -> Replica | None:
        return self._replicas.get(replica_id)

    @property
    def live(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if not replica.is_final]

    def start_replica(self, spec: ReplicaSpec) -> ReplicaStatus:
        """Begins to make it and returns at once. Asked again for the same id, it says how that one is."""
        known = self._replicas.get(spec.replica_id)
        if known is not None:
            return known.status()
        if self.closing:
            raise SlotError("slot_terminating", f"the slot {self.slot_id} is ending: start it elsewhere", retry=True)
        if not spec.replica_id or "/" in spec.replica_id or spec.replica_id.startswith("."):
            raise SpecError(f"replica_id {spec.replica_id!r} is no plain name")
        here = self._with_own_manifest(spec)
        replica = Replica(spec, secrets.token_urlsafe(32), self._replica_changed, self._address.advertised, here)
        if spec.store_token:
            self.pool.use_store(spec.store_token, here.manifest_path)
        self._replicas[replica.id] = replica
        self._tasks[replica.id] = asyncio.create_task(self._live(replica), name=f"replica {replica.id}")
        replica.changed()
        return replica.status()

    def renew_store(self, tokens: Mapping[str, str]) -> int:
        """Replicas that run go on with these; how many there were."""
        taken = 0
        for replica_id, token in tokens.items():
            replica = self._replicas.get(replica_id)
            if replica is None or replica.is_final:
                continue
            self.pool.use_store(token, replica.here.manifest_path)
            if replica.state in (ReplicaState.READY, ReplicaState.DRAINING) and replica.worker is not None:
                replica.worker.say(StoreToken(token=token))
                taken += 1
        return taken

    def resize_kv(self, kv_bytes: Mapping[str, int]) -> int:
        """Shares of their device's memory, by replica; how many serve and were told."""
        told = 0
        for replica_id, share in kv_bytes.items():
            replica = self._replicas.get(replica_id)
            if replica is not None and replica.state is ReplicaState.READY and replica.worker is not None:
                replica.worker.say(ResizeKv(kv_bytes=share))
                told += 1
        return told

    def _with_own_manifest(self, spec: ReplicaSpec) -> ReplicaSpec:
        if not spec.manifest_sha256:
            return spec
        path = self.manifests.find(spec.identity, spec.manifest_sha256)
        return msgspec.structs.replace(spec, manifest_path=str(path))

    def end_replica(self, replica_id: str, grace_s: float, reason: str) -> ReplicaStatus | None:
        """Asks it to end; asked again, the new grace counts. None: no such replica."""
        replica = self._replicas.get(replica_id)
        if replica is None or replica.is_final:
            return replica.status() if replica is not None else None
        replica.end_reason = replica.end_reason or reason
        worker = replica.worker
        if replica.state in (ReplicaState.READY, ReplicaState.DRAINING) and worker is not None:
            worker.say(Drain(grace_s=grace_s, reason=reason))
            asyncio.get_running_loop().call_later(grace_s + KILL_AFTER_GRACE_S, worker.kill)
            if replica.state is ReplicaState.READY:
                replica.go(ReplicaState.DRAINING)
        elif not replica.ending:
            self._tasks[replica_id].cancel()
        return replica.status()

    async def _live(self, replica: Replica) -> None:
        """From the request for a replica to its end, whatever happens in between."""
        try:
            try:
                async with asyncio.timeout(replica.spec.start_timeout_s):
                    await self._start(replica)
            except TimeoutError:
                message = f"not ready within {replica.spec.start_timeout_s:g} s"
                raise LoadError("start_timeout", message, retry=True) from None
            if replica.worker is not None:
                await self._serve(replica, replica.worker)
        except SlotError as error:
            replica.fail(error)
        except LoaderError as error:
            replica.fail(LoadError(error.code, str(error), retry=error.retry))
        except asyncio.CancelledError:
            replica.end_reason = replica.end_reason or "the agent ends"
        except Exception as error:
            replica.fail(LoadError("agent_error", f"{type(error).__name__}: {error}", retry=True))
            raise
        finally:
            replica.ending = True
            await self._finish(replica)

    async def _serve(self, replica: Replica, worker: WorkerProcess) -> None:
        """Until its process is gone. Weights that are still on their way when it begins must come, or it ends with the
        load's error."""
        if replica.landing is not None:
            await asyncio.wait([replica.landing, worker.gone], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
            if replica.landing.done():
                await self._landed(replica, worker, replica.landing)
        ended = await asyncio.shield(worker.gone)
        if worker.load_failure is not None:
            failure = worker.load_failure
            raise LoadError(failure.code, failure.message, retry=failure.retry)
        if worker.farewell is None and not (replica.end_reason and ended == "exit 0"):
            raise WorkerLost(f"its process ended: {ended}")

    async def _landed(self, replica: Replica, worker: WorkerProcess, landing: asyncio.Task[LoadOutcome]) -> None:
        try:
            outcome = await landing
        except BaseException:
            # Whoever computes has seen it on the form's board, and tells its requests before it ends.
            await asyncio.wait([worker.gone], timeout=TOLD_WITHIN_S)
            worker.kill()
            raise
        replica.add_stage("arrive", replica.mappable_ns, tier=outcome.tier, detail=outcome.describe())
        replica.changed()

    async def _start(self, replica: Replica) -> None:
        self.workers.start_begins()
        checkpoint = asyncio.create_task(self._prepare(replica))
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    worker = await self._specialise(replica, checkpoint)
                    break
                except WorkerLost as lost:
                    if replica.state is not ReplicaState.STARTING:
                        raise
                    log(f"replica={replica.id} attempt={attempt} {lost.message}")
                    if replica.worker is not None:
                        replica.worker.kill()
                        await asyncio.shield(replica.worker.gone)
                    if attempt == ATTEMPTS:
                        raise
                    replica.worker = None
            await self._become_ready(replica, worker, checkpoint)
        finally:
            checkpoint.cancel()
            await asyncio.gather(checkpoint, return_exceptions=True)
            self.workers.start_ends()

    async def _prepare(self, replica: Replica) -> Checkpoint:
        if replica.spec.options.engine == STUB:
            return Checkpoint("", "none", 0)
        begin_ns = time.monotonic_ns()
        checkpoint = await self.pool.acquire(replica.here)
        replica.landing, replica.mappable_ns = checkpoint.landing, time.monotonic_ns()
        replica.add_stage("prepare", begin_ns, nbytes=checkpoint.nbytes, tier=checkpoint.tier, detail=checkpoint.detail)
        return checkpoint

    async def _specialise(self, replica: Replica, checkpoint: asyncio.Task[Checkpoint]) -> WorkerProcess:
        """A worker that has taken the spec. Raises `WorkerLost` for one that did not, and what the pool raised."""
        begin_ns = time.monotonic_ns()
        log_path = self.log_directory / f"{replica.id}.log"
        taking = asyncio.create_task(self.workers.take(replica.spec, log_path))
        try:
            await asyncio.wait([taking, checkpoint], return_when=asyncio.FIRST_COMPLETED)
            if checkpoint.done():
                await checkpoint
            worker, replica.warm_worker = await asyncio.shield(taking)
        except BaseException:
            taking.cancel()
            (outcome,) = await asyncio.gather(taking, return_exceptions=True)
            if isinstance(outcome, tuple):
                outcome[0].kill()
            raise
        replica.worker, replica.pid = worker, worker.pid
        replica.add_stage("worker", begin_ns, detail="waiting" if replica.warm_worker else "started")
        worker.say(
            Specialise(
                replica.here,
                replica.token,
                str(log_path),
                replica.created_ns,
                str(self.directory / "artifacts"),
                self._address.host,
                self._address.replica_ports,
            )
        )
        handed = checkpoint.done()
        if handed:
            worker.say(_handed(await checkpoint))
        await worker.until_taken()
        replica.go(ReplicaState.LOADING)
        if not handed:
            await asyncio.wait([checkpoint, worker.ready], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
            if checkpoint.done():
                worker.say(_handed(await checkpoint))
            elif worker.ready.exception() is not None:
                await worker.ready
        return worker

    async def _become_ready(
        self, replica: Replica, worker: WorkerProcess, checkpoint: asyncio.Task[Checkpoint]
    ) -> None:
        answer = await asyncio.shield(worker.ready)
        if isinstance(answer, LoadFailed):
            if replica.landing is not None:
                # What kept the weights from coming is the reason, not that they were not there.
                await asyncio.wait([replica.landing], timeout=TOLD_WITHIN_S)
                if replica.landing.done():
                    await replica.landing
            raise LoadError(answer.code, answer.message, retry=answer.retry)
        replica.stages.extend(answer.stages)
        replica.serves(answer.port, answer.kv_bytes)
        worker.on_kv = replica.changed
        replica.go(ReplicaState.READY)

    async def _finish(self, replica: Replica) -> None:
        worker = replica.worker
        begin_ns = time.monotonic_ns()
        if worker is not None:
            worker.kill()
            replica.exit = await asyncio.shield(worker.gone)
            if worker.farewell is not None:
                replica.stages.extend(worker.farewell.stages)
                begin_ns = worker.farewell_ns
            replica.add_stage("exit", begin_ns, detail=replica.exit)
        replica.close_time()
        self.pool.release(replica.id)
        begin_ns = time.monotonic_ns()
        replica.memory_returned = await self._memory_returned(replica)
        replica.add_stage("memory", begin_ns, nbytes=replica.memory.rss_bytes)
        log(f"replica={replica.id} ended exit={replica.exit!r} reason={replica.end_reason!r} error={replica.error}")
        replica.go(ReplicaState.FAILED if replica.error is not None else ReplicaState.ENDED)
        del self._tasks[replica.id]
        final = [r for r in self._replicas.values() if r.is_final]
        for forgotten in final[: max(0, len(final) - KEEP_FINAL)]:
            del self._replicas[forgotten.id]

    # --- memory ---------------------------------------------------------------------------------------------------

    @property
    def own_pids(self) -> frozenset[int]:
        """Agent, template, waiting workers and the waiting loader: what is there at zero."""
        pids = {os.getpid(), self.workers.template.pid, self.pool.loader_pid}
        pids |= {worker.pid for worker in self.workers.waiting}
        return frozenset(pids - {0})

    async def _memory_returned(self, replica: Replica) -> bool:
        return self.baseline.is_reached(replica.pid, await asyncio.to_thread(sample, self.own_pids))

    async def measure_memory(self) -> None:
        own, live = self.own_pids, self.live
        # NOTE: a template in the middle of its imports is small: its size then would be nobody's baseline.
        template = self.workers.template
        settled = (not template.pid or template.is_ready) and all(worker.is_warm for worker in self.workers.waiting)
        memory = await asyncio.to_thread(sample, own | {replica.pid for replica in live if replica.pid})
        self._device_states = await asyncio.to_thread(self._devices.read)
        replica_pids = {replica.pid for replica in live}
        self.memory_used_bytes = sum(
            held.proportional_bytes if pid in replica_pids else held.own_bytes for pid, held in memory.items()
        )
        if not live and not self.live and settled and own == self.own_pids:
            self.baseline.learn(memory)
        for replica in live:
            held = memory.get(replica.pid)
            if held is not None and held.resident_bytes and not replica.is_final:
                replica.memory = held.as_replica()
        free = (device.free_bytes // DEVICE_TOLD_BYTES for device in self._device_states)
        told = (self.memory_used_bytes // TOLD_BYTES, self.baseline.bytes // TOLD_BYTES, *free)
        if told != self._told_memory:
            self._told_memory = told
            self.slot_changed()

    # --- the whole ------------------------------------------------------------------------------------------------

    def state(self) -> SlotState:
        entries = self.pool.entries()
        return SlotState(
            slot_id=self.slot_id,
            agent_pid=os.getpid(),
            incarnation=self.incarnation,
            template_ready=self.workers.template.is_ready,
            warm_workers=self.workers.warm_count,
            warm_target=self.workers.target,
            pool_budget_bytes=self.pool.budget_bytes,
            pool_used_bytes=sum(entry.nbytes for entry in entries),
            pool=entries,
            replicas=tuple(replica.status() for replica in self._replicas.values()),
            memory_baseline_bytes=self.baseline.bytes,
            memory_used_bytes=self.memory_used_bytes,
            template_import_us=self.workers.template.import_us,
            loads=self.pool.loads,
            devices=self._device_states,
            terminating=self.closing,
            protocol=PROTOCOL_VERSION,
            disk=self.pool.on_disk,
        )

    def _replica_changed(self, replica: Replica) -> None:
        self.events.publish(SlotEvent(replica=replica.status()))

    def slot_changed(self) -> None:
        """Announces the slot's own change once, however many came together."""
        if not self._announced:
            self._announced = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._announced = False
        self.workers.map_ahead(self.pool.ready_paths())
        self.events.publish(SlotEvent(state=self.state()))

    def close_if_idle(self) -> None:
        """Takes no replica from now on. Raises SlotError where there is one: whoever asked knew less."""
        live = self.live
        if live:
            raise SlotError("slot_busy", f"{len(live)} replicas are here, {live[0].id} among them", retry=False)
        self.closing = True

    async def close(self, grace_s: float, reason: str) -> None:
        """Ends every replica within the grace, then the workers that wait, and the template. Whoever reads the events
        hears at once that nothing new goes here."""
        self.closing = True
        self._announce()
        tasks = list(self._tasks.values())
        for replica in self.live:
            self.end_replica(replica.id, grace_s, reason)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.workers.close()
        await self.pool.close()
        self.children.kill_all()
