"""Who reads a request, and whether the last of them went because it wanted to.

A reader of this gateway goes when its client does. One that another gateway reads for may be gone because that gateway
is, which is not the client's leaving: it has left only if its gateway says so, before or after its connection breaks.
Limits: a gateway that dies between its client's leaving and saying so leaves the work running to its end.
"""

from __future__ import annotations


class Readers:
    __slots__ = ("_left", "_lost", "count")

    def __init__(self) -> None:
        self.count = 0
        self._lost: set[str] = set()
        """Relayed ones whose connection broke, and of which nobody has said that they left."""
        self._left: set[str] = set()
        """Relayed ones that were said to have left, and whose connection stands yet."""

    def come(self) -> None:
        self.count += 1
        self._lost.clear()  # whoever lost its gateway may be back: now the last to go decides

    def go(self, relayed: str | None) -> bool:
        """A reader is gone (`relayed`: the name that its gateway gave it). True: the last one, of its own will."""
        self.count -= 1
        if relayed is not None and relayed not in self._left:
            self._lost.add(relayed)
        self._left.discard(relayed or "")
        return self._all_left

    def said_to_have_left(self, relayed: str) -> bool:
        """True: that was the last one."""
        if relayed not in self._lost:
            self._left.add(relayed)
            return False
        self._lost.discard(relayed)
        return self._all_left

    @property
    def _all_left(self) -> bool:
        return self.count == 0 and not self._lost
