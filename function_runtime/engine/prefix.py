"""Names of prefixes: a chain of SHA-256 over tagged, length-prefixed fields, the same in every process.

The root covers the tenant's KV scope and the block size; each link covers its parent and a block's token ids. Limits:
the checkpoint is not named here, as one engine computes one checkpoint.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def _link(*fields: tuple[bytes, bytes]) -> bytes:
    digest = hashlib.sha256(b"stoker-prefix-1\0")
    for tag, value in fields:
        digest.update(len(tag).to_bytes(4, "big") + tag + len(value).to_bytes(8, "big") + value)
    return digest.digest()


def chain_root(kv_scope: str, block_size: int) -> bytes:
    return _link((b"scope", kv_scope.encode()), (b"block", block_size.to_bytes(4, "big")))


def chain_next(parent: bytes, tokens: Sequence[int]) -> bytes:
    return _link((b"parent", parent), (b"tokens", array("q", tokens).tobytes()))


class Chain:
    """The hashes of a growing sequence's complete blocks, computed once each."""

    __slots__ = ("_block_size", "_root", "hashes")

    def __init__(self, kv_scope: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = chain_root(kv_scope, block_size)
        self.hashes: list[bytes] = []

    def fork(self) -> Chain:
        twin = object.__new__(Chain)
        twin._block_size, twin._root, twin.hashes = self._block_size, self._root, list(self.hashes)
        return twin

    def extend(self, tokens: Sequence[int], blocks: int) -> None:
        """Covers the first `blocks` complete blocks of `tokens`."""
        size = self._block_size
        for index in range(len(self.hashes), blocks):
            parent = self.hashes[-1] if self.hashes else self._root
            self.hashes.append(chain_next(parent, tokens[index * size : (index + 1) * size]))
