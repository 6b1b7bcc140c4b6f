"""What computing and reading cost here: priors at first, then what was measured, recent measurements counting most.

    prefill of a token = a + b * position        a decode step = c + d * position
    reading = latency * rounds + bytes / bandwidth, where a round is as many reads as go at once

Each pair is fitted to the last measurements (`fit`); a prior is a few measurements that were never made. Limits: one
process; a store that changes is noticed after a few reads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from function_runtime.kv.fit import Fit

Amount: TypeAlias = int | float | NDArray[np.int64] | NDArray[np.float64]

TYPICAL_READS: Final = ((1.0, 1e5), (1.0, 1e7), (4.0, 1e8))
READERS: Final = 8
"""Reads that go at once."""


@dataclass(frozen=True, slots=True)
class Speeds:
    prefill_s: float
    """A token at position 0."""
    prefill_position_s: float
    """What each position before it adds."""
    decode_s: float
    decode_position_s: float
    latency_s: float
    """Of one read, however small."""
    bytes_per_s: float
    """Of all reads together."""
    parallel: int = READERS

    def reading_s(self, nbytes: Amount, reads: Amount) -> float | NDArray[np.float64]:
        rounds = np.ceil(np.asarray(reads, np.float64) / self.parallel)
        return rounds * self.latency_s + np.asarray(nbytes, np.float64) / self.bytes_per_s


PRIOR: Final = Speeds(
    prefill_s=1e-3, prefill_position_s=1e-7, decode_s=0.03, decode_position_s=5e-6, latency_s=0.02, bytes_per_s=200e6
)
"""A small model on a CPU; a store in the same rack. Used until something was measured."""


DIRECTORY_PRIOR: Final = (0.001, 400e6)
REMOTE_PRIOR: Final = (PRIOR.latency_s, PRIOR.bytes_per_s)
"""Seconds a read, bytes per second."""


def expected_of(parameters: int, layers: int, width: int, device: str) -> Speeds:
    """Before anything was measured: what a model of this size takes on such a device. `width`: heads x head size."""
    cuda = device == "cuda"
    operations_per_s, weights_per_s = (3e14, 1e12) if cuda else (1.5e11, 4e9)
    least_prefill_s, least_decode_s = (1e-6, 5e-3) if cuda else (2e-4, 5e-3)
    return replace(
        PRIOR,
        prefill_s=max(2 * parameters / operations_per_s, least_prefill_s),
        prefill_position_s=4 * layers * width / operations_per_s,
        decode_s=max(parameters / weights_per_s, least_decode_s),
    )


class Measured:
    """The speeds of one replica and its store; any thread may measure."""

    def __init__(self, prior: Speeds = PRIOR) -> None:
        self._lock = threading.Lock()
        self._read_at_s = -math.inf
        self.after_read: Callable[[], None] | None = None
        """Called in the reader's thread."""
        self._begin(prior)

    def _begin(self, prior: Speeds) -> None:
        self._prior = prior
        self._prefill = Fit(prior.prefill_s, prior.prefill_position_s, ((512, 512**2 / 2), (512, 512 * 4096)))
        self._decode = Fit(prior.decode_s, prior.decode_position_s, ((1, 128), (1, 4096)))
        self._reading = Fit(prior.latency_s, 1 / prior.bytes_per_s, TYPICAL_READS)

    def expect_store(self, latency_s: float, bytes_per_s: float) -> None:
        """What reading is thought to cost before it is measured."""
        with self._lock:
            self._reading = Fit(latency_s, 1 / bytes_per_s, TYPICAL_READS)

    def expect(self, speeds: Speeds) -> None:
        """What another replica has measured; this one has nothing yet."""
        with self._lock:
            self._begin(speeds)

    @property
    def has_read(self) -> bool:
        return self._reading.count > 0

    @property
    def has_computed(self) -> bool:
        """Both prefill and decode."""
        return self._prefill.count > 0 and self._decode.count > 0

    def prefilled(self, start: int, end: int, seconds: float) -> None:
        self._take(self._prefill, end - start, (end**2 - start**2) / 2, seconds)

    def decoded(self, position: int, seconds: float) -> None:
        self._take(self._decode, 1, position, seconds)

    def read(self, nbytes: float, reads: int, seconds: float) -> None:
        """`nbytes`: all that came meanwhile."""
        self._take(self._reading, -(-reads // self._prior.parallel), nbytes, seconds)
        self._read_at_s = time.monotonic()
        if self.after_read is not None:
            self.after_read()

    @property
    def read_ago_s(self) -> float:
        """Since the store was last measured."""
        return time.monotonic() - self._read_at_s

    def _take(self, fit: Fit, first: float, second: float, seconds: float) -> None:
        with self._lock:
            fit.measure(first, second, seconds)

    @property
    def speeds(self) -> Speeds:
        with self._lock:
            prefill_s, prefill_position_s = self._prefill.values
            decode_s, decode_position_s = self._decode.values
            latency_s, byte_s = self._reading.values
        return replace(
            self._prior,
            prefill_s=prefill_s,
            prefill_position_s=prefill_position_s,
            decode_s=decode_s,
            decode_position_s=decode_position_s,
            latency_s=latency_s,
            bytes_per_s=1 / max(byte_s, 1e-15),
        )
