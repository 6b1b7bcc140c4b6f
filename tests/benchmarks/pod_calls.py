"""From a request that finds no slot to the call that makes a pod, and what watching a large cluster at rest costs.

    python -m tests.benchmarks.pod_calls [--tries 30]

A whole control plane in this process over a stand-in of the API server, so that what is measured is Stoker's own part.
Limits: the network and the API server come on top; processor time is of this process, clients included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane.backends import link
from control_plane.backends.kubernetes import home
from control_plane.backends.kubernetes.api import PODS, SLOT_POOLS, ClusterApi
from control_plane.backends.kubernetes.pool_status import PoolStatus
from control_plane.backends.kubernetes.tending import Tending
from control_plane.settings import KubernetesSettings, Settings, SlotSettings
from model_loader.importer import import_model
from tests.control_plane.backends.kubernetes.fake_cluster import FakeApi, backend_of, listening, running, slot_pool
from tests.control_plane.backends.town import Listener
from tests.control_plane.gateway.conftest import Plane, body, until
from tests.control_plane.gateway.fakes import Behaviour, FakeSlot
from tests.control_plane.gateway.test_pods import PodKubelet, agent_client
from tests.support.checkpoints import make_tiny_llama

SLOTS, REPLICAS = 200, 2000


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[tuple[Plane, FakeApi]]:
    manifest = import_model(f"file://{make_tiny_llama(folder / 'tiny')}", folder / "models")
    api = FakeApi()
    kubelet = PodKubelet(api, Behaviour())

    async def connect(settings: KubernetesSettings) -> Any:
        return api

    ClusterApi.connect = connect  # type: ignore[method-assign, assignment]
    link.AgentClient = agent_client(kubelet.slots)  # type: ignore[misc]
    home.listens = listening(lambda: bool(kubelet.slots))
    (folder / "secret").write_text("a secret of thirty-two characters\n")
    settings = replace(
        Settings(data_dir=folder / "data"),
        kubernetes=KubernetesSettings(backend="kubernetes", release="rel"),
        slot=SlotSettings(agent_secret_file=str(folder / "secret")),
    )
    plane = Plane(settings, FakeSlot(), (f"file://{folder / 'tiny'}", manifest.identity, str(manifest.path)))
    plane.backend = None  # type: ignore[assignment]
    api.put(SLOT_POOLS, slot_pool(perNode=0, most=999))
    await plane.start()
    yield plane, api
    await plane.stop()


async def call_times(tries: int) -> list[float]:
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with service(Path(folder)) as (plane, api):
            created: list[float] = []
            api.on_change.append(
                lambda resource, kind, pod: (
                    created.append(time.perf_counter()) if resource == PODS and kind == "ADDED" else None
                )
            )
            for number in range(tries):
                pod = {"slotPool": "default", "trustDomain": f"team-{number}"}  # a class of its own: no slot is there
                await plane.deploy(f"fn-{number}", pod=pod)
                created.clear()
                begin_s = time.perf_counter()
                async with plane.post(body(model=f"fn-{number}")) as response:
                    assert response.status == 200, await response.text()
                found.append(created[0] - begin_s)
    return found


async def at_rest() -> tuple[float, int]:
    """Processor seconds that one second of watching costs, and what is written in it."""
    api = FakeApi()
    api.put(SLOT_POOLS, slot_pool(most=SLOTS))
    backend = backend_of(api)
    backend._link = lambda name, pod: None  # type: ignore[method-assign]
    await backend.start(Listener())
    await until(lambda: backend.classes and backend.synced)
    labels = {"app.kubernetes.io/instance": "rel", "app.kubernetes.io/component": "slot",
              "stoker.dev/slot-pool": "default", "stoker.dev/class": backend.classes[0].name}  # fmt: skip
    on = {f"slot-{n}": [f"rep-{n}-{each}" for each in range(REPLICAS // SLOTS)] for n in range(SLOTS)}
    for name in on:
        metadata = {"name": name, "labels": labels}
        api.put(PODS, {"metadata": metadata, "spec": {"nodeName": "n"}, "status": running(ready=True)})
    await until(lambda: len(backend.progress) == SLOTS)
    for name in on:
        backend.answers(name, True)
    in_flight = {replica: 2 for replicas in on.values() for replica in replicas}
    tending = Tending(backend, lambda: True, on.__getitem__, lambda: in_flight)
    status = PoolStatus(backend, lambda: True, on.__getitem__)
    await tending.look()
    await status.look()
    writes, rounds, begin_s = api.writes, 50, time.process_time()
    for _ in range(rounds):
        await tending.look()
        await status.look()
    spent_s = (time.process_time() - begin_s) / rounds
    await backend.close(end_agents=False, grace_s=0)
    return spent_s, api.writes - writes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=30)
    tries = parser.parse_args().tries
    times_ms = sorted(each * 1000 for each in asyncio.run(call_times(tries)))
    print(f"request to create call: median {statistics.median(times_ms):.1f} ms, "
          f"worst {times_ms[-1]:.1f} ms of {tries}")  # fmt: skip
    spent_s, writes = asyncio.run(at_rest())
    print(f"{SLOTS} slots, {REPLICAS} replicas at rest: {spent_s * 100:.2f} % of a core, {writes} writes")


if __name__ == "__main__":
    main()
