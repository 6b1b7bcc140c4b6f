"""Who listens to a slot's changes. Each listener has a bounded queue of its own; one that does not keep up is dropped
and connects again, beginning with the whole state.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from function_runtime.protocol import SlotEvent

_QUEUE_EVENTS: Final = 2000


class EventHub:
    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[SlotEvent | None]] = set()

    def publish(self, event: SlotEvent) -> None:
        for queue in list(self._queues):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._queues.discard(queue)
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)

    @contextmanager
    def listen(self) -> Iterator[asyncio.Queue[SlotEvent | None]]:
        """None in the queue: this listener was dropped."""
        queue: asyncio.Queue[SlotEvent | None] = asyncio.Queue(_QUEUE_EVENTS)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)


def log(text: str) -> None:
    """A line of the agent's log."""
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", file=sys.stderr, flush=True)
