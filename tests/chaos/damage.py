"""What can become of an object: gone, short, altered, its end zeroed, or another one under its name.

`damage(path, how, draw, other)` does one of them to a file of the directory store, atomically for readers that have it
open (a new file takes its place). Limits: what S3 would serve wrongly is the store's faulty proxy's business.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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


def damage(path: Path, how: str, draw: int, other: bytes = b"") -> Spoiled | None:
    """None: there was nothing to damage (any more). `draw` picks the place; `other` is what a swap puts there."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if how == "deleted":
        path.unlink(missing_ok=True)
        return Spoiled(content, None)
    changed = _changed(content, how, draw, other)
    if changed == content:
        return None
    beside = path.with_name(path.name + ".damaged")
    beside.write_bytes(changed)
    os.replace(beside, path)
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
