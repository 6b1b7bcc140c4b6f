"""Which way to a form is expected to be the quickest: copied from a place that has it, or made from the checkpoint.

Seconds = bytes / what this kind of place gave lately, and for making what it took the last time, or by the rate at
which this slot makes forms. Rates are remembered in a small file beside the pool, move half way to each new
measurement, and begin with priors. Limits: one rate for all places of a kind; what else uses the link at the moment
is not known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_loader.manifest import write_atomically

MAKE: Final = "make"
PRIORS_BYTES_PER_S: Final[Mapping[str, float]] = {
    "pool": 5e9, "disk": 1e9, "peer": 1e9, "store": 2e8, MAKE: 5e8, "copy as is": 2e9,
}  # fmt: skip
"""Until something was measured. `make`: bytes of the form, dequantised or cast; `copy as is`: the checkpoint's own."""
KEEP_FACTOR: Final = 1.5
"""A form is kept below the pool where making it takes this much longer than reading it would."""
KEEP_FROM_S: Final = 0.5
"""What is made quicker than this is not worth the space."""


@dataclass(frozen=True, slots=True)
class Origin:
    kind: str
    """disk | peer | store | make"""
    expected_s: float


def rank(origins: Sequence[Origin]) -> list[Origin]:
    """The quickest first; of equals, what moves no bytes over a network."""
    order = ("disk", MAKE, "peer", "store")
    return sorted(origins, key=lambda origin: (origin.expected_s, order.index(origin.kind)))


def is_worth_keeping(make_s: float, read_s: float) -> bool:
    return make_s >= KEEP_FROM_S and make_s > KEEP_FACTOR * read_s


class Rates:
    """Bytes per second by kind, remembered in `path`; a file that is damaged or not there means the priors."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, float] = {}
        if path is not None:
            with suppress(OSError, ValueError, TypeError, AttributeError):
                found = json.loads(path.read_bytes())
                self._known = {str(k): float(v) for k, v in found.items() if 1.0 <= float(v) < 1e13}

    def of(self, kind: str) -> float:
        return self._known.get(kind, PRIORS_BYTES_PER_S[kind])

    def seconds(self, kind: str, nbytes: int) -> float:
        return nbytes / self.of(kind)

    def learn(self, kind: str, nbytes: int, seconds: float) -> None:
        if nbytes < 1 << 20 or seconds <= 0:
            return  # says more of the request than of the rate
        rate = nbytes / seconds
        before = self._known.get(kind)
        self._known[kind] = rate if before is None else (before + rate) / 2
        if self._path is not None:
            with suppress(OSError):
                write_atomically(self._path, json.dumps(self._known, sort_keys=True).encode())
