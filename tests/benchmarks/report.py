"""What every benchmark shares: medians, tables, the machine's description and one JSON file a benchmark."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(os.environ.get("STOKER_BENCH_RESULTS", "bench-results"))
console = Console(width=140)


def machine() -> dict[str, Any]:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    printed = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        printed.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        printed.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row])
    console.print(printed)


def save(name: str, results: dict[str, Any]) -> Path:
    """Writes bench-results/NAME.json: the results, the machine and when."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    whole = {
        "benchmark": name,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        **results,
    }
    path.write_text(json.dumps(whole, indent=2, default=str) + "\n")
    console.print(f"written: {path}")
    return path


VERDICTS: list[tuple[str, str, str]] = []
"""(figure, holds or MISSED, detail) of this process's run, in the order they were found."""


def verdict(name: str, holds: bool, detail: str) -> bool:
    VERDICTS.append((name, "holds" if holds else "MISSED", detail))
    console.print(f"[{'green' if holds else 'red'}]{'holds' if holds else 'MISSED'}[/] {name}: {detail}")
    return holds


def verdicts() -> None:
    """All of them once more, together."""
    table("Figures", ["figure", "", "found"], VERDICTS)
