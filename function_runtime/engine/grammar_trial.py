"""Every grammar is compiled in a process of its own first, which may die of it.

    python -m function_runtime.engine.grammar_trial        (a worker's child; frames on stdin and stdout)

llguidance bounds most of what a grammar can cost, but not all: references in a long chain overflow the stack, and some
short schemas compile for minutes. Whoever may call a function may send a grammar, and a replica that dies of one takes
other requests with it. Here the stack is half of what an engine has, memory and time are bounded, and what survives is
compiled again where it is used. Limits: ends after a minute without work or with its parent; Linux.
"""

from __future__ import annotations

import hashlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from typing import IO, Final

import msgspec

from function_runtime.engine.grammar_source import Pieces, compiled, fault_of, table_of
from function_runtime.protocol import Grammar

TRIAL_CPU_S: Final = 3
WAIT_S: Final = 30.0
"""A busy machine takes longer for the same work."""
STACK_BYTES: Final = 4 << 20
MEMORY_BYTES: Final = 2 << 30
IDLE_S: Final = 60.0
_LENGTH: Final = struct.Struct(">I")
_encode: Final = msgspec.msgpack.Encoder().encode


class _Vocabulary(msgspec.Struct, array_like=True):
    tokens: list[bytes]
    special_token_ids: list[int]


class Trial:
    """The parent's side. One grammar at a time; the child is started when it is needed."""

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @staticmethod
    def over(pieces: Pieces) -> Trial:
        """The one trial of this process for a vocabulary."""
        vocabulary = _encode(_Vocabulary(pieces.tokens, pieces.special_token_ids))
        return _TRIALS.setdefault(hashlib.sha256(vocabulary).digest(), Trial(vocabulary))

    def fault(self, grammar: Grammar) -> str:
        """What the compiler has against a grammar, or what the grammar did to it; empty: it is sound."""
        with self._lock:
            return self._fault(grammar)

    def _fault(self, grammar: Grammar) -> str:
        for _ in range(2):
            try:
                child = self._child or self._start()
                _write(child.stdin, _encode(grammar))
                reply = _read(child.stdout, WAIT_S)
            except (BrokenPipeError, EOFError):
                code = self._stop()
                if code == 0:
                    continue  # it had ended for want of work
                if code == -signal.SIGPROF:
                    return f"it takes longer than {TRIAL_CPU_S} s to compile"
                return "the compiler did not survive it: it is nested too deeply or too large"
            except TimeoutError:
                self._stop()
                return f"it took longer than {WAIT_S:g} s to compile"
            return reply.decode()
        return "the compiler could not be started"

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = self._child = subprocess.Popen(
            [sys.executable, "-m", "function_runtime.engine.grammar_trial"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        _write(child.stdin, self._vocabulary)
        return child

    def _stop(self) -> int:
        child, self._child = self._child, None
        if child is None:
            return 0
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        try:
            return child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


_TRIALS: Final[dict[bytes, Trial]] = {}


def _write(pipe: IO[bytes] | None, body: bytes) -> None:
    if pipe is None:
        raise BrokenPipeError
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def _read(pipe: IO[bytes] | None, within_s: float) -> bytes:
    if pipe is None:
        raise EOFError
    (length,) = _LENGTH.unpack(_exactly(pipe.fileno(), _LENGTH.size, within_s))
    return _exactly(pipe.fileno(), length, within_s)


def _exactly(descriptor: int, count: int, within_s: float) -> bytes:
    data = b""
    while len(data) < count:
        if not select.select([descriptor], [], [], within_s)[0]:
            raise TimeoutError
        more = os.read(descriptor, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _bound(resource.RLIMIT_STACK, STACK_BYTES)
    _bound(resource.RLIMIT_AS, MEMORY_BYTES)
    try:
        vocabulary = msgspec.msgpack.decode(_read(sys.stdin.buffer, IDLE_S), type=_Vocabulary)
        table = table_of(Pieces(vocabulary.tokens, vocabulary.special_token_ids, None))
        while True:
            grammar = msgspec.msgpack.decode(_read(sys.stdin.buffer, IDLE_S), type=Grammar)
            signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)
            matcher = compiled(table, grammar)
            fault = fault_of(matcher)
            if not fault:
                first = matcher.deep_copy()
                first.compute_bitmask()
                fault = fault_of(first)
                del first
            del matcher
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(sys.stdout.buffer, fault.encode())
    except (EOFError, TimeoutError, BrokenPipeError):
        return


def _bound(what: int, limit: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
