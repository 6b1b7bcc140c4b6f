"""What an agent has told a replica of its share of a device, until its KV memory is as large.

    told -> tried between two steps -> reached, or tried again while what runs needs more than the share

Limits: a larger share that cannot be had after `TRIES` is given up; whoever divides the device sees what there is.
"""

from __future__ import annotations

from typing import Final

from function_runtime.engine_like import EngineLike

AGAIN_NS: Final = 500_000_000
TRIES: Final = 6


class KvRoom:
    def __init__(self) -> None:
        self._told_bytes = 0
        """0: nothing, or it is reached."""
        self._next_ns = 0
        self._tries = 0

    def tell(self, kv_bytes: int) -> None:
        self._told_bytes, self._next_ns, self._tries = kv_bytes, 0, 0

    def settle(self, engine: EngineLike, now_ns: int) -> bool:
        """Between two steps. Whether there is another amount now."""
        if not self._told_bytes or now_ns < self._next_ns:
            return False
        before, layout = engine.stats.kv_total_blocks, engine.kv_layout
        there = engine.resize_kv(self._told_bytes)
        self._tries += 1
        self._next_ns = now_ns + AGAIN_NS
        block_bytes = layout.block_size * layout.nbytes_per_token if layout is not None else 0
        lacking = self._told_bytes - there
        if layout is None or 0 <= lacking < block_bytes or (lacking > 0 and self._tries >= TRIES):
            self._told_bytes = 0
        return engine.stats.kv_total_blocks != before
