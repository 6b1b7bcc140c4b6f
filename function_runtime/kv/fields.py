"""Tagged, length-prefixed fields: the one encoding that is hashed and stored, the same in every process.

    field = tag length (u16) | tag | value length (u32) | value        (integers little-endian)

Limits: at most `MAX_FIELD_BYTES` per value when read; order matters and is part of what is encoded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from function_runtime.errors import KvError

_TAG: Final = struct.Struct("<H")
_VALUE: Final = struct.Struct("<I")
MAX_FIELD_BYTES: Final = 64 * 1024 * 1024


def encode_fields(fields: Iterable[tuple[str, bytes]]) -> bytes:
    parts: list[bytes] = []
    for tag, value in fields:
        name = tag.encode()
        parts += (_TAG.pack(len(name)), name, _VALUE.pack(len(value)), value)
    return b"".join(parts)


def decode_fields(data: memoryview) -> list[tuple[str, bytes]]:
    fields: list[tuple[str, bytes]] = []
    at = 0

    def take(count: int) -> memoryview:
        nonlocal at
        if count > MAX_FIELD_BYTES or at + count > len(data):
            raise KvError(f"a field at byte {at} reaches beyond the header")
        at += count
        return data[at - count : at]

    while at < len(data):
        (name_bytes,) = _TAG.unpack(take(_TAG.size))
        try:
            tag = bytes(take(name_bytes)).decode("ascii")
        except UnicodeDecodeError as error:
            raise KvError("a tag that is no ASCII") from error
        (value_bytes,) = _VALUE.unpack(take(_VALUE.size))
        fields.append((tag, bytes(take(value_bytes))))
    return fields
