"""How fast a form comes, as its loader notes it on the board: for whoever has to plan around it.

    loader: when it began, what is to come over a network, what came and how long its threads waited for it
    reader: seconds until the rest is here, and whether the network is what keeps it

Limits: the mean since the beginning; one network, whatever it leads to.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

NOTES: Final = struct.Struct("<QQQII")
"""begin (monotonic ns), bytes to come over a network, bytes that came, milliseconds of threads waiting for them,
threads"""
KEPT_BY_LINK: Final = 0.5
"""Share of the threads' time: above, more bandwidth would mean an earlier end."""
PRIOR_BYTES_PER_S: Final = 1e9
"""Of the form, until something has landed of one that comes over no network."""


@dataclass(frozen=True, slots=True)
class Pace:
    passed_s: float
    landed_bytes: int
    form_bytes: int
    far_bytes: int
    """That are to come over a network, in all; 0: it is not from there."""
    came_bytes: int
    """Of those."""
    waiting: float
    """Share of the loader's threads that waited for them."""

    @property
    def is_kept_by_link(self) -> bool:
        """As far as is known: nothing has come yet, or waiting is most of what the loader does."""
        return self.far_bytes > self.came_bytes and (not self.came_bytes or self.waiting >= KEPT_BY_LINK)

    def link_bytes_per_s(self, believed_bytes_per_s: float) -> float:
        return self.came_bytes / self.passed_s if self.came_bytes and self.passed_s > 0 else believed_bytes_per_s

    def left_s(self, believed_bytes_per_s: float) -> float:
        """Until all of it is here. `believed_bytes_per_s`: of the network, if this load has not shown it yet."""
        if self.far_bytes > self.came_bytes:
            return (self.far_bytes - self.came_bytes) / max(self.link_bytes_per_s(believed_bytes_per_s), 1.0)
        left = max(0, self.form_bytes - self.landed_bytes)
        rate = self.landed_bytes / self.passed_s if self.landed_bytes and self.passed_s > 0 else PRIOR_BYTES_PER_S
        return left / max(rate, 1.0)
