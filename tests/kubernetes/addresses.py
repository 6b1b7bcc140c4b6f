"""Addresses of one cluster: out of 127.0.0.0/8, all of which the loopback answers to without being set up.

Model: a cluster takes one block 127.B.0.0/16 for itself by a lock on a file, so that clusters of parallel test
processes do not meet; pods get one address each, with every port on it free, and services get theirs.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import tempfile
from pathlib import Path
from typing import IO

_BLOCKS = range(16, 250)


class Addresses:
    """Leases a block until it is closed."""

    def __init__(self) -> None:
        self._file, self.block = _leased()
        self._pods = itertools.count(1)
        self._services = itertools.count(1)
        self._nodes = itertools.count(1)

    def close(self) -> None:
        self._file.close()

    def pod(self) -> str:
        """127.B.0.1 and on; none is used twice, so that a connection to a pod that is gone finds nobody."""
        number = next(self._pods)
        return f"127.{self.block}.{number // 250}.{number % 250 + 1}"

    def service(self) -> str:
        number = next(self._services)
        return f"127.{self.block}.{200 + number // 250}.{number % 250 + 1}"

    def node(self) -> str:
        return f"127.{self.block}.250.{next(self._nodes)}"


def _leased() -> tuple[IO[str], int]:
    folder = Path(tempfile.gettempdir()) / f"stoker-test-clusters-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for block in _BLOCKS:
        file = open(folder / str(block), "w")  # noqa: SIM115 (it holds the lock)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            continue
        return file, block
    raise RuntimeError(f"{len(_BLOCKS)} test clusters run already on this machine")
