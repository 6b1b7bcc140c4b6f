"""Verified bytes of files by offset, for readers that make something else of them: the last chunks read are kept.

Neighbouring tensors share chunks, and several threads read on in several tensors; each chunk is fetched once as long as
it stays within the budget. Limits: memory of `budget_bytes` beside the reader's; bytes are copied out.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from model_loader.chunks import CHUNK_BYTES
from model_loader.errors import IntegrityError
from model_loader.ranges.reader import VerifiedReader

BUDGET_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True)
class _Held:
    buffer: memoryview
    users: int = 0
    ready: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Window:
    def __init__(self, reader: VerifiedReader, budget_bytes: int = BUDGET_BYTES) -> None:
        self._reader = reader
        self._most = max(2, budget_bytes // CHUNK_BYTES)
        self._held: OrderedDict[tuple[str, int], _Held] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, file: str, offset: int, view: memoryview) -> None:
        """Fills `view` with the file's bytes from `offset` on."""
        chunks = self._reader.files[file]
        if offset < 0 or offset + len(view) > chunks.nbytes:
            raise IntegrityError(f"bytes {offset} to {offset + len(view)} of {file} are not in its {chunks.nbytes}")
        for index in chunks.covering(offset, len(view)):
            begin, nbytes = chunks.bounds(index)
            low, high = max(offset, begin), min(offset + len(view), begin + nbytes)
            held = self._take(file, index, nbytes)
            try:
                view[low - offset : high - offset] = held.buffer[low - begin : high - begin]
            finally:
                with self._lock:
                    held.users -= 1

    def _take(self, file: str, index: int, nbytes: int) -> _Held:
        key = (file, index)
        with self._lock:
            held = self._held.get(key)
            mine = held is None
            if held is None:
                held = self._held[key] = _Held(self._room())
            self._held.move_to_end(key)
            held.users += 1
        if not mine:
            held.ready.wait()
            if held.error is None:
                return held
            with self._lock:
                held.users -= 1
            raise held.error
        try:
            self._reader.read_chunk(file, index, held.buffer[:nbytes])
        except BaseException as error:
            held.error = error
            with self._lock:
                held.users -= 1
                self._held.pop(key, None)
            raise
        finally:
            held.ready.set()
        return held

    def _room(self) -> memoryview:
        """A buffer: of the chunk nobody uses that was used last longest ago, once there are enough."""
        if len(self._held) >= self._most:
            for key, held in self._held.items():
                if held.users == 0 and held.ready.is_set():
                    del self._held[key]
                    return held.buffer
        return memoryview(mmap.mmap(-1, CHUNK_BYTES))
