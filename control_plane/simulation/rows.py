"""Lines of a trace file, plain or gzip, each with its number; and the checks that every format shares.

Limits: text in UTF-8; a line is at most `LINE_BYTES` long.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from control_plane.simulation.trace import BadTrace

LINE_BYTES: Final = 4 << 20
TOKENS_MAX: Final = 100_000_000


def open_bytes(path: Path) -> IO[bytes] | gzip.GzipFile:
    try:
        raw = path.open("rb")
    except OSError as error:
        raise BadTrace(path, None, f"cannot be read: {error.strerror or error}") from error
    if raw.read(2) == b"\x1f\x8b":
        raw.close()
        return gzip.open(path, "rb")
    raw.seek(0)
    return raw


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of every line that is not empty. Raises `BadTrace`."""
    with open_bytes(path) as file:
        number = 0
        try:
            while raw := file.readline(LINE_BYTES + 1):
                number += 1
                if len(raw) > LINE_BYTES:
                    raise BadTrace(path, number, f"a line of more than {LINE_BYTES >> 20} MiB")
                text = raw.decode("utf-8").strip("\r\n")
                if text:
                    yield number, text
        except UnicodeDecodeError as error:
            raise BadTrace(path, number, f"not UTF-8: {error.reason} at byte {error.start}") from error
        except (OSError, EOFError, zlib.error) as error:
            raise BadTrace(path, number + 1, f"cannot be read any further: {error}") from error


def cells(path: Path, head: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Rows below the head, each with as many cells as that; no cell of these formats holds a comma."""
    width = len(head)
    rows = lines(path)
    next(rows)
    for number, text in rows:
        row = text.split(",")
        if len(row) != width:
            raise BadTrace(path, number, f"{len(row)} cells instead of {width}")
        yield number, row


def count(path: Path, line: int, name: str, text: str, most: int = TOKENS_MAX) -> int:
    """A whole number of at least 0."""
    try:
        value = int(text)
    except ValueError:
        raise BadTrace(path, line, f"{name} is {text!r} instead of a whole number") from None
    if not 0 <= value <= most:
        raise BadTrace(path, line, f"{name} is {value}, which is not between 0 and {most}")
    return value


def number(path: Path, line: int, name: str, text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise BadTrace(path, line, f"{name} is {text!r} instead of a number") from None
    if not math.isfinite(value) or value < 0:
        raise BadTrace(path, line, f"{name} is {text}: it must be finite and not below 0")
    return value


def in_order(path: Path, line: int, name: str, value: float, previous: float | None, *, strictly: bool = False) -> None:
    """Refuses a value that goes back behind the one before it (`strictly`: that repeats it)."""
    if previous is None:
        return
    if value < previous:
        raise BadTrace(path, line, f"{name} goes back from {previous:.10g} to {value:.10g}: sort the file by time")
    if strictly and value == previous:
        raise BadTrace(path, line, f"{name} {value:.10g} is there twice")
