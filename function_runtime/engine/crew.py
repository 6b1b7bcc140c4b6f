"""Threads that share one matrix product: each takes a run of the matrix's columns, one core each, with one meeting.

OpenBLAS has threads of its own, but they wait by spinning, for each other too: beside anything else that runs, products
were measured to take three to ten times as long as with one thread. These sleep. Limits: they run nothing but numpy's
product, which lets go of the interpreter; the columns each takes depend on shapes only, so results do not vary.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from function_runtime.engine import openblas

Floats: TypeAlias = NDArray[np.float32]
_Part: TypeAlias = tuple[Floats, Floats, Floats]

_PART_PRODUCTS: Final = 250_000
"""Below this much for each (as many matrix values for few rows, fewer for many) waking a thread costs more than it
brings: about 40 us, in which one core reads a megabyte."""
_ROWS_AT_ONCE: Final = 4
"""Rows up to which a product costs what reading the matrix does."""
_COLUMN_STEP: Final = 16
_SINGLE_ROWS: Final = 2
"""Rows up to which one product for each is faster than one for all: a product of one row reads the matrix as it lies,
others copy it into tiles first (two rows took 565 us instead of 816, four 888 instead of 776)."""


class Crew:
    def __init__(self, threads: int) -> None:
        openblas.set_threads(1)
        self.threads = threads
        self._parts: SimpleQueue[_Part] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        for index in range(threads - 1):
            threading.Thread(target=self._work, name=f"crew-{index}", daemon=True).start()

    def multiply(self, rows: Floats, matrix: Floats, out: Floats) -> None:
        """`out = rows @ matrix`."""
        inputs, outputs = matrix.shape
        share = inputs * outputs * max(1, rows.shape[0] // _ROWS_AT_ONCE) // _PART_PRODUCTS
        parts = min(self.threads, share)
        if parts < 2:
            _multiply(rows, matrix, out)
            return
        width = -(-outputs // (parts * _COLUMN_STEP)) * _COLUMN_STEP
        firsts = range(width, outputs, width)
        for first in firsts:
            self._parts.put((rows, matrix[:, first : first + width], out[:, first : first + width]))
        _multiply(rows, matrix[:, :width], out[:, :width])
        errors = [error for _ in firsts if (error := self._done.get()) is not None]
        if errors:
            raise errors[0]

    def _work(self) -> None:
        while True:
            rows, matrix, out = self._parts.get()
            try:
                _multiply(rows, matrix, out)
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)
            del rows, matrix, out


def _multiply(rows: Floats, matrix: Floats, out: Floats) -> None:
    if rows.shape[0] > _SINGLE_ROWS:
        np.matmul(rows, matrix, out=out)
        return
    for row in range(rows.shape[0]):
        np.matmul(rows[row : row + 1], matrix, out=out[row : row + 1])
