"""A whole chunk opened at once, every check made: what a read does of it piece by piece."""

from __future__ import annotations

import hashlib

from function_runtime.errors import KvError
from function_runtime.kv.chunk import ChunkHead, check_layer, open_header


def open_chunk(raw: memoryview, digest: str, expected: ChunkHead) -> memoryview:
    """The layers of a chunk that is, byte for byte, what its digest says and of what the reader expects."""
    if hashlib.sha256(raw).hexdigest() != digest:
        raise KvError("its bytes do not have the digest that was recorded")
    places = open_header(raw, len(raw), expected).places
    for index in range(len(places)):
        check_layer(raw, places, index)
    return raw[places[0].offset :]
