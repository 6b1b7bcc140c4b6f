"""An object store that notes every range it gives, and can be told what happens after so many of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from model_loader.objects import ObjectInfo, ObjectStore


@dataclass
class CountingStore:
    inner: ObjectStore
    after: int = 0
    """Ranges after which `then` is called, once; 0: never."""
    then: Callable[[], None] = lambda: None
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """key, offset, bytes"""
    lists: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self.inner.uri

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.ranges)

    def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
        self.inner.get_into(key, offset, view, within_s=within_s)
        with self._lock:
            self.ranges.append((key, offset, len(view)))
            due = len(self.ranges) == self.after
        if due:
            self.then()

    def list(self, prefix: str, *, within_s: float | None = None) -> Iterator[ObjectInfo]:
        self.lists += 1
        return self.inner.list(prefix, within_s=within_s)

    def close(self) -> None:
        pass
