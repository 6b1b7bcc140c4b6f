"""What a process prints where its output is a file: lost while the disk is full, and never an error.

A replica says in its log that write-behind has stopped because the disk is full, and the log lies on that disk: what
is said must not take down who says it. Limits: nobody is told of lines that were lost.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

_STREAMS: Final = (("stdout", 1), ("stderr", 2))


class _Forgiving(io.FileIO):
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def forgive() -> None:
    """From here on `print` fails for no reason of the file's."""
    for name, descriptor in _STREAMS:
        with contextlib.suppress(OSError, ValueError):
            getattr(sys, name).flush()
        raw = io.BufferedWriter(_Forgiving(descriptor, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", line_buffering=True))
