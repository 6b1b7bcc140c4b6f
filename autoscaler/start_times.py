"""How long starts of a function take: the last measured seconds of each stage, by the tier its bytes came from.

The whole of a start is a stage too (`TOTAL`): stages may overlap, so it is not their sum, and it stands under the best
tier the start had its weights from. Without a tier, the last starts count whatever theirs were: the mix as it comes.
Limits: the last `KEPT` of each; a tier nobody has started from lately says nothing.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable
from typing import Final

KEPT: Final = 64
TOTAL: Final = "total"
END: Final = "end"
"""From an idle replica's being told to end to its process's being gone: the devices are held for so long as well."""
TIERS: Final = ("device", "pool", "disk", "peer", "store", "none")
"""Best first."""


class StartTimes:
    __slots__ = ("_stages",)

    def __init__(self) -> None:
        self._stages: dict[tuple[str, str], deque[float]] = {}
        """By tier and stage; the tier "" holds the starts of all tiers in the order they came."""

    @classmethod
    def of(cls, seconds: Iterable[float], tier: str = "pool") -> StartTimes:
        """Whole starts that took so long: what was published, or measured elsewhere."""
        times = cls()
        for each in seconds:
            times.note(tier, TOTAL, each)
        return times

    def note(self, tier: str, stage: str, seconds: float) -> bool:
        """False: no such duration, and nothing was noted."""
        if not math.isfinite(seconds) or seconds < 0:
            return False
        for known in {tier, ""}:
            self._stages.setdefault((known, stage), deque(maxlen=KEPT)).append(seconds)
        return True

    @property
    def measured(self) -> int:
        """Whole starts that are remembered."""
        return len(self._of("", TOTAL))

    @property
    def tiers(self) -> tuple[str, ...]:
        """From which there were whole starts, the best first."""
        known = {tier for tier, stage in self._stages if stage == TOTAL and tier}
        return tuple(sorted(known, key=lambda tier: (TIERS.index(tier) if tier in TIERS else len(TIERS), tier)))

    def stages(self, tier: str = "") -> dict[str, tuple[float, ...]]:
        return {stage: tuple(kept) for (known, stage), kept in self._stages.items() if known == tier}

    def expected_s(self, tier: str | None = None, stage: str = TOTAL) -> float | None:
        """Mean; None: never measured."""
        known = self._of(tier or "", stage)
        return math.fsum(known) / len(known) if known else None

    def quantile_s(self, q: float, tier: str | None = None, stage: str = TOTAL) -> float | None:
        """Between the two nearest of the measured; None: never measured."""
        known = sorted(self._of(tier or "", stage))
        if not known:
            return None
        place = min(max(q, 0.0), 1.0) * (len(known) - 1)
        below = math.floor(place)
        above = min(below + 1, len(known) - 1)
        return known[below] + (known[above] - known[below]) * (place - below)

    def draw(self, u: float, tier: str | None = None) -> float:
        """A start as they were, for a `u` drawn evenly from [0, 1). Raises ValueError where none was measured."""
        drawn = self.quantile_s(u, tier)
        if drawn is None:
            raise ValueError(f"no start was measured{f' from the tier {tier}' if tier else ''}")
        return drawn

    def _of(self, tier: str, stage: str) -> deque[float]:
        return self._stages.get((tier, stage), deque())

    def to_json(self) -> str:
        rows = [[tier, stage, [round(each, 6) for each in kept]] for (tier, stage), kept in self._stages.items()]
        return json.dumps({"stages": sorted(rows)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StartTimes:
        """Raises ValueError for anything but what `to_json` gave."""
        times = cls()
        try:
            for tier, stage, kept in json.loads(text)["stages"]:
                seconds = [float(each) for each in kept]
                if not all(math.isfinite(each) and each >= 0 for each in seconds):
                    raise ValueError("a duration is a finite number from 0 on")
                times._stages[str(tier), str(stage)] = deque(seconds, maxlen=KEPT)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no record of start times: {error}") from None
        return times
