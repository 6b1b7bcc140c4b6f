"""Chunks that are in the store for sure enough to be named again without being written again.

A name is good while an unfinished request here counts on its pack, or for `KNOWN_FOR_S` after the index or a verified
read spoke of it: whoever lets packs go waits longer than that. Limits: bounded; what is forgotten is written again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias

from function_runtime.protocol import KvChunk

KNOWN_FOR_S: Final = 60.0
KEPT: Final = 65_536

Key: TypeAlias = tuple[bytes, int, str]
"""(chain at the end, position of the start, lineage); identity and scope are in the chain."""


class KnownChunks:
    def __init__(self, clock: Callable[[], float], for_s: float = KNOWN_FOR_S) -> None:
        self._clock = clock
        self._for_s = for_s
        self._chunks: OrderedDict[Key, tuple[KvChunk, float]] = OrderedDict()

    def add(self, chunk: KvChunk) -> None:
        key = (bytes.fromhex(chunk.chain), chunk.start, chunk.lineage)
        self._chunks[key] = (chunk, self._clock())
        self._chunks.move_to_end(key)
        while len(self._chunks) > KEPT:
            self._chunks.popitem(last=False)

    def find(self, key: Key, is_counted_on: Callable[[str], bool]) -> KvChunk | None:
        known = self._chunks.get(key)
        if known is None:
            return None
        chunk, at_s = known
        if is_counted_on(chunk.pack) or self._clock() - at_s < self._for_s:
            return chunk
        del self._chunks[key]
        return None

    def forget_pack(self, pack: str) -> None:
        for key in [key for key, (chunk, _) in self._chunks.items() if chunk.pack == pack]:
            del self._chunks[key]
