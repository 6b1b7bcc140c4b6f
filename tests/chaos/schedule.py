"""Which faults there are, and a seed's sequence of them: what, whom, and after how many more delivered tokens.

`schedule(seed, count, names)` is a pure function, so a failing run's seed gives the same faults to the same kinds of
victims at the same progress of the load. Limits: which process or object among several equals is hit is drawn from
`draw`, but there may be others than the last time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.chaos.site import Site


@dataclass(frozen=True, slots=True)
class FaultKind:
    name: str
    weight: int
    """Share among those that can be done here. What takes seconds is rarer."""
    excuses: frozenset[str] = frozenset()
    """Error codes that requests may end with because of it. None: every request is to complete."""


STORAGE: Final = frozenset({"storage_unavailable"})
PROCESS_KINDS: tuple[FaultKind, ...] = (
    FaultKind("kill replica", 6),
    FaultKind("kill agent", 4),
    FaultKind("kill gateway", 4),
    FaultKind("kill replica and gateway", 2),
    FaultKind("stop replica", 2),
    FaultKind("stop agent", 2),
    FaultKind("stop gateway", 2),
)
OBJECT_KINDS: tuple[FaultKind, ...] = (
    FaultKind("object deleted", 3),
    FaultKind("object truncated", 3),
    FaultKind("object flipped", 3),
    FaultKind("object zero-tailed", 3),
    FaultKind("object swapped: tenant", 2),
    FaultKind("object swapped: dtype", 2),
    FaultKind("object swapped: revision", 2),
    FaultKind("object swapped: request", 2),
    FaultKind("record forged: tenant", 1),
    FaultKind("record forged: dtype", 1),
    FaultKind("record forged: revision", 1),
)
PAIR_KINDS: tuple[FaultKind, ...] = (
    FaultKind("kill gateway until another took over", 3),
    FaultKind("kill every gateway", 1),
    FaultKind("stop gateway until another took over", 2),
)
"""With two gateways."""
FOLDER_KINDS: tuple[FaultKind, ...] = (FaultKind("store gone", 2), FaultKind("store full", 2))
SQLITE_KINDS: tuple[FaultKind, ...] = (
    FaultKind("database locked", 2, STORAGE),
    FaultKind("database full", 2, STORAGE),
)
POSTGRES_KINDS: tuple[FaultKind, ...] = (
    FaultKind("database killed", 3, STORAGE),
    FaultKind("database hung", 2, STORAGE),
)
BUCKET_KINDS: tuple[FaultKind, ...] = (
    FaultKind("store killed", 2),
    FaultKind("store stopped", 2),
    FaultKind("store hung", 2),
    FaultKind("store slow", 2),
    FaultKind("store 503", 2),
    FaultKind("store reset", 2),
    FaultKind("store flips bits", 3),
)
FAULT_KINDS = (
    *PROCESS_KINDS, *OBJECT_KINDS, *PAIR_KINDS, *FOLDER_KINDS, *SQLITE_KINDS, *POSTGRES_KINDS, *BUCKET_KINDS
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in FAULT_KINDS}
LOCAL = tuple(kind.name for kind in (*PROCESS_KINDS, *OBJECT_KINDS, *FOLDER_KINDS, *SQLITE_KINDS))
"""With one gateway, SQLite and a folder."""


def names_for(place: Site) -> tuple[str, ...]:
    """What can be done to a service that stands on this."""
    kinds = [*PROCESS_KINDS, *OBJECT_KINDS]
    kinds += PAIR_KINDS if len(place.gateways) > 1 else ()
    kinds += FOLDER_KINDS if place.folder else ()
    kinds += BUCKET_KINDS if place.bucket else ()
    kinds += SQLITE_KINDS if place.sqlite else ()
    kinds += POSTGRES_KINDS if place.postgres else ()
    return tuple(kind.name for kind in kinds)


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    name: str
    after_tokens: int
    """Tokens that the load is to be given after the fault before was over."""
    draw: int
    """Chooses among victims, and the place of a damage."""

    @property
    def kind(self) -> FaultKind:
        return BY_NAME[self.name]


def schedule(
    seed: int, count: int, names: Iterable[str] = LOCAL, *, fewest: int = 10, most: int = 100
) -> tuple[Fault, ...]:
    """Every kind once, in a drawn order, as far as `count` goes; then by weight."""
    rng = random.Random(f"{seed}/schedule")
    kinds = [BY_NAME[name] for name in names]
    first = rng.sample(kinds, len(kinds))
    rest = rng.choices(kinds, [kind.weight for kind in kinds], k=max(0, count - len(first)))
    return tuple(
        Fault(number, kind.name, rng.randrange(fewest, most), rng.getrandbits(48))
        for number, kind in enumerate([*first, *rest][:count])
    )
