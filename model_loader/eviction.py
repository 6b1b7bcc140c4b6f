"""Which prepared form the pool lets go first: the one whose loss costs least per byte it frees.

The cost of losing a form is (seconds to have it again) x (chance that somebody wants it within the horizon of the
forecast). Where no candidate has a forecast that still holds, the least recently used goes. Where some have one, the
others count with a chance that falls with the time since their last use. Limits: a choice, one at a time; what the
freed bytes are for is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HALF_LIFE_S: Final = 600.0
"""Without a forecast of its own, a form last used this long ago is half as likely to be wanted as one used now."""


@dataclass(frozen=True, slots=True)
class Candidate:
    key: str
    nbytes: int
    reload_s: float
    """Seconds to have it again, as its last load took."""
    idle_s: float
    """Since its last use."""
    chance: float | None
    """Of being wanted within the forecast's horizon; None: no forecast holds."""

    @property
    def cost_per_byte(self) -> float:
        chance = 1.0 / (1.0 + self.idle_s / HALF_LIFE_S) if self.chance is None else self.chance
        return self.reload_s * chance / max(1, self.nbytes)


def first_to_go(candidates: Sequence[Candidate]) -> Candidate | None:
    """None: there is nothing to let go."""
    if not candidates:
        return None
    if all(candidate.chance is None for candidate in candidates):
        return max(candidates, key=lambda c: (c.idle_s, c.key))
    return min(candidates, key=lambda c: (c.cost_per_byte, -c.idle_s, c.key))
