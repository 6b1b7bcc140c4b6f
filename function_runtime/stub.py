"""A worker with a fake engine: the whole protocol without torch or weights, for tests of what stands around a replica.

    python -m function_runtime.stub --control-fd N --agent-pid P --slot-dir D

Tokens are a pure function of (prompt, seed, choice, position); `STOKER_STUB_TOKEN_S` is the time one step takes,
`STOKER_STUB_START_S` delays the start, `STOKER_STUB_FAIL` (code) makes it fail. Limits: no KV, no stop strings.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from function_runtime import process, worker
from function_runtime.clock import Stopwatch
from function_runtime.engine_like import (
    Admitted,
    EngineLike,
    EngineStats,
    KvLayout,
    RequestEnd,
    RequestTokens,
    RestoredKv,
    SealedRangeLike,
    Step,
)
from function_runtime.errors import EngineFault, LoadError
from function_runtime.inbox import Inbox
from function_runtime.kv_service import KvService
from function_runtime.protocol import FinishReason, ReplicaSpec, TokenEvent, Work
from function_runtime.serving import Serving

if TYPE_CHECKING:
    from function_runtime.kv.arrival import Arrival

VOCABULARY: Final = 49152
CONTEXT_TOKENS: Final = 8192


def stub_token(prompt: tuple[int, ...], seed: int, choice: int, position: int) -> int:
    """Token `position` (from 0) of a choice."""
    packed = b"".join(token.to_bytes(4, "little") for token in (*prompt, choice, position)) + seed.to_bytes(8, "little")
    return zlib.crc32(packed) % VOCABULARY


class _Request:
    def __init__(self, work: Work) -> None:
        self.work = work
        self.made = [0] * work.sampling.n
        self.open = [True] * work.sampling.n
        self.seq = len(work.produced) + 1
        for event in work.produced:
            self.made[event.choice] += 1
            if event.finish is not None:
                self.open[event.choice] = False
        self.first = True


class StubEngine:
    def __init__(self, spec: ReplicaSpec) -> None:
        self._step_s = float(os.environ.get("STOKER_STUB_TOKEN_S", "0"))
        self._max_requests = spec.options.max_requests
        self.max_context_tokens = spec.options.max_context_tokens or CONTEXT_TOKENS
        self._requests: dict[str, _Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def kv_layout(self) -> KvLayout | None:
        return None

    @property
    def stats(self) -> EngineStats:
        running = min(len(self._requests), self._max_requests)
        return EngineStats(running, len(self._requests) - running, running, self._max_requests)

    def submit(self, work: Work, restored: RestoredKv | Arrival | None) -> Admitted:
        if len(work.prompt) + work.sampling.max_tokens > self.max_context_tokens:
            raise EngineFault("context_length_exceeded", "prompt and answer exceed the context", retry=False)
        self._requests[work.request_id] = _Request(work)
        return Admitted(recomputed_tokens=len(work.prompt) + len(work.produced) if work.produced else 0)

    def cached_prefix(self, work: Work) -> int:
        return 0

    def while_waiting(self, call: Callable[[], None]) -> None:
        pass

    def cancel(self, request_id: str) -> bool:
        return self._requests.pop(request_id, None) is not None

    def step(self) -> Step:
        begin_ns = time.monotonic_ns()
        if self._step_s:
            time.sleep(self._step_s)
        tokens: list[RequestTokens] = []
        finished: list[RequestEnd] = []
        prefilled: set[str] = set()
        for request in list(self._requests.values())[: self._max_requests]:
            work = request.work
            events = tuple(self._next(request, choice) for choice, is_open in enumerate(request.open) if is_open)
            if events:
                ends = (0, len(work.prompt)) if request.first else ()
                tokens.append(RequestTokens(work.request_id, work.epoch, request.seq, events, 0, ends))
                request.seq += len(events)
            if request.first:
                prefilled.add(work.request_id)
                request.first = False
            if not any(request.open):
                finished.append(RequestEnd(work.request_id, work.epoch, request.seq - 1))
                del self._requests[work.request_id]
        busy_us = (time.monotonic_ns() - begin_ns) // 1000
        ids = [t.request_id for t in tokens]
        shares = [busy_us // len(ids) + (index < busy_us % len(ids)) for index in range(len(ids))] if ids else []
        device = {i: (us, 0) if i in prefilled else (0, us) for i, us in zip(ids, shares, strict=True)}
        return Step(tokens=tuple(tokens), finished=tuple(finished), device_us=device)

    def _next(self, request: _Request, choice: int) -> TokenEvent:
        work, position = request.work, request.made[choice]
        token = stub_token(work.prompt, work.sampling.seed, choice, position)
        request.made[choice] += 1
        last = request.made[choice] >= work.sampling.max_tokens
        if last:
            request.open[choice] = False
        return TokenEvent(
            choice=choice, token_id=token, text=f" t{token}", finish=FinishReason.LENGTH if last else None
        )

    def resize_kv(self, kv_bytes: int) -> int:
        return 0

    def export_kv(self, request_id: str, choice: int, start: int, end: int) -> memoryview:
        raise EngineFault("kv_unsupported", "the stub engine has no KV", retry=False)

    def kv_tail(self, request_id: str) -> Sequence[SealedRangeLike]:
        return ()


class StubBuilder:
    def warm_up(self) -> None:
        pass

    def map_ahead(self, paths: Sequence[Path]) -> bool:
        return False

    def begin(self, spec: ReplicaSpec, artifacts_dir: Path | None) -> None:
        pass

    def end(self) -> None:
        pass

    def build(
        self, spec: ReplicaSpec, prepared: Path | None, watch: Stopwatch, arriving: Path | None = None
    ) -> EngineLike:
        with watch.run("build"):
            time.sleep(float(os.environ.get("STOKER_STUB_START_S", "0")))
            code = os.environ.get("STOKER_STUB_FAIL")
            if code:
                raise LoadError(code, f"the stub engine was told to fail with {code}", retry=False)
            return StubEngine(spec)

    def open_kv(
        self, spec: ReplicaSpec, engine: EngineLike, inbox: Inbox, serving: Callable[[], Serving]
    ) -> KvService | None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="function_runtime.stub")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--slot-dir", required=True)
    arguments = parser.parse_args()
    if not process.die_with_parent(arguments.agent_pid):
        os._exit(worker.EXIT_AGENT_GONE)
    process.set_name("stoker-stub")
    worker.run(socket.socket(fileno=arguments.control_fd), StubBuilder(), wait=False)


if __name__ == "__main__":
    main()
