"""A worker's life: born, waiting, specialised into a replica, serving, gone. A replica ends as a process.

    Born -> (Specialise, Prepared) -> Taken -> build -> Ready -> serve -> Farewell -> exit

Runs single-threaded after a fork of the template (or in a process of its own, for engines that need no torch).
Exit codes: 0 drained, 1 could not become ready or the engine broke, 3 the agent is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn, Protocol

from function_runtime.agent_channel import AgentChannel, AgentGone
from function_runtime.clock import LifeClock, Stopwatch
from function_runtime.engine_like import EngineLike, kv_bytes_of
from function_runtime.errors import EngineFault, SlotError
from function_runtime.inbox import Inbox
from function_runtime.kv_service import KvService
from function_runtime.printing import forgive
from function_runtime.protocol import ReplicaSpec, StoreTotals
from function_runtime.serving import Serving
from function_runtime.wire import (
    AgentWord,
    Born,
    Drain,
    Farewell,
    LoadFailed,
    MapAhead,
    Ping,
    Prepared,
    Ready,
    Specialise,
    Taken,
    Warm,
)
from model_loader.errors import LoaderError
from model_loader.objects.location import TOKEN_VARIABLE

EXIT_DRAINED: Final = 0
EXIT_FAILED: Final = 1
EXIT_AGENT_GONE: Final = 3
BACKLOG: Final = 128


class EngineBuilder(Protocol):
    """Makes one kind of engine, in two steps so that what needs no weights runs while they are prepared."""

    def warm_up(self) -> None:
        """What a waiting worker may do ahead of knowing its model."""
        ...

    def map_ahead(self, paths: Sequence[Path]) -> bool:
        """Maps some more of these prepared forms and lets go of others; a few milliseconds a call. False: all done."""
        ...

    def begin(self, spec: ReplicaSpec, artifacts_dir: Path | None) -> None: ...
    def build(
        self, spec: ReplicaSpec, prepared: Path | None, watch: Stopwatch, arriving: Path | None = None
    ) -> EngineLike:
        """`arriving`: the name of the prepared form for as long as it is incomplete."""
        ...

    def open_kv(
        self, spec: ReplicaSpec, engine: EngineLike, inbox: Inbox, serving: Callable[[], Serving]
    ) -> KvService | None: ...
    def end(self) -> None:
        """The replica drained: what it made that others can use is kept."""
        ...


class _Words:
    """The agent's words one by one, until the loop runs: pings are of no matter, mapping ahead is done on the way."""

    def __init__(self, channel: AgentChannel, builder: EngineBuilder) -> None:
        self._channel = channel
        self._builder = builder
        self._waiting: list[AgentWord] = []
        self._ahead: list[Path] = []
        self._has_more = False

    def next(self) -> AgentWord:
        while True:
            while self._waiting:
                word = self._waiting.pop(0)
                if isinstance(word, MapAhead):
                    self._ahead = [Path(path) for path in word.paths]
                    self._has_more = True
                elif not isinstance(word, Ping):
                    return word
            while self._has_more and not select.select([self._channel.socket], [], [], 0)[0]:
                self._has_more = self._builder.map_ahead(self._ahead)
            self._waiting = self._channel.receive()


def run(control: socket.socket, builder: EngineBuilder, *, wait: bool) -> NoReturn:
    """Never returns. The caller has bound this process's life to the agent's. A worker that will `wait` uses the time
    to warm itself up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    channel = AgentChannel(control)
    code = EXIT_FAILED
    try:
        channel.say(Born(pid=os.getpid()))
        if wait:
            builder.warm_up()
            channel.say(Warm())
        code = _live(channel, builder)
    except AgentGone:
        code = EXIT_AGENT_GONE
    except BaseException:
        traceback.print_exc()
    finally:
        # Interpreter and library teardown would only delay the return of the memory.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _live(channel: AgentChannel, builder: EngineBuilder) -> int:
    words = _Words(channel, builder)
    word = words.next()
    if not isinstance(word, Specialise):
        return EXIT_DRAINED
    spec = word.spec
    channel.say(Taken())
    _redirect_output(word.log_path)
    os.environ.update(spec.env)
    if spec.store_token:
        os.environ[TOKEN_VARIABLE] = spec.store_token
    clock = LifeClock(word.held_since_ns)
    watch = Stopwatch()
    inbox = Inbox()
    try:
        builder.begin(spec, Path(word.artifacts_dir) if word.artifacts_dir else None)
        prepared = words.next()
        if isinstance(prepared, Drain):
            return EXIT_DRAINED
        if not isinstance(prepared, Prepared):
            raise SlotError("protocol", f"expected Prepared, got {type(prepared).__name__}", retry=True)
        engine = builder.build(
            spec,
            Path(prepared.path) if prepared.path else None,
            watch,
            Path(prepared.arriving) if prepared.arriving else None,
        )
        with watch.run("listen"):
            listener = _listen(word.listen_host, word.listen_ports)
            serving: Serving | None = None

            def loop() -> Serving:
                if serving is None:
                    raise SlotError("kv", "a stored chunk came before the loop runs", retry=True)
                return serving

            kv = builder.open_kv(spec, engine, inbox, loop)
            serving = Serving(
                spec=spec,
                token=word.token,
                engine=engine,
                listener=listener,
                agent=channel,
                clock=clock,
                inbox=inbox,
                kv=kv,
            )
    except Exception as error:
        traceback.print_exc()
        channel.say(_explain(error))
        return EXIT_FAILED
    clock.become_ready()
    channel.say(
        Ready(
            port=listener.getsockname()[1],
            stages=tuple(watch.stages),
            kv_bytes=kv_bytes_of(engine.kv_layout, engine.stats),
            max_context_tokens=engine.max_context_tokens,
        )
    )
    try:
        serving.run()
    except EngineFault as fault:
        # Its requests were told; the agent hears why the replica ends: weights that never came.
        traceback.print_exc()
        channel.say(_explain(fault))
        return EXIT_FAILED
    builder.end()
    if kv is not None:
        kv.close()
    totals = kv.store_totals() if kv is not None else StoreTotals()
    channel.say(Farewell(time=clock.read(), stages=tuple(serving.stages.stages), store=totals))
    return EXIT_DRAINED


def _listen(host: str, ports: tuple[int, int]) -> socket.socket:
    """On any free port, or on one of a range, begun somewhere in it: starts at the same time seldom meet there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = ports
    if not first:
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    count = last - first + 1
    begin = os.getpid() % count
    for number in range(count):
        with contextlib.suppress(OSError):
            return socket.create_server((host, first + (begin + number) % count), family=family, backlog=BACKLOG)
    raise SlotError("no_replica_port", f"no port from {first} to {last} is free on {host}", retry=True)


def _explain(error: Exception) -> LoadFailed:
    match error:
        case SlotError() | LoaderError():
            return LoadFailed(code=error.code, message=str(error), retry=error.retry)
        case MemoryError():
            return LoadFailed(code="out_of_memory", message=f"no memory for the engine: {error}", retry=True)
        case ValueError() | TypeError() | KeyError() | AttributeError():
            # The same checkpoint would do the same again.
            message = f"the engine cannot be built: {type(error).__name__}: {error}"
            return LoadFailed(code="model_unusable", message=message, retry=False)
        case _:
            return LoadFailed(code="load_failed", message=f"{type(error).__name__}: {error}", retry=True)


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    forgive()
