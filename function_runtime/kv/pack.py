"""A pack: one object that holds chunks of one tenant scope, named by what it holds.

    magic | version | count | salt | per chunk: digest, chain, offset, bytes | CRC32C | zeros to 64 | chunks, aligned

The name is the SHA-256 of the header, which holds every chunk's digest: a pack has one possible content, and its header
rebuilds its part of an index. The salt makes each pack its writer's own: of two replicas that compute the same tokens
neither deletes what the other counts on. Limits: at most `MAX_CHUNKS`; version 1 had no salt, and is still read.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from function_runtime.errors import KvError
from function_runtime.kv.checksum import crc32c
from function_runtime.kv.chunk import EncodedChunk
from model_loader.objects import ObjectStore

MAGIC: Final = b"STKKVPK1"
VERSION: Final = 2
SALT_BYTES: Final = 16
MAX_CHUNKS: Final = 4096
PREFIX: Final = "kv/packs/"
_PREAMBLE: Final = struct.Struct("<8sII")
_ENTRY: Final = struct.Struct("<32s32sQQ")
_CRC: Final = struct.Struct("<I")
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class PackEntry:
    digest: str
    chain: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Pack:
    key: str
    entries: tuple[PackEntry, ...]
    parts: tuple[bytes | memoryview, ...]
    """What to write, in order."""


def pack_name(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()


def pack_key(name: str, place: str = "") -> str:
    """`place`: the folder of whoever owns it."""
    return f"{PREFIX}{f'{place}/' if place else ''}{name[:2]}/{name}"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def build_pack(chunks: Sequence[tuple[bytes, EncodedChunk]], place: str = "") -> Pack:
    """From (chain, chunk) pairs, salted as no other."""
    if not 0 < len(chunks) <= MAX_CHUNKS:
        raise KvError(f"a pack of {len(chunks)} chunks")
    at = _header_nbytes(VERSION, len(chunks))
    header_bytes = at
    entries: list[PackEntry] = []
    parts: list[bytes | memoryview] = []
    for chain, chunk in chunks:
        entries.append(PackEntry(chunk.digest, chain, at, chunk.nbytes))
        parts += (chunk.head, chunk.data, bytes(_aligned(chunk.nbytes) - chunk.nbytes))
        at += _aligned(chunk.nbytes)
    header = _PREAMBLE.pack(MAGIC, VERSION, len(entries)) + secrets.token_bytes(SALT_BYTES)
    header += b"".join(_ENTRY.pack(bytes.fromhex(e.digest), e.chain, e.offset, e.nbytes) for e in entries)
    header += _CRC.pack(crc32c(header))
    header = header.ljust(header_bytes, b"\0")
    return Pack(pack_key(pack_name(header), place), tuple(entries), (header, *parts))


def _header_nbytes(version: int, count: int) -> int:
    return _aligned(_entries_at(version) + count * _ENTRY.size + _CRC.size)


def _entries_at(version: int) -> int:
    return _PREAMBLE.size + (SALT_BYTES if version >= 2 else 0)


def read_entries(store: ObjectStore, key: str) -> tuple[PackEntry, ...]:
    """What a stored pack holds, by its own header, which must have the pack's name."""
    magic, version, count = _PREAMBLE.unpack(store.get(key, 0, _PREAMBLE.size))
    if magic != MAGIC or not 1 <= version <= VERSION or not 0 < count <= MAX_CHUNKS:
        raise KvError(f"{key} is no pack of a version from 1 to {VERSION}")
    header = store.get(key, 0, _header_nbytes(version, count))
    if pack_name(header) != key.rpartition("/")[2]:
        raise KvError(f"the header of {key} does not have its name")
    begin = _entries_at(version)
    table = header[begin : begin + count * _ENTRY.size]
    return tuple(
        PackEntry(digest.hex(), chain, offset, nbytes) for digest, chain, offset, nbytes in _ENTRY.iter_unpack(table)
    )
