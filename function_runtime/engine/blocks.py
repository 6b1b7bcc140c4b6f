"""Blocks of KV memory: who holds them, and which complete ones can serve a prefix again.

A block is held by a count of choices; a complete block may be published under its chain hash. A block nobody holds is
free, or, if published, kept for its prefix until it is needed (least recently used first). Limits: numbers only, the
memory itself is in `kv_cache`; a published block never changes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self._holders = [0] * total
        self._free: list[int] = list(range(total))
        """A heap: low blocks first, so that memory is touched late and neighbours stay together."""
        self._in_heap = bytearray(b"\x01" * total)
        """A block taken as a neighbour stays in the heap until it comes up; it is not pushed twice."""
        self._is_free = bytearray(b"\x01" * total)
        self._free_count = total
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published blocks nobody holds, least recently used first."""

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, given up prefixes included."""
        return self._free_count + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks held by choices."""
        return self.total - self.available

    def allocate(self, after: int | None = None) -> int:
        """One block, the neighbour of `after` if that is free. The caller has checked `available`."""
        if after is not None and after + 1 < self.total and self._is_free[after + 1]:
            block = after + 1
        elif self._free_count:
            block = self._lowest()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
            self._is_free[block] = 1
            self._free_count += 1
        else:
            raise RuntimeError("no block is free: `available` was not checked")
        self._is_free[block] = 0
        self._free_count -= 1
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a block that is held or published."""
        if self._holders[block] == 0:
            del self._idle[block]
        self._holders[block] += 1

    def holders(self, block: int) -> int:
        return self._holders[block]

    def shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives up one hold on each. Deeper blocks of a prefix are given away before shallower ones."""
        for block in reversed(list(blocks)):
            holders = self._holders[block] - 1
            if holders < 0:
                raise RuntimeError(f"block {block} was released more often than held")
            self._holders[block] = holders
            if holders:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._give_back(block)

    def forget(self, block: int) -> None:
        """Withdraws a published block (its content is not to be served again)."""
        chain = self._hash_of.pop(block, None)
        if chain is not None:
            del self._block_of[chain]
        if block in self._idle:
            del self._idle[block]
            self._give_back(block)

    def publish(self, block: int, chain: bytes) -> None:
        """Makes a complete block findable; the first block published for a prefix stays."""
        if chain not in self._block_of and block not in self._hash_of:
            self._block_of[chain] = block
            self._hash_of[block] = chain

    def find(self, chains: Sequence[bytes]) -> list[int]:
        """Blocks of the longest published prefix. They are not held yet."""
        found: list[int] = []
        for chain in chains:
            block = self._block_of.get(chain)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these are counted in `available`: holding them makes it smaller."""
        return sum(1 for block in blocks if block in self._idle)

    def _lowest(self) -> int:
        while True:
            block = heapq.heappop(self._free)
            self._in_heap[block] = 0
            if self._is_free[block]:
                return block

    def _give_back(self, block: int) -> None:
        self._is_free[block] = 1
        self._free_count += 1
        if not self._in_heap[block]:
            self._in_heap[block] = 1
            heapq.heappush(self._free, block)
