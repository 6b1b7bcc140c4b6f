"""Blocks of KV memory: who holds them, and which complete ones can serve a prefix again.

A block is held by a count of choices; a complete block may be published under its chain hash, beside others of the same
tokens that were computed in other passes: a prefix is found whole or not at all as one request computed it. A block
nobody holds is free, or, if published, kept for its prefix until it is needed (least recently used first). There may
be more or fewer of them from a moment on (`numbers_within`, then `renumber`). Limits: numbers only, the memory itself
is in `kv_cache`; a published block never changes; `WAYS` blocks for the same tokens.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from function_runtime.passes import NONE, Passes

WAYS: Final = 4
"""Blocks of the same tokens, each of other passes, that are kept."""


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
        self._name_of: dict[int, tuple[bytes, Passes]] = {}
        self._block_of: dict[bytes, dict[Passes, int]] = {}
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
            self._withdraw(block)
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
            if block in self._name_of:
                self._idle[block] = None
            else:
                self._give_back(block)

    def forget(self, block: int) -> None:
        """Withdraws a published block (its content is not to be served again)."""
        if block in self._name_of:
            self._withdraw(block)
        if block in self._idle:
            del self._idle[block]
            self._give_back(block)

    def _withdraw(self, block: int) -> None:
        chain, passes = self._name_of.pop(block)
        ways = self._block_of[chain]
        del ways[passes]
        if not ways:
            del self._block_of[chain]

    def publish(self, block: int, chain: bytes, passes: Passes = NONE) -> None:
        """Makes a complete block findable; the first block published for a prefix and its passes stays."""
        ways = self._block_of.get(chain, {})
        if passes not in ways and block not in self._name_of and len(ways) < WAYS:
            self._block_of[chain] = {**ways, passes: block}
            self._name_of[block] = (chain, passes)

    def find(self, chains: Sequence[bytes], block_size: int) -> tuple[list[int], Passes]:
        """Blocks of the longest published prefix that was computed as one, and how. They are not held yet."""
        levels: list[dict[Passes, int]] = []
        before: dict[Passes, int] = {NONE: 0}
        for index, chain in enumerate(chains):
            ways = self._block_of.get(chain, {})
            before = {passes: block for passes, block in ways.items() if passes.upto(index * block_size) in before}
            if not before:
                break
            levels.append(before)
        if not levels:
            return [], NONE
        passes = next(iter(levels[-1]))
        found = [level[passes.upto((index + 1) * block_size)] for index, level in enumerate(levels)]
        return found, passes

    def follow(self, chains: Sequence[bytes], block_size: int, passes: Passes) -> list[int]:
        """Blocks of the longest published prefix that was computed in these passes."""
        found: list[int] = []
        for index, chain in enumerate(chains):
            block = self._block_of.get(chain, {}).get(passes.upto((index + 1) * block_size))
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these are counted in `available`: holding them makes it smaller."""
        return sum(1 for block in blocks if block in self._idle)

    # --- more of them, or fewer ---------------------------------------------------------------------------------------

    def numbers_within(self, total: int) -> dict[int, int]:
        """What every block that is held or published would be called if there were so many: those beyond the end take
        free numbers, all others keep theirs. Prefixes that nobody holds are given up where they would not fit."""
        if total < self.used:
            raise RuntimeError(f"{self.used} blocks are held, {total} are too few")
        while self.total - self._free_count > total:
            block, _ = self._idle.popitem(last=False)
            self._withdraw(block)
            self._give_back(block)
        taken = [block for block in range(self.total) if not self._is_free[block]]
        free = (block for block in range(min(total, self.total)) if self._is_free[block])
        return {block: block if block < total else next(free) for block in taken}

    def renumber(self, total: int, numbers: Mapping[int, int]) -> None:
        """From now on there are so many, called as `numbers_within` has said."""
        holders = [0] * total
        self._is_free = bytearray(b"\x01" * total)
        for before, now in numbers.items():
            holders[now] = self._holders[before]
            self._is_free[now] = 0
        self._holders, self.total = holders, total
        self._name_of = {numbers[block]: name for block, name in self._name_of.items()}
        self._block_of = {
            chain: {passes: numbers[block] for passes, block in ways.items()} for chain, ways in self._block_of.items()
        }
        self._idle = OrderedDict((numbers[block], None) for block in self._idle)
        self._free = [block for block in range(total) if self._is_free[block]]  # in order, so that it is a heap
        self._in_heap = bytearray(self._is_free)
        self._free_count = len(self._free)

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
