"""The only source of chance: a number in [0, 1) that is a function of (seed, position, choice) and nothing else."""

from __future__ import annotations

import hashlib
import struct

_FIELDS = struct.Struct(">QQQ")


def uniform(seed: int, position: int, choice: int) -> float:
    digest = hashlib.sha256(b"stoker-sample-1\0" + _FIELDS.pack(seed, position, choice)).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53
