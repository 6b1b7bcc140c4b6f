"""Whether what an import needs is there, asked before its first byte moves: disk where files are kept, and memory.

Limits: what others take meanwhile is not foreseen; a disk that fills all the same is `OutOfSpace` where it happens, and
what has landed by then is used when the import is run again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from model_loader.errors import OutOfSpace
from model_loader.memory_limit import read_memory

SPARE_DISK_BYTES: Final = 256 * 1024 * 1024
"""Left free beside what is fetched: manifests, logs, the database of a data directory on the same disk."""


def require_disk(folder: Path, nbytes: int, what: str) -> None:
    """Raises `OutOfSpace` unless `nbytes` more fit into `folder`, which need not exist yet."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes + SPARE_DISK_BYTES:
        raise OutOfSpace(
            f"{what} needs {nbytes} bytes of disk in {folder} and {SPARE_DISK_BYTES} to spare, {free} are free: free "
            "some (`stoker models rm`), or give the data directory a larger disk"
        )


def require_memory(nbytes: int, what: str) -> None:
    available = read_memory().available_bytes
    if available < nbytes:
        raise OutOfSpace(
            f"{what} needs {nbytes} bytes of memory, {available} are available: free some, or raise the limit of the "
            "pod or machine"
        )


def occupied_bytes(path: Path) -> int:
    """What a file takes of its disk: one that is fetched in pieces has holes."""
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0
