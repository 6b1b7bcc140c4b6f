"""Large reads and writes in parts: how large a part should be, cutting without copying, doing several at once.

A part costs a request; parts side by side hide latency and the limit of one connection. So a part of a read is what one
connection moves in about `PART_S` at its best, as measured: small on a far or slow store, the whole object on a near
and fast one. Its best, because a busy machine looks like a slow store, and more requests would only make it busier.
Limits: one measure for all objects of a store.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

from model_loader.objects.resilience import Deadline

T = TypeVar("T")

MIB: Final = 1024 * 1024
PART_S: Final = 0.05
LEAST_BYTES: Final = 8 * MIB
MOST_BYTES: Final = 32 * MIB
FIRST_BYTES: Final = 8 * MIB
"""Until something was measured."""
_FADES: Final = 0.98
"""What is left of the best speed seen, part by part."""


class PartSize:
    def __init__(self, least_bytes: int = LEAST_BYTES, most_bytes: int = MOST_BYTES, first_bytes: int = FIRST_BYTES):
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        self._first_bytes = first_bytes
        self._bytes_s = 0.0
        self._lock = threading.Lock()

    def learn(self, nbytes: int, seconds: float) -> None:
        """One part's time, from the request to its last byte. Small ones say more of latency than of speed."""
        if nbytes < self._least_bytes // 2 or seconds <= 0:
            return
        with self._lock:
            found = nbytes / seconds
            self._bytes_s = max(self._bytes_s * _FADES, found)

    def of(self, total_bytes: int) -> int:
        """Parts of equal size for so many bytes."""
        with self._lock:
            wanted = self._bytes_s * PART_S if self._bytes_s else self._first_bytes
        size = min(max(int(wanted), self._least_bytes), self._most_bytes)
        count = max(round(total_bytes / size), 1, -(-total_bytes // self._most_bytes))
        return max(-(-total_bytes // count), 1)


def cut(views: Sequence[memoryview], nbytes: int) -> Iterator[list[memoryview]]:
    """The same bytes in pieces of `nbytes`, nothing copied."""
    piece: list[memoryview] = []
    room = nbytes
    for view in views:
        while len(view):
            piece.append(view[:room])
            room -= len(piece[-1])
            view = view[len(piece[-1]) :]
            if room == 0:
                yield piece
                piece, room = [], nbytes
    if piece:
        yield piece


def together(parts: Sequence[T], do: Callable[[T], None], deadline: Deadline, helpers: Executor, at_once: int) -> None:
    """`do` for every part, several at once, this thread among them: busy helpers delay it and never block it. The first
    error ends the operation: what still runs is interrupted and waited for."""
    if len(parts) == 1:
        do(parts[0])
        return
    waiting, errors = deque(parts), deque[BaseException]()

    def work() -> None:
        while not errors:
            try:
                part = waiting.popleft()
            except IndexError:
                return
            try:
                do(part)
            except BaseException as error:
                errors.append(error)
                deadline.abandon()

    started = [helpers.submit(work) for _ in range(min(at_once, len(parts)) - 1)]
    work()
    for helper in started:
        if not helper.cancel():
            helper.result()
    if errors:
        raise errors[0]
