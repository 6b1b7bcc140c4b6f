"""Forms that are kept below the pool: their chunks in the disk tier, or whole in the object store, with their heads.

    disk:  <tier>/<name>.head + chunks under the name      store: forms/<name>/head + forms/<name>/body

The head is written last and read first: a form without one is not there. A chunk that is missing or bad costs a fetch
from the next source. Limits: what the budget of the disk tier takes away leaves a head with holes, which is worth what
is left of it; `forms.sweeping` lets objects of the store go.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from model_loader.chunks import CHUNK_BYTES
from model_loader.disk_tier import DiskTier
from model_loader.errors import FormatError, IntegrityError, LoaderError, MissingObject, SourceMissing
from model_loader.forms.head import FormHead, form_name
from model_loader.manifest import write_atomically
from model_loader.objects.protocol import ObjectStore
from model_loader.prepared import PreparedFile
from model_loader.prepared_layout import read_table
from model_loader.ranges.source import RangeSource, Tier
from model_loader.ranges.stored import StoredSource

STORE_WITHIN_S: Final = 60.0
_PART_BYTES: Final = 16 * CHUNK_BYTES
NEARLY_WHOLE: Final = 0.9
"""Share of its chunks from which on a form counts as being on the disk: the rest is fetched."""


class DiskForms:
    """Forms in a disk tier, as a source."""

    name: Final = "disk tier"
    tier: Final = Tier.DISK
    range_bytes: Final = CHUNK_BYTES
    threads: Final = 2

    def __init__(self, tier: DiskTier) -> None:
        self.disk = tier

    def head(self, name: str) -> FormHead | None:
        path = self._head_path(name)
        try:
            return FormHead.from_bytes(path.read_bytes(), path)
        except (OSError, FormatError, IntegrityError):
            return None

    def share(self, name: str, head: FormHead) -> float:
        """Of the form's chunks that are here, 0 to 1."""
        return self.disk.count(name) / max(1, len(head.chunks))

    def size(self, file: str) -> int:
        head = self.head(file)
        if head is None:
            raise SourceMissing(f"the disk tier has no form {file[:12]}")
        return head.preamble.body_bytes

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        index, at = divmod(offset, CHUNK_BYTES)
        return self.disk.pread_into(file, index, at, view[: CHUNK_BYTES - at])

    def keep(self, form: PreparedFile) -> bool:
        """Puts a complete form's chunks there, verified once more on the way. False: there was no room for all."""
        name, head = form_name(form.identity, form.recipe), head_of(form)
        body = form.body()
        for index in range(len(head.chunks)):
            begin, nbytes = head.chunks.bounds(index)
            view = body[begin : begin + nbytes]
            head.chunks.check(index, view, str(form.path))
            if not self.disk.put(name, index, view):
                return False
        with suppress(OSError):
            write_atomically(self._head_path(name), head.to_bytes())
            return True
        return False

    def mend(self, name: str) -> int:
        """Removes chunks that are no longer what they were; gives their number."""
        head = self.head(name)
        if head is None:
            return 0
        buffer, bad = memoryview(mmap.mmap(-1, CHUNK_BYTES)), 0
        for index in range(len(head.chunks)):
            nbytes = head.chunks.bounds(index)[1]
            if self.disk.has(name, index) and not self.disk.read_into(name, head.chunks, index, buffer[:nbytes]):
                bad += 1
        return bad

    def _head_path(self, name: str) -> Path:
        return self.disk.directory / f"{name}.head"


class StoredForms:
    """Forms as objects."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def head(self, name: str) -> FormHead | None:
        """Raises `StoreError` where the store does not say."""
        try:
            raw = self._store.get(f"forms/{name}/head", within_s=STORE_WITHIN_S)
        except MissingObject:
            return None
        return FormHead.from_bytes(raw, Path(f"{self._store.uri}/forms/{name}/head"))

    def source(self, name: str) -> RangeSource:
        return StoredSource(self._store, {name: f"forms/{name}/body"})

    def keep(self, form: PreparedFile) -> int:
        """Stores a complete form; gives the bytes written, 0 where it is there already."""
        name, head, body = form_name(form.identity, form.recipe), head_of(form), form.body()
        if self.head(name) is not None:
            return 0
        form.verify()
        parts = [body[at : at + _PART_BYTES] for at in range(0, len(body), _PART_BYTES)]
        written = self._store.put(f"forms/{name}/body", *parts)
        return written + self._store.put(f"forms/{name}/head", head.to_bytes())


def head_of(form: PreparedFile) -> FormHead:
    preamble = form.preamble
    table = form.bytes_at(preamble.table_offset, preamble.table_bytes)
    return FormHead(preamble, table, form.chunks())


def forget_forms(tier: DiskTier, names: Iterable[str]) -> None:
    """Removes forms from a disk tier, head and chunks."""
    for name in names:
        with suppress(OSError):
            os.unlink(tier.directory / f"{name}.head")
        tier.forget(name)


def checkpoints_on(directory: Path) -> tuple[str, ...]:
    """Identities of the checkpoints of which (nearly) a whole form lies in the disk tier there. Makes nothing."""
    if not directory.is_dir():
        return ()
    disk, found = DiskForms(DiskTier(directory, 0)), set[str]()
    for path in directory.glob("*.head"):
        head = disk.head(path.stem)
        with suppress(LoaderError):
            if head is not None and disk.share(path.stem, head) >= NEARLY_WHOLE:
                found.add(str(read_table(path, head.preamble, head.table)["identity"]))
    return tuple(sorted(found))


def sweep_heads(tier: DiskTier) -> int:
    """Removes heads of which no chunk is left; gives their number."""
    removed = 0
    for path in tier.directory.glob("*.head"):
        with suppress(OSError, LoaderError):
            if tier.count(path.stem) == 0:
                os.unlink(path)
                removed += 1
    return removed
