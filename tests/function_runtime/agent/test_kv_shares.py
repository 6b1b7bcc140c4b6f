"""Another share of a device's memory reaches the replicas that serve, and what came of it is told."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from function_runtime.agent.slot import Slot
from function_runtime.agent.worker_process import WorkerProcess
from function_runtime.protocol import ReplicaState, ReplicaTime
from function_runtime.wire import Report, ResizeKv, pack


async def test_replicas_that_serve_are_told_and_others_are_not(tmp_path: Path) -> None:
    pool: Any = SimpleNamespace()
    slot = Slot(slot_id="s", directory=tmp_path, warm=0, open_pool=lambda children, changed: pool)
    said: dict[str, list[Any]] = {}

    def replica(state: ReplicaState) -> Any:
        said[state.value] = []
        return SimpleNamespace(state=state, worker=SimpleNamespace(say=said[state.value].append))

    states = (ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.LOADING, ReplicaState.ENDED)
    slot._replicas = {state.value: replica(state) for state in states}
    assert slot.resize_kv({**{state.value: 7 for state in states}, "unknown": 7}) == 1
    assert said == {"ready": [ResizeKv(7)], "draining": [], "loading": [], "ended": []}


async def test_a_report_of_another_amount_is_news() -> None:
    ours, theirs = socket.socketpair()
    children: Any = SimpleNamespace()
    worker, news = WorkerProcess(ours, children), asyncio.Queue[int]()
    worker.on_kv = lambda: news.put_nowait(worker.report.kv_bytes if worker.report is not None else 0)
    for kv_bytes in (40, 40, 20, 60):
        theirs.sendall(pack(Report(ReplicaTime(), 0, 0, kv_bytes=kv_bytes)))
    assert [await asyncio.wait_for(news.get(), 10) for _ in range(2)] == [20, 60]
    assert news.empty()
    theirs.close()
    worker.kill()
