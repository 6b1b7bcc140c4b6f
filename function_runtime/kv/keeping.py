"""Whether the KV of a finished request is kept for whoever comes next with the same tokens: a rule, stated and pure.

    keep  when  probability of reuse x seconds saved x price of device time
                >  storing it until a reuse may be expected  +  the requests a reuse costs

Seconds saved are those of computing the tokens, at the measured speed, less those of reading them back. What the store
has already costs nothing more, and is not counted as saved either. Limits: one decision for a request's whole chunks;
writing them is paid already, as KV in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HORIZON_S: Final = 4 * 3600.0
"""How long storing is paid for before a reuse is expected; afterwards a chunk's lifetime follows its own use."""
OBSERVE_ONE_IN: Final = 16
"""Of what the rule would drop, one in so many is kept all the same: what is never kept could never be seen reused."""
_MONTH_S: Final = 30 * 86400.0
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class StorePrices:
    """Micro-dollars. The defaults are S3 Standard's list prices; a directory's requests cost nothing."""

    gib_month: float = 24_700.0
    put: float = 5.0
    get: float = 0.4

    @classmethod
    def of(cls, store_uri: str, environ: Mapping[str, str]) -> StorePrices:
        """By the kind of store, unless `STOKER_KV_PRICES` says otherwise (per GiB and month, put, get)."""
        said = environ.get("STOKER_KV_PRICES", "")
        try:
            gib_month, put, get = (float(part) for part in said.split(","))
            return cls(gib_month, put, get)
        except ValueError:
            return cls(put=0.0, get=0.0) if store_uri.startswith("file:") else cls()


@dataclass(frozen=True, slots=True)
class Prefix:
    """What could be kept: whole chunks without a gap from token 0 on."""

    tokens: int
    """Of the chunks that the index does not have yet; the same for `nbytes` and `packs`."""
    nbytes: int
    packs: int
    """Read requests that a reuse costs."""
    name: bytes
    """Chain at its end."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """As measured by this replica."""

    token_us: float
    """Prefill of one token."""
    read_bytes_per_s: float
    read_latency_s: float


@dataclass(frozen=True, slots=True)
class Keep:
    keep: bool
    reason: str
    worth_microusd: float = 0.0
    cost_microusd: float = 0.0


def decide(
    prefix: Prefix, probability: float, price_microusd_per_hour: int, speeds: Speeds, prices: StorePrices
) -> Keep:
    if prefix.tokens <= 0:
        return Keep(False, "everything of it is stored already, or it has no whole chunk")
    if probability <= 0:
        return Keep(False, "its prefixes are not shared")
    computing_s = prefix.tokens * speeds.token_us / 1e6
    reading_s = speeds.read_latency_s + prefix.nbytes / max(speeds.read_bytes_per_s, 1.0)
    saved_s = max(0.0, computing_s - reading_s)
    worth = probability * saved_s * price_microusd_per_hour / 3600
    storing = prefix.nbytes / _GIB * prices.gib_month * HORIZON_S / _MONTH_S
    cost = storing + probability * prefix.packs * prices.get
    told = (
        f"{prefix.tokens} tokens: {probability:.2f} x {saved_s:.3f} s saved ({computing_s:.3f} s to compute, "
        f"{reading_s:.3f} s to read) is worth {worth:.2f} micro-dollars, {prefix.nbytes} bytes cost {cost:.2f}"
    )
    if worth > cost:
        return Keep(True, told, worth, cost)
    if saved_s > 0 and int.from_bytes(prefix.name[:4], "big") % OBSERVE_ONE_IN == 0:
        return Keep(True, f"{told}; kept to observe reuse (one in {OBSERVE_ONE_IN})", worth, cost)
    return Keep(False, told, worth, cost)
