"""Files as objects of a store: ranges that hide latency, each fetched by the store itself in parallel parts.

Limits: what a store's own guard retries is not seen here; a file is one object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import (
    IntegrityError,
    MissingObject,
    ShortObject,
    SourceMissing,
    SourceUnavailable,
    StoreError,
)
from model_loader.objects.protocol import ObjectStore
from model_loader.ranges.source import Tier

RANGE_BYTES: Final = 4 * CHUNK_BYTES
"""What one connection moves in a few tens of milliseconds on a fast store; a part of a request costs another."""
THREADS: Final = 4


class StoredSource:
    """`keys` says which object a file is."""

    range_bytes: Final = RANGE_BYTES
    threads: Final = THREADS

    def __init__(self, store: ObjectStore, keys: Mapping[str, str], tier: Tier = Tier.STORE) -> None:
        self.name = store.uri
        self.tier = tier
        self._store = store
        self._keys = keys

    def size(self, file: str) -> int:
        key = self._key(file)
        try:
            nbytes = self._store.exists(key)
        except StoreError as error:
            raise _told(error, f"{self.name}/{key}") from error
        if nbytes is None:
            raise SourceMissing(f"{self.name} has no object {key}")
        return nbytes

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        key = self._key(file)
        try:
            self._store.get_into(key, offset, view, within_s=within_s)
        except StoreError as error:
            raise _told(error, f"{self.name}/{key}") from error
        return len(view)

    def _key(self, file: str) -> str:
        key = self._keys.get(file)
        if key is None:
            raise SourceMissing(f"{self.name} has no file {file}")
        return key


def _told(error: StoreError, what: str) -> SourceMissing | IntegrityError | SourceUnavailable:
    if isinstance(error, MissingObject):
        return SourceMissing(f"{what} is gone: {error}")
    if isinstance(error, ShortObject):
        return IntegrityError(f"{what} is shorter than it was: {error}")
    return SourceUnavailable(f"{what} cannot be read: {error}")
