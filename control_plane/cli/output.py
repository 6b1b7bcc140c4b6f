"""How commands show things: JSON for programs, aligned columns for people, a bar while something takes its time.

Plain text needs no library, so that a command starts fast; rich is imported for bars only, which go to standard error
and only to a terminal.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

Advance: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0: unknown)."""


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """Something for the person at the terminal that is not the command's answer."""
    print(text, file=sys.stderr)


def columns(head: Sequence[str], rows: Sequence[Sequence[object]], *, right: frozenset[int] = frozenset()) -> str:
    """Aligned columns; those in `right` to the right, the last one unpadded."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[place]) for row in cells) for place in range(len(head))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str, right: frozenset[int] = frozenset()
) -> None:
    print(columns(head, rows, right=right) if rows else empty)


@contextlib.contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere one line per stage, so that logs stay short."""
    if quiet:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                note(f"{title}: {stage}")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    parts = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[share]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*parts, console=Console(stderr=True), transient=True) as bar:
        task, current, begun_s, begun_at = bar.add_task(title, total=None, share=""), "", time.monotonic(), 0

        def advance(stage: str, done: int, total: int) -> None:
            nonlocal current, begun_s, begun_at
            if stage != current:
                # Each stage has a bar and a speed of its own; what had landed before it began is not its doing.
                current, begun_s, begun_at = stage, time.monotonic(), done
                bar.reset(task, total=None, description=f"{title}: {stage}")
            share = moved(done, total, done - begun_at, time.monotonic() - begun_s)
            bar.update(task, completed=done, total=total or None, share=share)

        yield advance


def moved(done: int, total: int, new: int, passed_s: float) -> str:
    """`37 MiB of 98 MiB (38%), 12 MiB/s`; the speed is of what is new."""
    if not total:
        return size(done) if done else ""
    speed = f", {size(int(new / passed_s))}/s" if new and passed_s >= 0.5 else ""
    return f"{size(done)} of {size(total)} ({100 * done // total}%){speed}"


# --- numbers for people ---------------------------------------------------------------------------------------------


def seconds(duration_us: int | None) -> str:
    """1234 -> `1.2 ms`, 1234567 -> `1.23 s`."""
    if duration_us is None:
        return "-"
    if duration_us < 1000:
        return f"{duration_us} µs"
    if duration_us < 100_000:
        return f"{duration_us / 1000:.1f} ms"
    if duration_us < 600_000_000:
        return f"{duration_us / 1e6:.2f} s"
    return f"{duration_us / 60e6:.1f} min"


def size(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def age(at_us: int | None) -> str:
    """How long ago, in the largest unit that says enough."""
    if not at_us:
        return "-"
    passed_s = max(0, time.time_ns() // 1000 - at_us) // 1_000_000
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if passed_s >= length_s:
            return f"{passed_s // length_s}{unit}"
    return f"{passed_s}s"


def money(microusd: int) -> str:
    """Integer micro-dollars, exactly: 1234567 -> `$1.234567`."""
    sign, amount = ("-", -microusd) if microusd < 0 else ("", microusd)
    return f"{sign}${amount // 1_000_000}.{amount % 1_000_000:06d}"
