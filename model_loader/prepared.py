"""A prepared form: one file of engine-ready tensors that any number of processes map read-only without a copy.

`open` maps a form that is complete, `open_arriving` one that its loader is still filling: whoever does that waits for
each group before it touches the group's tensors. Layout: `model_loader.prepared_layout`; writing: `prepared_writer`.
Limits: a mapping shows what the file holds, so a form must never be written to once it is complete.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_loader.board import BoardView
from model_loader.chunks import CHUNK_BYTES, ChunkList
from model_loader.errors import FormatError, IntegrityError, SourceMissing
from model_loader.file_memory import address_of, enter_for_reading, map_file
from model_loader.llama_layout import ITEM_BYTES
from model_loader.pace import Pace
from model_loader.prepared_layout import PAGE_BYTES, Preamble, PreparedTensor, read_table, read_tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PreparedFile:
    """A prepared form, mapped read-only. Arrays are views over the one mapping and keep it alive."""

    def __init__(
        self,
        path: Path,
        mapping: memoryview,
        preamble: Preamble,
        table: Mapping[str, Any],
        tensors: dict[str, PreparedTensor],
        board: BoardView | None,
    ) -> None:
        self.path = path
        self.identity: str = table["identity"]
        self.recipe: str = table["recipe"]
        self.dtype: str = table["dtype"]
        self.groups: tuple[str, ...] = tuple(table["groups"])
        self.nbytes = len(mapping)
        self.preamble = preamble
        self.board = board
        """What has landed; None where the form was complete when it was opened."""
        self._mapping = mapping
        self._tensors = tensors

    @classmethod
    def open(cls, path: Path, verify: bool) -> PreparedFile:
        """Maps a complete form. The preamble, the table and all bounds are always checked; `verify` also checks every
        chunk."""
        prepared = cls._open(path, may_arrive=False)
        if verify:
            prepared.verify()
        return prepared

    @classmethod
    def open_arriving(cls, path: Path) -> PreparedFile:
        """Maps a form that may be incomplete: `board` says what of it is there."""
        return cls._open(path, may_arrive=True)

    @classmethod
    def _open(cls, path: Path, *, may_arrive: bool) -> PreparedFile:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceMissing(f"no prepared checkpoint at {path}: {error.strerror}") from error
        board: BoardView | None = None
        try:
            size = os.fstat(handle).st_size
            if size < PAGE_BYTES:
                raise FormatError(f"{path} is no prepared checkpoint: {size} bytes, at least {PAGE_BYTES} needed")
            mapping = map_file(handle, size)
            preamble = Preamble.read(path, mapping, size, may_arrive=may_arrive)
            raw = bytes(mapping[preamble.table_offset : preamble.table_offset + preamble.table_bytes])
            table = read_table(path, preamble, raw)
            tensors = read_tensors(path, table, preamble)
            if not preamble.is_complete:
                board = BoardView(mapping, PAGE_BYTES, handle, str(path))
        finally:
            if board is None:
                os.close(handle)
        return cls(path, mapping, preamble, table, tensors, board)

    def keys(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def info(self, name: str) -> PreparedTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise FormatError(f"{self.path} has no tensor {name}; it is of recipe {self.recipe}") from None

    def raw(self, name: str) -> memoryview:
        entry = self.info(name)
        return self._mapping[entry.offset : entry.offset + entry.nbytes]

    def tensor(self, name: str) -> NDArray[Any]:
        """A read-only view: float32, or uint16 for bfloat16 and float16."""
        import numpy as np

        entry = self.info(name)
        kind: type[np.float32] | type[np.uint16] = np.float32 if entry.dtype == "float32" else np.uint16
        count = entry.nbytes // ITEM_BYTES[entry.dtype]
        flat = np.frombuffer(self._mapping, dtype=kind, count=count, offset=entry.offset)
        return flat.reshape(entry.shape, order="F" if entry.by_columns else "C")

    def wait(self, group: int, while_waiting: Callable[[], None] | None = None) -> None:
        """Returns when the group's tensors are there; raises what kept them."""
        if self.board is not None:
            self.board.wait(group, while_waiting)

    @property
    def pace(self) -> Pace | None:
        """Of the load that fills it; None: it is here, or that cannot be said."""
        return self.board.pace(self.preamble.body_bytes) if self.board is not None else None

    def populate(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Enters pages of the file into this process's page tables now, which costs less than a fault at the first use
        of each. Does not hold the interpreter's lock. `offset` is a multiple of the page size. Best effort."""
        end = self.nbytes if nbytes is None else min(self.nbytes, offset + nbytes)
        if offset < end:
            enter_for_reading(address_of(self._mapping) + offset, end - offset)

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._mapping[offset : offset + nbytes])

    def body(self) -> memoryview:
        """What the list of chunks is of."""
        return self._mapping[self.preamble.body_offset :][: self.preamble.body_bytes]

    def chunks(self) -> ChunkList:
        """Of the body: the file's bytes from `preamble.body_offset` on. Raises `IntegrityError` where the list itself
        is not what was written."""
        if not self.preamble.is_complete:
            raise FormatError(f"{self.path} has no list of chunks before it is complete")
        at = self.preamble.chunks_offset
        raw = bytes(self._mapping[at : at + self.preamble.chunks_bytes])
        if hashlib.sha256(raw).digest() != self.preamble.chunks_sha256:
            raise IntegrityError(f"{self.path}: its list of chunks does not match its digest; remove the file")
        return ChunkList.from_bytes(raw, str(self.path))

    def verify(self, on_bytes: Callable[[int], None] | None = None, *, threads: int = 0) -> None:
        """Checks every chunk; raises `IntegrityError` naming one that is bad."""
        chunks, body = self.chunks(), self._mapping[self.preamble.body_offset :]
        waiting, lock = iter(range(len(chunks))), threading.Lock()
        errors: list[BaseException] = []

        def work() -> None:
            while not errors:
                with lock:
                    index = next(waiting, None)
                if index is None:
                    return
                begin, nbytes = chunks.bounds(index)
                try:
                    chunks.check(index, body[begin : begin + nbytes], f"{self.path}, its body")
                    if on_bytes is not None:
                        on_bytes(nbytes)
                except BaseException as error:
                    errors.append(error)

        count = min(threads or len(os.sched_getaffinity(0)), max(1, self.nbytes // (4 * CHUNK_BYTES)))
        helpers = [threading.Thread(target=work, name="verify", daemon=True) for _ in range(count - 1)]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]
