"""Which stored chunks are to go: those nothing leads to, those that cost more than they save, and what is over quota.

    uses per second = (uses + prior) / (age + prior time)          what a chunk's own history lets one expect
    worth           = uses per second x seconds saved x price      never below that of what continues it
    cost            = its share of its pack's bytes x price of storing

Pure. A suffix goes with its prefix; bytes come back by whole packs, so over quota the packs with the least worth per
byte go first. Limits: chunks are taken to be reused at a steady rate; days and nights are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Name: TypeAlias = tuple[str, str, str]
"""(identity, scope, chain)"""

PRIOR_USES: Final = 0.25
PRIOR_S: Final = 3600.0
"""Together: what nobody has used yet is expected to be used once in four hours, ever more seldom as it ages."""
MONTH_S: Final = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class StoredChunk:
    name: Name
    parent: str
    first_token: int
    pack: str
    nbytes: int
    saved_us: int
    price_microusd_per_hour: int
    uses: int
    created_us: int


@dataclass(frozen=True, slots=True)
class Limits:
    quota_bytes: int = 0
    """0: no quota."""
    storage_microusd_per_gib_month: float = 0.0


@dataclass(frozen=True, slots=True)
class Departures:
    chunks: dict[Name, str]
    """Those that go, and why: unreachable | not worth its bytes | over quota."""
    packs: dict[str, str]
    """Packs with nothing left in them, and why."""

    def count(self, why: str) -> int:
        return sum(reason == why for reason in self.chunks.values())


UNREACHABLE: Final = "unreachable"
WORTHLESS: Final = "not worth its bytes"
OVER_QUOTA: Final = "over quota"
EMPTY: Final = "nothing is left in it"


def departures(chunks: Sequence[StoredChunk], packs: Mapping[str, int], limits: Limits, now_us: int) -> Departures:
    """Of one tenant's chunks and its live packs (with their bytes)."""
    going: dict[Name, str] = {}
    staying = _reachable(chunks, going)
    worth = worths(staying, now_us)
    if limits.storage_microusd_per_gib_month > 0:
        held = _held_bytes(staying)
        per_byte_s = limits.storage_microusd_per_gib_month / 2**30 / MONTH_S
        for chunk in staying:
            share = packs.get(chunk.pack, chunk.nbytes) * chunk.nbytes / max(held[chunk.pack], 1)
            if worth[chunk.name] < max(share, chunk.nbytes) * per_byte_s:
                going[chunk.name] = WORTHLESS
        staying = _reachable([chunk for chunk in staying if chunk.name not in going], going)
    left = _held_bytes(staying)
    leaving = {pack: EMPTY for pack in packs if pack not in left}
    excess = sum(packs.values()) - sum(packs[pack] for pack in leaving) - limits.quota_bytes
    if limits.quota_bytes and excess > 0:
        density: dict[str, float] = dict.fromkeys(left, 0.0)
        for chunk in staying:
            density[chunk.pack] += worth[chunk.name]
        order = sorted((pack for pack in left if pack in packs), key=lambda p: (density[p] / max(packs[p], 1), p))
        for pack in order:
            if excess <= 0:
                break
            leaving[pack] = OVER_QUOTA
            excess -= packs[pack]
        for chunk in staying:
            if chunk.pack in leaving:
                going[chunk.name] = OVER_QUOTA
        staying = _reachable([chunk for chunk in staying if chunk.name not in going], going)
        left = _held_bytes(staying)
        leaving.update({pack: EMPTY for pack in packs if pack not in left and pack not in leaving})
    return Departures(going, leaving)


def worths(chunks: Sequence[StoredChunk], now_us: int) -> dict[Name, float]:
    """Micro-dollars per second that each chunk is expected to save."""
    rates: dict[Name, float] = {}
    for chunk in sorted(chunks, key=lambda c: c.first_token, reverse=True):
        age_s = max(0, now_us - chunk.created_us) / 1e6
        own = (chunk.uses + PRIOR_USES) / (age_s + PRIOR_S)
        rate = rates[chunk.name] = max(own, rates.get(chunk.name, 0.0))
        parent = (chunk.name[0], chunk.name[1], chunk.parent)
        # NOTE: whoever uses a continuation uses what it continues, though that may have been stored for longer.
        rates[parent] = max(rate, rates.get(parent, 0.0))
    return {c.name: rates[c.name] * c.saved_us / 1e6 * c.price_microusd_per_hour / 3600 for c in chunks}


def _reachable(chunks: Iterable[StoredChunk], going: dict[Name, str]) -> list[StoredChunk]:
    """Those that begin at token 0 or continue one that stays; the others are going."""
    present: set[Name] = set()
    staying: list[StoredChunk] = []
    for chunk in sorted(chunks, key=lambda c: c.first_token):
        if chunk.first_token == 0 or (chunk.name[0], chunk.name[1], chunk.parent) in present:
            present.add(chunk.name)
            staying.append(chunk)
        else:
            going[chunk.name] = UNREACHABLE
    return staying


def _held_bytes(chunks: Iterable[StoredChunk]) -> dict[str, int]:
    held: dict[str, int] = {}
    for chunk in chunks:
        held[chunk.pack] = held.get(chunk.pack, 0) + chunk.nbytes
    return held
