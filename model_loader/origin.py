"""The object store that a checkpoint was fetched from, for what this machine's copy no longer gives.

Nothing is opened until it is asked: a load whose files are intact knows no bucket. What comes is verified by the same
chunks as the copy. Limits: an object that was replaced since is refused like any other bytes that differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from model_loader.chunks import CHUNK_BYTES
from model_loader.manifest import Manifest
from model_loader.objects import ObjectStore, open_store
from model_loader.ranges.source import Tier
from model_loader.ranges.stored import RANGE_BYTES, StoredSource


class OriginSource:
    """One store, opened when it is first needed."""

    tier: Final = Tier.STORE
    threads: Final = 4

    def __init__(
        self,
        uri: str,
        keys: dict[str, str],
        opener: Callable[[str], ObjectStore] | None = None,
        *,
        streams: bool = False,
    ) -> None:
        """`streams`: everything comes from here; otherwise it repairs, a chunk at a time."""
        self.name = uri
        self.range_bytes = RANGE_BYTES if streams else CHUNK_BYTES
        self._keys = keys
        self._opener = opener
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None
        self._source: StoredSource | None = None

    def size(self, file: str) -> int:
        return self._opened().size(file)

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        return self._opened().read_into(file, offset, view, within_s=within_s)

    def close(self) -> None:
        with self._lock:
            store, self._store, self._source = self._store, None, None
        if store is not None:
            store.close()

    def _opened(self) -> StoredSource:
        with self._lock:
            if self._source is None:
                self._store = (self._opener or open_store)(self.name)
                self._source = StoredSource(self._store, self._keys)
            return self._source


def origin_sources(manifest: Manifest, *, streams: bool = False) -> Sequence[OriginSource]:
    """One for each store that files of the checkpoint were fetched from; mostly one or none."""
    keys: dict[str, dict[str, str]] = {}
    for file, content in zip(manifest.files, manifest.contents, strict=False):
        if content.origin:
            keys.setdefault(content.origin, {})[file.path] = content.key
    return [OriginSource(uri, each, streams=streams) for uri, each in keys.items()]
