"""What every object store does: put, get by range, look, list, delete, and check that it can be used.

Keys are relative paths of plain segments; an object appears whole or not at all. Everything is synchronous; callers use
threads. `within_s` bounds one operation, retries included; None leaves it to the store's own limits.
Limits: no locks, no conditions, no versions: names say what content is, and the journal says whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from model_loader.errors import StoreError
from model_loader.objects.stats import StoreStats

Buffer = bytes | bytearray | memoryview

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_=+@%,~-][A-Za-z0-9_=+@%,~.-]*")
_MAX_KEY_CHARS: Final = 900
CHECK_PREFIX: Final = "store-check/"
"""Where `check` writes its object."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    nbytes: int
    modified_s: float = field(default=0.0, compare=False)
    """When it was written, by the store's clock (seconds since 1970)."""
    version: str = field(default="", compare=False)
    """Differs when the object was written again, however like it the new one is in size and time: an ETag, or a file's
    inode and time in nanoseconds."""


class ObjectStore(Protocol):
    """Raises MissingObject, ShortObject, StoreUnavailable, StoreRefused, OutOfSpace, or another StoreError."""

    @property
    def uri(self) -> str:
        """What names it, without secrets."""
        ...

    @property
    def stats(self) -> StoreStats: ...

    def put(self, key: str, *parts: Buffer, durable: bool = True, within_s: float | None = None) -> int:
        """Stores the parts, joined, under `key`, replacing what was there; gives the number of bytes. Afterwards a
        reader sees all of it; before, nothing or the old object. `durable=False` may lose it in a power cut."""
        ...

    def get(self, key: str, offset: int = 0, length: int | None = None, *, within_s: float | None = None) -> bytes:
        """Exactly `length` bytes from `offset`, or everything from `offset`."""
        ...

    def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
        """Fills `view` from `offset`. Once it has returned or raised, nothing writes to `view` any more; what is in it
        after an error is undefined."""
        ...

    def exists(self, key: str, *, within_s: float | None = None) -> int | None:
        """The object's size, or None."""
        ...

    def list(self, prefix: str, *, within_s: float | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`. A directory and AWS give them in the order of their keys; other S3
        stores do so folder by folder, so nothing may count on it. `within_s` is for each page of it."""
        ...

    def delete(self, key: str, *, within_s: float | None = None) -> None:
        """Removes it; it need not be there."""
        ...

    def check(self, *, within_s: float | None = None) -> None:
        """Writes, reads, lists and removes a small object; raises what hinders that, in one sentence that says what to
        do (`model_loader.errors.problem_of` tells the kinds apart)."""
        ...

    def close(self) -> None:
        """Ends its connections and threads; it must not be used afterwards."""
        ...


def check_key(key: str) -> str:
    if len(key) > _MAX_KEY_CHARS or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise StoreError(f"object key {key[:100]!r} is not allowed: plain segments joined by '/' are")
    return key
