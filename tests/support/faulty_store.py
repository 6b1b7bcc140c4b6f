"""An object store that misbehaves on purpose, around one that does not: what S3 does on a bad day, by a seed.

    store = FaultyStore(DirectoryStore(path), seed=7)
    store.fail("reset", share=0.2)                 # a fifth of all operations
    store.fail("flipped", kinds=("get",), times=1) # the next read, once
    damage(store.inner, key, "truncated", seed=7)  # the object itself, for good

`made` lists what was done to whom. Limits: a hang ends when the operation's deadline does (or after `hang_s`), as that
of a real client would.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from model_loader.errors import MissingObject, ShortObject, StoreUnavailable
from model_loader.objects import Buffer, ObjectInfo, ObjectStore, StoreStats

TRANSIENT = ("slow", "503", "reset", "hang")
"""What a store answers, or does not."""
WRONG = ("truncated", "flipped", "swapped", "deleted")
"""What a reader may be given instead of the object."""
KINDS = ("get", "put", "head", "list", "delete")


@dataclass
class Fault:
    what: str
    share: float = 1.0
    kinds: tuple[str, ...] = KINDS
    times: int | None = None
    """How often at most; None has no end."""
    keys: str = ""
    """Only keys that begin so."""


@dataclass(frozen=True)
class Made:
    what: str
    kind: str
    key: str


@dataclass
class FaultyStore:
    inner: ObjectStore
    seed: int = 0
    slow_s: float = 0.05
    hang_s: float = 5.0
    sleep: Callable[[float], None] = time.sleep
    made: list[Made] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def stats(self) -> StoreStats:
        return self.inner.stats

    # --- what shall go wrong --------------------------------------------------------------------------------------

    def fail(
        self,
        what: str,
        *,
        share: float = 1.0,
        kinds: tuple[str, ...] = KINDS,
        times: int | None = None,
        keys: str = "",
    ) -> Fault:
        """From now on. Faults are asked in the order in which they were given; one operation suffers one."""
        if what not in (*TRANSIENT, *WRONG):
            raise ValueError(f"no fault {what!r}; there are {', '.join((*TRANSIENT, *WRONG))}")
        kinds = tuple(kind for kind in kinds if what in TRANSIENT or kind == "get")
        fault = Fault(what, share, kinds, times, keys)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def _drawn(self, kind: str, key: str) -> str:
        with self._lock:
            for fault in self._faults:
                due = kind in fault.kinds and key.startswith(fault.keys) and fault.times != 0
                if due and self._random.random() < fault.share:
                    if fault.times is not None:
                        fault.times -= 1
                    self.made.append(Made(fault.what, kind, key))
                    return fault.what
        return ""

    def _suffer(self, kind: str, key: str, within_s: float | None) -> str:
        """The fault that is left to the operation itself, after those that any operation can suffer."""
        what = self._drawn(kind, key)
        if what == "slow":
            self.sleep(self.slow_s if within_s is None else min(self.slow_s, within_s))
            if within_s is not None and within_s <= self.slow_s:
                raise StoreUnavailable("the store did not answer within the deadline")
        elif what == "503":
            raise StoreUnavailable("the store answered 503 SlowDown: reduce your request rate")
        elif what == "reset":
            raise StoreUnavailable("the store cannot be used: Connection reset by peer")
        elif what == "hang":
            self.sleep(self.hang_s if within_s is None else min(self.hang_s, within_s))
            raise StoreUnavailable("the store did not answer within the deadline")
        else:
            return what
        return ""

    # --- the store ------------------------------------------------------------------------------------------------

    def put(self, key: str, *parts: Buffer, durable: bool = True, within_s: float | None = None) -> int:
        self._suffer("put", key, within_s)
        return self.inner.put(key, *parts, durable=durable, within_s=within_s)

    def get(self, key: str, offset: int = 0, length: int | None = None, *, within_s: float | None = None) -> bytes:
        what = self._suffer("get", key, within_s)
        self._refuse(what, key)
        data = bytearray(self.inner.get(self._source(what, key), offset, length, within_s=within_s))
        self._spoil(what, memoryview(data))
        return bytes(data)

    def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
        what = self._suffer("get", key, within_s)
        self._refuse(what, key)
        self.inner.get_into(self._source(what, key), offset, view, within_s=within_s)
        self._spoil(what, view.cast("B"))

    def exists(self, key: str, *, within_s: float | None = None) -> int | None:
        self._suffer("head", key, within_s)
        return self.inner.exists(key, within_s=within_s)

    def list(self, prefix: str, *, within_s: float | None = None) -> Iterator[ObjectInfo]:
        self._suffer("list", prefix, within_s)
        return self.inner.list(prefix, within_s=within_s)

    def delete(self, key: str, *, within_s: float | None = None) -> None:
        self._suffer("delete", key, within_s)
        self.inner.delete(key, within_s=within_s)

    def check(self, *, within_s: float | None = None) -> None:
        self._suffer("list", "", within_s)
        self.inner.check(within_s=within_s)

    def close(self) -> None:
        self.inner.close()

    def _refuse(self, what: str, key: str) -> None:
        if what == "deleted":
            raise MissingObject(f"there is no object {key}")
        if what == "truncated":
            raise ShortObject(f"object {key} is short: it ends before the bytes that were asked for")

    def _source(self, what: str, key: str) -> str:
        return another(self.inner, key, self._random) if what == "swapped" else key

    def _spoil(self, what: str, view: memoryview) -> None:
        if what == "flipped" and len(view):
            at = self._random.randrange(len(view))
            view[at] ^= 1 << self._random.randrange(8)


def another(store: ObjectStore, key: str, chance: random.Random) -> str:
    """Another object, of the same folder's siblings where there are any: an object of another tenant, dtype or revision
    has the same shape and another name."""
    others = [info.key for info in store.list(key.split("/")[0]) if info.key != key]
    return chance.choice(others) if others else key


def damage(store: ObjectStore, key: str, how: str, seed: int = 0, other: str | None = None) -> None:
    """Does it to the stored object: truncated, flipped (one bit), swapped (with `other`, or any), deleted."""
    chance = random.Random(seed)
    if how == "deleted":
        store.delete(key)
        return
    content = bytearray(store.get(key))
    if how == "truncated":
        store.put(key, content[: chance.randrange(len(content))])
    elif how == "flipped":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        store.put(key, content)
    elif how == "swapped":
        other = other or another(store, key, chance)
        theirs = store.get(other)
        store.put(other, content)
        store.put(key, theirs)
    else:
        raise ValueError(f"no damage {how!r}; there are {', '.join(WRONG)}")
