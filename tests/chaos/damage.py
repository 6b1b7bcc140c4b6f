"""What can become of an object: gone, short, altered, its end zeroed, or another one under its name.

`damage(objects, name, how, draw, other)` does one of them to an object of a store. Limits: what S3 would serve wrongly
although it is there is the store's faulty proxy's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.stored import Objects

DAMAGES = ("deleted", "truncated", "flipped", "zero-tailed", "swapped")


@dataclass(frozen=True, slots=True)
class Spoiled:
    """What was there and what is there now; None: nothing."""

    before: bytes
    after: bytes | None

    def spoils(self, offset: int, nbytes: int) -> bool:
        """Whether a reader of this range gets something else than before: a cut far behind it does not matter."""
        wanted = slice(offset, offset + nbytes)
        return self.after is None or self.after[wanted] != self.before[wanted]


def damage(objects: Objects, name: str, how: str, draw: int, other: bytes = b"") -> Spoiled | None:
    """None: there was nothing to damage (any more). `draw` picks the place; `other` is what a swap puts there."""
    content = objects.get(name)
    if content is None:
        return None
    if how == "deleted":
        objects.delete(name)
        return Spoiled(content, None)
    changed = _changed(content, how, draw, other)
    if changed == content:
        return None
    objects.put(name, changed)
    return Spoiled(content, changed)


def _changed(content: bytes, how: str, draw: int, other: bytes) -> bytes:
    size = len(content)
    if how == "truncated":
        return content[: draw % size]
    if how == "flipped":
        at = draw % size
        return content[:at] + bytes([content[at] ^ (1 << (draw // size) % 8)]) + content[at + 1 :]
    if how == "zero-tailed":
        zeros = 1 + draw % size
        return content[: size - zeros] + bytes(zeros)
    if how == "swapped":
        return other
    raise ValueError(f"no damage {how!r}; there are {', '.join(DAMAGES)}")
