"""Sealing of chunks at rest: AES-256 in counter mode, keyed by the tenant, placed by pack name and byte offset.

    stored = chunk bytes XOR keystream(key, pack name, offset in the pack)          (pack headers stay in the clear)

A pack's name stands for its whole content, so a name never meets two contents under one key, and a range can be read
alone. That the bytes are the right ones is what the chunk's digest and checksums say, as for KV in the clear: a wrong
key is a miss. Limits: whoever may change the store can make KV unusable, not readable.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

KEY_BYTES: Final = 32
_BLOCK: Final = 16
_COUNTER_BYTES: Final = 8
"""The low half of the counter block counts blocks within the pack."""


class ChunkSeal:
    """Seals and opens ranges of packs with one key; an empty key leaves them as they are."""

    def __init__(self, key: bytes) -> None:
        if len(key) not in (0, KEY_BYTES):
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key

    def __bool__(self) -> bool:
        return bool(self._key)

    def apply(self, pack: str, offset: int, data: bytes | bytearray | memoryview) -> bytes:
        """The sealed form of clear bytes at `offset` of a pack, and the clear form of sealed ones."""
        if not self._key:
            return bytes(data)
        # Imported by those who seal: it costs a replica without a key nothing.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        nonce = hmac.new(self._key, b"pack\0" + pack.encode(), hashlib.sha256).digest()[: _BLOCK - _COUNTER_BYTES]
        block, skip = divmod(offset, _BLOCK)
        start = nonce + block.to_bytes(_COUNTER_BYTES, "big")
        stream = Cipher(algorithms.AES(self._key), modes.CTR(start)).encryptor()
        stream.update(bytes(skip))
        return stream.update(bytes(data) if isinstance(data, memoryview) and not data.contiguous else data)

    def open_in_place(self, pack: str, offset: int, view: memoryview) -> None:
        if self._key:
            view[:] = self.apply(pack, offset, view)

    def apply_parts(self, pack: str, offset: int, parts: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """Parts that lie one after another from `offset` on; without a key they are not even copied."""
        if not self._key:
            return parts
        sealed: list[bytes] = []
        for part in parts:
            sealed.append(self.apply(pack, offset, part))
            offset += len(part)
        return sealed


CLEAR: Final = ChunkSeal(b"")
