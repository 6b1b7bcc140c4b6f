"""The head of a prepared form: what says how its body lies and vouches for it, small enough to be read first.

    preamble | table | list of the body's chunks, each with its digest in the preamble

A form is known before it is seen: its name is made of checkpoint identity, recipe and format, and its layout follows
from the manifest, so a head that says anything else is not taken. Limits: the head itself is believed where its place
is (this machine's disk, an authenticated agent, the object store); the bytes it vouches for are checked one by one.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from model_loader.chunks import ChunkList
from model_loader.errors import FormatError, IntegrityError, SourceUnavailable
from model_loader.prepared_layout import FORMAT_VERSION, PAGE_BYTES, Layout, Preamble
from model_loader.ranges.source import RangeSource

HEAD_WITHIN_S: Final = 10.0
_SIZE: Final = struct.Struct("<Q")
"""Before a head that is kept by itself: the bytes of the whole form."""


def form_name(identity: str, recipe: str) -> str:
    """64 hexadecimal digits: the same form has the same name on every slot."""
    digest = hashlib.sha256()
    for part in (identity, recipe, str(FORMAT_VERSION)):
        digest.update(len(part).to_bytes(4, "big") + part.encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class FormHead:
    preamble: Preamble
    table: bytes
    chunks: ChunkList

    @staticmethod
    def read(source: RangeSource, file: str) -> FormHead:
        """Of a whole form that `source` has as `file`."""
        size = source.size(file)
        page = _read(source, file, 0, PAGE_BYTES)
        where = Path(f"{source.name}/{file}")
        preamble = Preamble.read(where, page, size)
        table = _read(source, file, preamble.table_offset, preamble.table_bytes)
        return FormHead._checked(
            where, preamble, table, _read(source, file, preamble.chunks_offset, preamble.chunks_bytes)
        )

    @staticmethod
    def from_bytes(raw: bytes, where: Path) -> FormHead:
        if len(raw) < _SIZE.size + PAGE_BYTES:
            raise FormatError(f"{where} is no head of a form: {len(raw)} bytes")
        (file_bytes,) = _SIZE.unpack_from(raw)
        page, rest = raw[_SIZE.size : _SIZE.size + PAGE_BYTES], raw[_SIZE.size + PAGE_BYTES :]
        preamble = Preamble.read(where, page, file_bytes)
        if len(rest) != preamble.table_bytes + preamble.chunks_bytes:
            raise FormatError(f"{where} is no whole head of a form")
        return FormHead._checked(where, preamble, rest[: preamble.table_bytes], rest[preamble.table_bytes :])

    def to_bytes(self) -> bytes:
        page = self.preamble.pack().ljust(PAGE_BYTES, b"\0")
        return _SIZE.pack(self.preamble.file_bytes) + page + self.table + self.chunks.to_bytes()

    def check_is(self, layout: Layout, where: str) -> None:
        """Raises `FormatError` unless this is the head of the very form that `layout` plans."""
        mine = replace(self.preamble, chunks_sha256=layout.preamble.chunks_sha256, is_complete=False)
        if self.table != layout.table or mine != layout.preamble:
            raise FormatError(f"the form of {where} is another than the one that is wanted")

    @staticmethod
    def _checked(where: Path, preamble: Preamble, table: bytes, raw_chunks: bytes) -> FormHead:
        if not preamble.is_complete:
            raise FormatError(f"{where} is not complete")
        if hashlib.sha256(table).digest() != preamble.table_sha256:
            raise IntegrityError(f"{where}: its table does not match its digest")
        if hashlib.sha256(raw_chunks).digest() != preamble.chunks_sha256:
            raise IntegrityError(f"{where}: its list of chunks does not match its digest")
        chunks = ChunkList.from_bytes(raw_chunks)
        if chunks.nbytes != preamble.body_bytes:
            raise FormatError(
                f"{where}: its list of chunks is of {chunks.nbytes} bytes, its body has {preamble.body_bytes}"
            )
        return FormHead(preamble, table, chunks)


class BodyOf:
    """The body of a form that another source has whole, as a file of its own."""

    def __init__(self, source: RangeSource, file: str, body_offset: int, name: str) -> None:
        self.name, self.tier = source.name, source.tier
        self.range_bytes, self.threads = source.range_bytes, source.threads
        self._source, self._file, self._offset, self._body = source, file, body_offset, name

    def size(self, file: str) -> int:
        raise SourceUnavailable(f"the size of {file} is in its head")

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        if file != self._body:
            raise SourceUnavailable(f"{self.name} has the form {self._body} here, not {file}")
        return self._source.read_into(self._file, self._offset + offset, view, within_s=within_s)


def _read(source: RangeSource, file: str, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    view, got = memoryview(data), 0
    while got < nbytes:
        got += source.read_into(file, offset + got, view[got:], within_s=HEAD_WITHIN_S)
    return bytes(data)
