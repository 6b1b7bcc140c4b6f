"""What the warm pools should hold: how likely each checkpoint is to be wanted soon, from the gaps between its uses.

The chance that a function idle for t seconds is used within the next h: of the gaps that were longer than t, the share
that ended by t + h (Serverless in the Wild, ATC 2020, keeps such a histogram; here the gaps themselves). Limits: the
last gaps only; what repeats by the hour or the day is a forecast's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GAPS_NEEDED = 8
HORIZON_S = 120.0
"""What is wanted within this time should be in the pool: longer than any load, shorter than most habits."""
PRELOAD_CHANCE = 0.5


@dataclass(frozen=True, slots=True)
class Use:
    """Of one function."""

    identity: str
    idle_s: float
    gaps_s: tuple[float, ...]
    in_use: bool
    """A replica lives, or somebody waits."""


def chance_of_use(use: Use, horizon_s: float = HORIZON_S) -> float | None:
    """None: too little is known. One pseudo-gap that has not ended keeps it below 1 and, past the longest gap, at 0."""
    if use.in_use:
        return 1.0
    if len(use.gaps_s) < GAPS_NEEDED:
        return None
    longer = [gap for gap in use.gaps_s if gap > use.idle_s]
    soon = sum(gap <= use.idle_s + horizon_s for gap in longer)
    return soon / (len(longer) + 1)


def chances(uses: Iterable[Use], horizon_s: float = HORIZON_S) -> dict[str, float]:
    """By checkpoint: that any of its functions wants it. Functions of which too little is known say nothing."""
    spared: dict[str, float] = {}
    for use in uses:
        chance = chance_of_use(use, horizon_s)
        if chance is not None:
            spared[use.identity] = spared.get(use.identity, 1.0) * (1.0 - chance)
    return {identity: 1.0 - none for identity, none in spared.items()}


def to_preload(likely: Mapping[str, float], held: frozenset[str]) -> list[str]:
    """Checkpoints that no pool holds and that will probably be wanted, the likeliest first."""
    missing = [identity for identity, chance in likely.items() if chance >= PRELOAD_CHANCE and identity not in held]
    return sorted(missing, key=lambda identity: (-likely[identity], identity))
