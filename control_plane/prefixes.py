"""Which prompts a replica has had lately, so that one with the same beginning is sent where its KV probably lies.

A prompt is remembered as the chain of hashes of its first tokens, `STRIDE` by `STRIDE`, the last used `KEPT` of a
replica: an estimate, as what the replica's own cache really holds is only known there. Limits: this gateway's requests
only; the first `STRIDES` strides of each; nothing leaves this process, so Python's own hash does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

STRIDE: Final = 64
STRIDES: Final = 64
KEPT: Final = 2048
"""Strides of a replica: 128 k tokens of distinct prefixes."""


def chain_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """Of the whole strides of a prompt."""
    chain: list[int] = []
    link = 0
    for begin in range(0, min(len(prompt) - STRIDE + 1, STRIDE * STRIDES), STRIDE):
        link = hash((link, tuple(prompt[begin : begin + STRIDE])))
        chain.append(link)
    return tuple(chain)


class Prefixes:
    """Of one replica."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()

    def note(self, chain: Sequence[int]) -> None:
        """A request with this prompt went there. Shallow strides are the last to be forgotten."""
        for link in reversed(chain):
            self._known[link] = None
            self._known.move_to_end(link)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)

    def held_tokens(self, chain: Sequence[int]) -> int:
        """Of this prompt, as far as it is known without a gap."""
        for count, link in enumerate(chain):
            if link not in self._known:
                return count * STRIDE
        return len(chain) * STRIDE
