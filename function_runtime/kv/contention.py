"""Weights on their way while a request resumes: nothing is computed before they are here, and they may need the very
link that stored KV comes by.

    computing in front ends at   max(weights, first pass) + the passes after it: the first one follows the weights
    reading by the same link     begins when the weights are here: what it took from them would keep everything waiting

So by a link that is full either order takes it as long, and only weights first leaves computing something to do.
Limits: one link; that it is full is what the loader notes of its waiting (`model_loader.pace`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from function_runtime.kv.speeds import Measured
from model_loader.prepared import PreparedFile

_Number = TypeVar("_Number", float, NDArray[np.float64])

NEWS: Final = 0.2
"""What the link gives is worth noting again from this difference on, of logarithms."""
SPARE: Final = 2.0
"""A link that was measured lately to give this many times what the weights take of it is not full."""


@dataclass(frozen=True, slots=True)
class Coming:
    left_s: float
    """Until the weights are here, if nothing else takes of their link."""
    has_link: bool
    """They need all of the link that stored KV comes by."""

    @property
    def reading_waits_s(self) -> float:
        return self.left_s if self.has_link else 0.0

    def computed_s(self, seconds: _Number, first_s: _Number) -> _Number:
        """When passes that take `seconds` by themselves, the first of them `first_s`, are over."""
        behind = np.maximum(self.left_s, np.minimum(seconds, first_s)) + np.maximum(seconds - first_s, 0.0)
        found = np.where(np.asarray(seconds) > 0, behind, 0.0)
        return found if isinstance(seconds, np.ndarray) else float(found)


WhatComes = Callable[[], Coming | None]
"""None: the weights are here."""


def nothing() -> Coming | None:
    return None


def left_s(coming: WhatComes) -> float:
    """What the weights keep the link for before stored KV has it to itself."""
    found = coming()
    return found.left_s if found is not None else 0.0


class ComingWeights:
    """Of one replica."""

    def __init__(self, form: PreparedFile, measured: Measured, *, by_network: bool, lately_s: float) -> None:
        """`by_network`: that is how stored KV comes. `lately_s`: how long a measurement of the store counts."""
        self._form: PreparedFile | None = form
        self._measured = measured
        self._by_network = by_network
        self._lately_s = lately_s

    def __call__(self) -> Coming | None:
        form = self._form
        pace = form.pace if form is not None else None
        if pace is None:
            if form is None or form.board is None or form.board.is_complete:
                self._form = None
            return None
        speeds = self._measured.speeds
        has_link = self._by_network and pace.is_kept_by_link
        link_bytes_per_s = pace.link_bytes_per_s(speeds.bytes_per_s)
        if has_link and self._measured.read_ago_s < self._lately_s:
            has_link = link_bytes_per_s * SPARE >= speeds.bytes_per_s
        elif has_link and not self._measured.has_read and abs(math.log(link_bytes_per_s / speeds.bytes_per_s)) > NEWS:
            # Of a store that was not read yet is expected what the link gives the weights.
            self._measured.expect_store(speeds.latency_s, link_bytes_per_s)
        return Coming(pace.left_s(speeds.bytes_per_s), has_link)
