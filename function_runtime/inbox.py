"""How helper threads hand results to the worker's loop: a queue and a descriptor that wakes a selector.

Limits: one consumer; what is posted runs on the consumer's thread, in order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable


class Inbox:
    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake_fd

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._wake_fd, 1)

    def run_all(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        os.close(self._wake_fd)
