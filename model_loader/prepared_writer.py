"""Writes a prepared form at known places, from several threads, into new memory or that of a form nobody needs.

    begin: table, empty board, preamble that says `arriving` -> bytes and groups land -> seal: list of chunks -> appears

The file has a temporary name until `commit`; whoever is told that name may map it before. Leaving the context without
`commit` marks the board failed and removes the file. Limits: one writer a form.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import xxhash

from model_loader.board import Board
from model_loader.chunks import ChunkList, count_chunks, digest_chunk
from model_loader.errors import FormatError, LoaderError, SourceMissing, SourceUnavailable, from_os_error
from model_loader.form_memory import FormMemory
from model_loader.pool_room import is_memory
from model_loader.prepared_layout import PAGE_BYTES, TensorPlan, plan_layout
from model_loader.ranges.source import ReadStats

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SEAL_BYTES: Final = 512 * 1024
"""Read at a time where the list of chunks is made: it stays in the cache while it is digested."""


class PreparedWriter:
    """`recycle`: a form's file in the same directory that nobody maps any more; its memory is written over, which costs
    a third of having new pages zeroed and entered. `is_last_resort`: no other way to the form is tried where this one
    fails, so that who waits has reason to give up."""

    def __init__(
        self,
        path: Path,
        identity: str,
        recipe: str,
        dtype: str,
        plans: Sequence[TensorPlan],
        *,
        groups: Sequence[str] = ("all",),
        recycle: Path | None = None,
        is_last_resort: bool = True,
    ) -> None:
        self.path = path
        self._is_last_resort = is_last_resort
        self._layout = plan_layout(identity, recipe, dtype, groups, plans)
        self._groups = len(groups)
        self._recycle = recycle
        self._memory: FormMemory | None = None
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self._handle: int | None = None
        self._board: Board | None = None
        self._lock = threading.Lock()
        self._committed = False
        self._stats: ReadStats | None = None

    @property
    def nbytes(self) -> int:
        return self._layout.preamble.file_bytes

    def __enter__(self) -> Self:
        preamble = self._layout.preamble
        try:
            self._handle = self._take_recycled() or os.open(
                self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
            )
            os.ftruncate(self._handle, preamble.file_bytes)
            if self._memory is not None:
                self._memory = self._memory.resized(self._handle, preamble.file_bytes)
            elif is_memory(self.path.parent):
                self._memory = FormMemory(self.temporary, self._handle, preamble.file_bytes)
        except OSError as error:
            self._drop()
            raise from_os_error(error, str(self.path)) from error
        try:
            self._board = Board(self._handle, PAGE_BYTES, self._groups)
            self.write(preamble.table_offset, self._layout.table)
            self.write(0, preamble.pack())
        except OSError as error:
            self._drop()
            raise from_os_error(error, str(self.path)) from error
        except BaseException:
            self._drop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._board is not None and not self._committed:
            told = error or LoaderError(f"{self.path} was given up before it was complete")
            self._board.fail(told if self._is_last_resort else SourceUnavailable(f"{told}; another way is tried"))
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            if self._board is not None:
                self._board.close()
                self._board = None
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            if not self._committed:
                self.temporary.unlink(missing_ok=True)

    def _take_recycled(self) -> int | None:
        """The old file under the new name. Its mark is wiped first: it is no complete form any more."""
        if self._recycle is None:
            return None
        try:
            retired = FormMemory.retired(self._recycle)
            os.rename(retired.path, self.temporary)
        except (OSError, SourceMissing):
            return None
        handle = os.open(self.temporary, os.O_RDWR | os.O_CLOEXEC)
        os.pwrite(handle, bytes(PAGE_BYTES), 0)
        retired.path = self.temporary
        self._memory = retired
        return handle

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """Memory of the form itself to read into; None where it lies on a disk. Raises `OutOfSpace`."""
        return self._memory.view(offset, nbytes) if self._memory is not None else None

    @property
    def fileno(self) -> int:
        if self._handle is None:
            raise FormatError(f"the writer of {self.path} is closed")
        return self._handle

    def place(self, name: str) -> int:
        return self._layout.places[name]

    def write(self, offset: int, data: Any) -> None:
        if self._memory is not None:
            self._memory.enter(offset, memoryview(data).nbytes)
        write_fully(self.fileno, offset, data, str(self.path))

    def landed(self, group: int) -> None:
        """Every byte of the group's tensors is written and verified. From any thread."""
        with self._lock:
            if self._board is not None:
                self._board.landed(group)

    def follow(self, stats: ReadStats, far_bytes: int, threads: int) -> None:
        """Reading begins; what `stats` counts is told to whoever plans around this load."""
        with self._lock:
            self._stats = stats if far_bytes else None
            if self._board is not None:
                self._board.begin(far_bytes, threads)

    def moved(self, nbytes: int) -> None:
        """Something is on its way: who waits knows that it is worth while. From any thread."""
        with self._lock:
            if self._board is not None:
                self._board.moved(nbytes)
                if self._stats is not None:
                    self._board.note(*self._stats.afar())

    def complete(self) -> None:
        """Everything has landed: the form may be used, though it has neither its list of chunks nor its name yet."""
        with self._lock:
            if self._board is not None:
                for group in range(self._groups):
                    self._board.landed(group)
                self._board.complete()

    def commit(self, *, durable: bool = False, threads: int = 0) -> ChunkList:
        """Makes the list of chunks, which it gives, and lets the file appear. `durable` adds the fsyncs (not needed on
        tmpfs)."""
        self.complete()
        preamble = self._layout.preamble
        sealed = self._seal(threads or len(os.sched_getaffinity(0)))
        chunks = sealed.to_bytes()
        self.write(preamble.chunks_offset, chunks)
        final = replace(preamble, chunks_sha256=hashlib.sha256(chunks).digest(), is_complete=True)
        try:
            if durable:
                os.fsync(self.fileno)
            self.write(0, final.pack())
            if durable:
                os.fsync(self.fileno)
            os.replace(self.temporary, self.path)
            self._committed = True
            if durable:
                folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError as error:
            raise from_os_error(error, str(self.path)) from error
        return sealed

    def _seal(self, threads: int) -> ChunkList:
        preamble, handle = self._layout.preamble, self.fileno
        blank = ChunkList(preamble.body_bytes, bytes(16 * count_chunks(preamble.body_bytes)))
        local = threading.local()

        def digest(index: int) -> bytes:
            if self._memory is not None:
                begin, nbytes = blank.bounds(index)
                return digest_chunk(self._memory.view(preamble.body_offset + begin, nbytes))
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(_SEAL_BYTES))
            begin, nbytes = blank.bounds(index)
            at, end, state = preamble.body_offset + begin, preamble.body_offset + begin + nbytes, xxhash.xxh3_128()
            while at < end:
                count = os.preadv(handle, [local.buffer[: min(_SEAL_BYTES, end - at)]], at)
                if count == 0:
                    raise FormatError(f"{self.path} became shorter while it was written")
                state.update(local.buffer[:count])
                at += count
            return state.digest()

        if len(blank) < 2 * threads:
            return ChunkList(preamble.body_bytes, b"".join(map(digest, range(len(blank)))))
        with ThreadPoolExecutor(threads, thread_name_prefix="seal") as pool:
            return ChunkList(preamble.body_bytes, b"".join(pool.map(digest, range(len(blank)))))


def write_fully(handle: int, offset: int, data: Any, what: str) -> None:
    """pwrite until all is written; a full disk is `OutOfSpace`."""
    view = memoryview(data).cast("B")
    try:
        while len(view):
            written = os.pwrite(handle, view, offset)
            offset += written
            view = view[written:]
    except OSError as error:
        raise from_os_error(error, what) from error


def write_prepared(
    path: Path,
    identity: str,
    recipe: str,
    dtype: str,
    tensors: Iterable[tuple[str, str, NDArray[Any]]],
    *,
    durable: bool = False,
) -> None:
    """Writes (name, dtype, array) triples that are all at hand; bfloat16 and float16 as uint16 (or float16) arrays."""
    triples = list(tensors)
    plans = [TensorPlan(name, kind, tuple(array.shape)) for name, kind, array in triples]
    with PreparedWriter(path, identity, recipe, dtype, plans) as writer:
        for (name, _kind, array), plan in zip(triples, plans, strict=True):
            if array.nbytes != plan.nbytes:
                raise FormatError(f"{name}: {array.nbytes} bytes given where {plan.dtype} needs {plan.nbytes}")
            writer.write(writer.place(name), array.reshape(-1).view("u1"))
        writer.commit(durable=durable)
