"""Requests that wait for their grammar: compiled in threads of their own, so that no step waits for a compiler.

`begin` hands a request's grammar over, `ready` gives back what is done since: guides for its choices, or why there are
none. How long one may take is bounded where it is tried (`grammar_trial`). Limits: `COMPILERS` at a time, in order;
their threads live while there is something to compile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from function_runtime.engine.errors import EngineError, InvalidGrammar
from function_runtime.engine.grammar import Grammars, Guide
from function_runtime.engine.request import Request

COMPILERS: Final = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    request: Request
    guides: Sequence[Guide | None]
    """One per choice; None for those that have ended."""
    error: EngineError | None = None


class Guides:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._tasks: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._waiting: dict[str, Request] = {}
        self._compiling = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def begin(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        with self._lock:
            self._tasks.put(request)
            if self._compiling >= COMPILERS:
                return
            self._compiling += 1
        threading.Thread(target=self._compile_all, name="grammar", daemon=True).start()

    def forget(self, request: Request) -> bool:
        """No longer wanted; False: it was not waiting."""
        if self._waiting.get(request.request_id) is not request:
            return False
        del self._waiting[request.request_id]
        return True

    def ready(self, wait_s: float = 0.0) -> list[Compiled]:
        """What has come of those that wait; blocks for `wait_s` at most while nothing has."""
        found: list[Compiled] = []
        while self._waiting:
            try:
                compiled = self._done.get(block=not found and wait_s > 0.0, timeout=wait_s)
            except queue.Empty:
                break
            if self.forget(compiled.request):
                found.append(compiled)
        return found

    def _compile_all(self) -> None:
        while True:
            with self._lock:
                if self._tasks.empty():
                    self._compiling -= 1
                    return
                request = self._tasks.get_nowait()
            self._done.put(self._compile(request))

    def _compile(self, request: Request) -> Compiled:
        grammar = request.work.sampling.grammar
        live = [choice for choice in request.choices if choice.finish is None]
        if grammar is None or request.request_id not in self._waiting:
            return Compiled(request, ())
        try:
            made = iter(self._grammars.guides(grammar, [choice.tokens for choice in live]))
        except EngineError as error:
            return Compiled(request, (), error)
        except BaseException as error:  # a panic of the library is no Exception
            return Compiled(request, (), InvalidGrammar(f"the grammar's compiler failed: {error}"))
        return Compiled(request, [next(made) if choice.finish is None else None for choice in request.choices])
