"""What is held in memory and read again now and then: a read that began before a change of our own is no news.

`read` gives what was read once nothing was changed meanwhile; who gets it puts it in place without a pause. `note` is
called in the step that changes what is in memory. Limits: under changes without a pause it reads as often.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Changes:
    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def note(self) -> None:
        self._count += 1

    async def read(self, read: Callable[[], Awaitable[T]]) -> T:
        while True:
            before = self._count
            found = await read()
            if self._count == before:
                self._count += 1  # an older read that is still under way is none, either
                return found
