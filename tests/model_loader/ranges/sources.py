"""Sources that fail in ways a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from model_loader.chunks import CHUNK_BYTES, ChunkDigester, ChunkList
from model_loader.errors import SourceMissing
from model_loader.ranges.source import Tier


def chunks_of(content: bytes) -> ChunkList:
    digester = ChunkDigester()
    digester.update(content)
    return digester.finish()


class MemorySource:
    """Files in memory. `before(file, offset, nbytes)` may raise, wait, or give other bytes to answer with."""

    range_bytes = CHUNK_BYTES

    def __init__(
        self,
        files: Mapping[str, bytes],
        name: str = "memory",
        tier: Tier = Tier.STORE,
        before: Callable[[str, int, int], bytes | None] | None = None,
        threads: int = 2,
        most_bytes: int = 1 << 30,
    ) -> None:
        self.name, self.tier, self.threads = name, tier, threads
        self.files = dict(files)
        self.asked: list[tuple[str, int, int]] = []
        self._before = before
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    def size(self, file: str) -> int:
        if file not in self.files:
            raise SourceMissing(f"{self.name} has no {file}")
        return len(self.files[file])

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        nbytes = min(len(view), self._most_bytes)
        with self._lock:
            self.asked.append((file, offset, nbytes))
        other = self._before(file, offset, nbytes) if self._before is not None else None
        content = self.files[file][offset : offset + nbytes] if other is None else other
        view[: len(content)] = content
        return len(content)
