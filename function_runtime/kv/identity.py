"""Whose KV it is and of what: everything that has to agree before stored KV may be used, and the chain of tokens.

    identity = SHA-256(checkpoint, adapter, dtype, scales, block size, layers, heads, head size, rope, engine format)
    scope    = an HMAC per tenant, opaque here
    chain    = SHA-256 chained over blocks of token ids, begun with identity and scope

The chain at a position depends on the tokens before it only, not on how they were cut into chunks. Limits: a position
inside a block has a chain of its own kind, which no block boundary can have.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from function_runtime.engine_like import KvLayout
from function_runtime.kv.fields import encode_fields


@dataclass(frozen=True)
class KvIdentity:
    checkpoint: str
    """SHA-256 over the checkpoint's manifest; covers tokenizer and template."""
    layout: KvLayout
    rope: str
    """Canonical text of the rotary parameters."""
    engine_format: str
    """Names the engine and the version of how it fills KV."""
    adapter: str = ""
    scales: str = ""
    """Of quantised KV; empty for raw dtypes."""

    def fields(self) -> list[tuple[str, bytes]]:
        layout = self.layout
        return [
            ("checkpoint", self.checkpoint.encode()),
            ("adapter", self.adapter.encode()),
            ("dtype", layout.dtype.encode()),
            ("scales", self.scales.encode()),
            ("block_size", _number(layout.block_size)),
            ("layers", _number(layout.num_layers)),
            ("kv_heads", _number(layout.kv_heads)),
            ("head_dim", _number(layout.head_dim)),
            ("rope", self.rope.encode()),
            ("engine_format", self.engine_format.encode()),
        ]

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(encode_fields([("kind", b"stoker-kv-identity-1"), *self.fields()])).digest()


@dataclass
class Chain:
    """The chain over one sequence of tokens, which may grow. Computes each block once."""

    identity: KvIdentity
    scope: str
    _blocks: list[bytes] = field(default_factory=list)

    def at(self, tokens: Sequence[int], position: int) -> bytes:
        """The chain over tokens[:position]; the tokens before a position asked for earlier must be the same."""
        size = self.identity.layout.block_size
        if not self._blocks:
            begin = [("kind", b"stoker-kv-chain-1"), ("identity", self.identity.digest), ("scope", self.scope.encode())]
            self._blocks.append(hashlib.sha256(encode_fields(begin)).digest())
        while len(self._blocks) - 1 < position // size:
            index = len(self._blocks) - 1
            self._blocks.append(link("block", self._blocks[-1], tokens[index * size : (index + 1) * size]))
        last = self._blocks[position // size]
        rest = tokens[position // size * size : position]
        return link("part", last, rest) if rest else last


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def link(kind: str, parent: bytes, tokens: Sequence[int]) -> bytes:
    fields = [("kind", kind.encode()), ("parent", parent), ("tokens", pack_tokens(tokens))]
    return hashlib.sha256(encode_fields(fields)).digest()


def _number(value: int) -> bytes:
    return struct.pack("<Q", value)
