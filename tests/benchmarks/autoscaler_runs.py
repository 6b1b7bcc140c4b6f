"""Simulations of `make bench-autoscaler` as they end, a line of JSON each: whoever ends the bench early loses nothing.

    bench-results/autoscaler-runs.jsonl: {"code": ..., "key": [...], "found": {...}}

With `STOKER_BENCH_GO_ON=1` a bench takes from there what the same code has simulated on the same traffic (every one is
of one seed, and comes out the same), and simulates the rest; else it begins the file anew. Limits: the code is the
autoscaler's, the traces' readers' and the bench's; a change of numpy's draws is not noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from tests.benchmarks import report

ROOT = Path(__file__).resolve().parents[2]
GO_ON = os.environ.get("STOKER_BENCH_GO_ON", "") == "1"


def path() -> Path:
    return report.RESULTS / "autoscaler-runs.jsonl"


@cache
def code() -> str:
    """What the results of a simulation follow from."""
    digest = hashlib.sha256()
    folders = (ROOT / "autoscaler", ROOT / "control_plane" / "simulation")
    files = [found for folder in folders for found in folder.rglob("*.py")]
    for each in sorted([*files, *(ROOT / "tests" / "benchmarks").glob("autoscaler*.py")]):
        digest.update(str(each.relative_to(ROOT)).encode() + b"\0" + each.read_bytes())
    return digest.hexdigest()[:16]


def begin() -> None:
    if not GO_ON:
        path().unlink(missing_ok=True)


def keep(key: tuple[Any, ...], found: dict[str, Any]) -> None:
    """By whichever process has it: a line is written whole or, where the machine dies, not believed."""
    path().parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"code": code(), "key": key, "found": found}) + "\n"
    with path().open("a") as file:
        file.write(line)


def kept() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Of this very code."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    if not GO_ON or not path().exists():
        return found
    for line in path().read_text().splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue  # cut by whatever ended the bench
        if told["code"] == code():
            found[tuple(told["key"])] = {name: _by_weight(value) for name, value in told["found"].items()}
    return found


def _by_weight(value: Any) -> Any:
    return {float(weight): each for weight, each in value.items()} if isinstance(value, dict) else value
