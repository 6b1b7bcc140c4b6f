"""A prepared form: one file of engine-ready tensors that any number of processes map read-only without a copy.

Layout: a page of preamble (magic, version, place and digest of the table, file size, commit mark), tensors (64-byte
aligned, large ones page-aligned), then the table as JSON (identity, recipe, dtype, tensors with CRC32C). The preamble
is written last and the file appears by rename, so that a file under its final name is complete. Limits: little-endian;
bfloat16 and float16 come out as raw uint16, with their name in `dtype`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import google_crc32c

from model_loader.errors import FormatError, IntegrityError, SourceMissing, from_os_error
from model_loader.llama_layout import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC: Final = b"STOKRPF1"
FORMAT_VERSION: Final = 1
_COMMITTED: Final = b"complete"
_PREAMBLE: Final = struct.Struct("<8sIIQQQ32s8s")
"""magic, version, reserved, table offset, table bytes, file bytes, SHA-256 of the table, commit mark"""
_PAGE_BYTES: Final = 4096
_LARGE_BYTES: Final = 64 * 1024
_MADV_POPULATE_READ: Final = 22
_MAX_TABLE_BYTES: Final = 64 * 1024 * 1024
_VERIFY_BYTES: Final = 4 * 1024 * 1024
"""Digested at a time: the checksum holds the interpreter's lock, others get it in between."""


@dataclass(frozen=True, slots=True)
class PreparedTensor:
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to come, before its bytes are known."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


def crc32c(data: bytes | NDArray[Any], seed: int = 0) -> int:
    """CRC32C of bytes or a contiguous array, carried on from `seed`."""
    return int(google_crc32c.extend(seed, data))


class PreparedWriter:
    """Writes a prepared form at known places, from several threads or processes; nothing is visible before `commit`.

    `place(name)` gives the file offset of a tensor; bytes go to `fileno` with pwrite. Leaving the context without
    `commit` removes the temporary file.
    """

    def __init__(self, path: Path, identity: str, recipe: str, dtype: str, plans: Sequence[TensorPlan]) -> None:
        self.path = path
        self._table: dict[str, Any] = {"identity": identity, "recipe": recipe, "dtype": dtype}
        self._plans = {plan.name: plan for plan in plans}
        if len(self._plans) != len(plans):
            raise FormatError("two tensors of a prepared form have the same name")
        self._places: dict[str, int] = {}
        offset = _PAGE_BYTES
        for plan in plans:
            alignment = _PAGE_BYTES if plan.nbytes >= _LARGE_BYTES else 64
            offset = -(-offset // alignment) * alignment
            self._places[plan.name] = offset
            offset += plan.nbytes
        self._table_offset = -(-offset // 64) * 64
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self._handle: int | None = None

    @property
    def data_bytes(self) -> int:
        return self._table_offset

    def __enter__(self) -> Self:
        try:
            self._handle = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise from_os_error(error, str(self.path)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            self.temporary.unlink(missing_ok=True)

    @property
    def fileno(self) -> int:
        if self._handle is None:
            raise FormatError(f"the writer of {self.path} is closed")
        return self._handle

    def place(self, name: str) -> int:
        return self._places[name]

    def write(self, offset: int, data: Any) -> None:
        write_fully(self.fileno, offset, data, str(self.path))

    def commit(self, checksums: Mapping[str, int], *, durable: bool) -> None:
        """Writes table and preamble and makes the file appear. `durable` adds the fsyncs (not needed on tmpfs)."""
        missing = self._plans.keys() - checksums.keys()
        if missing:
            raise FormatError(f"a prepared form lacks tensors: {', '.join(sorted(missing)[:5])}")
        self._table["tensors"] = {
            name: {
                "dtype": plan.dtype,
                "shape": plan.shape,
                "offset": self._places[name],
                "nbytes": plan.nbytes,
                "crc32c": checksums[name],
            }
            for name, plan in self._plans.items()
        }
        table = json.dumps(self._table, separators=(",", ":")).encode()
        self.write(self._table_offset, table)
        try:
            if durable:
                os.fsync(self.fileno)
            preamble = _PREAMBLE.pack(
                MAGIC,
                FORMAT_VERSION,
                0,
                self._table_offset,
                len(table),
                self._table_offset + len(table),
                hashlib.sha256(table).digest(),
                _COMMITTED,
            )
            self.write(0, preamble)
            if durable:
                os.fsync(self.fileno)
            os.replace(self.temporary, self.path)
            if durable:
                folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError as error:
            raise from_os_error(error, str(self.path)) from error


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
        checksums: dict[str, int] = {}
        for (name, _kind, array), plan in zip(triples, plans, strict=True):
            if array.nbytes != plan.nbytes:
                raise FormatError(f"{name}: {array.nbytes} bytes given where {plan.dtype} needs {plan.nbytes}")
            flat = array.reshape(-1).view("u1")
            writer.write(writer.place(name), flat)
            checksums[name] = crc32c(flat)
        writer.commit(checksums, durable=durable)


class PreparedFile:
    """A prepared form, mapped read-only. Arrays are views over the one mapping and keep it alive."""

    def __init__(
        self, path: Path, mapping: mmap.mmap, table: Mapping[str, Any], tensors: dict[str, PreparedTensor]
    ) -> None:
        self.path = path
        self.identity: str = table["identity"]
        self.recipe: str = table["recipe"]
        self.dtype: str = table["dtype"]
        self.nbytes = len(mapping)
        self._mapping = mapping
        self._tensors = tensors

    @classmethod
    def open(cls, path: Path, verify: bool) -> PreparedFile:
        """Maps the file. The preamble, the table and all bounds are always checked; `verify` also checks the CRC32C
        of every tensor."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceMissing(f"no prepared checkpoint at {path}: {error.strerror}") from error
        try:
            size = os.fstat(handle).st_size
            if size < _PAGE_BYTES:
                raise FormatError(f"{path} is no prepared checkpoint: {size} bytes, at least {_PAGE_BYTES} needed")
            mapping = mmap.mmap(handle, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
        table = _read_table(path, mapping, size)
        tensors = _read_tensors(path, table, size)
        prepared = cls(path, mapping, table, tensors)
        if verify:
            prepared.verify()
        return prepared

    def keys(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def info(self, name: str) -> PreparedTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise FormatError(f"{self.path} has no tensor {name}; it is of recipe {self.recipe}") from None

    def raw(self, name: str) -> memoryview:
        entry = self.info(name)
        return memoryview(self._mapping)[entry.offset : entry.offset + entry.nbytes]

    def tensor(self, name: str) -> NDArray[Any]:
        """A read-only view: float32, or uint16 for bfloat16 and float16."""
        import numpy as np

        entry = self.info(name)
        kind: type[np.float32] | type[np.uint16] = np.float32 if entry.dtype == "float32" else np.uint16
        count = entry.nbytes // ITEM_BYTES[entry.dtype]
        flat = np.frombuffer(self._mapping, dtype=kind, count=count, offset=entry.offset)
        return flat.reshape(entry.shape)

    def populate(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Enters pages of the file into this process's page tables now, which costs less than a fault at the first use
        of each. Does not hold the interpreter's lock. `offset` is a multiple of the page size. Best effort."""
        import ctypes

        import numpy as np

        end = self.nbytes if nbytes is None else min(self.nbytes, offset + nbytes)
        if offset < end:
            address = np.frombuffer(self._mapping, np.uint8).ctypes.data
            # NOTE: mmap.madvise would hold the lock all the while.
            begin, count = ctypes.c_void_p(address + offset), ctypes.c_size_t(end - offset)
            ctypes.CDLL(None).madvise(begin, count, _MADV_POPULATE_READ)

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Checks every tensor's CRC32C; raises `IntegrityError` naming the first bad one."""
        import numpy as np

        for name, entry in self._tensors.items():
            found = 0
            for start in range(0, entry.nbytes, _VERIFY_BYTES):
                count = min(_VERIFY_BYTES, entry.nbytes - start)
                found = crc32c(np.frombuffer(self._mapping, np.uint8, count, entry.offset + start), found)
            if found != entry.crc32c:
                raise IntegrityError(
                    f"{self.path}: tensor {name} has CRC32C {found:08x}, {entry.crc32c:08x} was written; "
                    "remove the file, it is prepared again"
                )
            if on_bytes is not None:
                on_bytes(entry.nbytes)


def _read_table(path: Path, mapping: mmap.mmap, size: int) -> dict[str, Any]:
    magic, version, _, offset, nbytes, file_bytes, digest, mark = _PREAMBLE.unpack_from(mapping, 0)
    if magic != MAGIC:
        raise FormatError(f"{path} is no prepared checkpoint (it begins with {bytes(magic)!r})")
    if version != FORMAT_VERSION:
        raise FormatError(f"{path} has container version {version}, known is {FORMAT_VERSION}")
    if mark != _COMMITTED:
        raise FormatError(f"{path} was never completed; remove it")
    if file_bytes != size:
        raise FormatError(f"{path} is truncated: {file_bytes} bytes needed, {size} found")
    if nbytes > _MAX_TABLE_BYTES or offset + nbytes > size:
        raise FormatError(f"{path}: its table ({nbytes} bytes at {offset}) lies outside the file's {size} bytes")
    raw = mapping[offset : offset + nbytes]
    if hashlib.sha256(raw).digest() != digest:
        raise IntegrityError(f"{path}: its table does not match its digest; remove the file")
    try:
        table = json.loads(raw)
    except ValueError as error:
        raise FormatError(f"{path}: its table is no JSON; remove the file") from error
    if not isinstance(table, dict):
        raise FormatError(f"{path}: its table is no object")
    return table


def _read_tensors(path: Path, table: Mapping[str, Any], size: int) -> dict[str, PreparedTensor]:
    tensors: dict[str, PreparedTensor] = {}
    try:
        for name, entry in table["tensors"].items():
            tensor = PreparedTensor(
                entry["dtype"], tuple(entry["shape"]), entry["offset"], entry["nbytes"], entry["crc32c"]
            )
            if TensorPlan(name, tensor.dtype, tensor.shape).nbytes != tensor.nbytes or tensor.offset % 64:
                raise FormatError(f"{path}: tensor {name} contradicts itself")
            if tensor.offset < 0 or tensor.offset + tensor.nbytes > size:
                raise FormatError(f"{path}: tensor {name} lies outside the file's {size} bytes")
            tensors[name] = tensor
    except (KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: its table is not of this version ({error})") from error
    return tensors
