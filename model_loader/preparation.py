"""Runs the recipe in a process of its own and follows its progress. What the warm pool calls in production.

The child ends by itself when nobody reads its progress any more, so that an agent's death leaves no work behind;
cancelling the call kills it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import model_loader
from model_loader.errors import LoaderError, PreparationLost, error_from_code
from model_loader.progress import Progress

_MAX_LINE_BYTES: Final = 1024 * 1024
_SOURCE_ROOT: Final = str(Path(model_loader.__file__).resolve().parent.parent)


async def run_recipe(manifest_path: Path, dtype: str, out_path: Path, on_progress: Callable[[Progress], None]) -> None:
    """Writes the prepared form to `out_path` or raises what the recipe reported."""
    paths = [_SOURCE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "model_loader.recipe", str(manifest_path), "--dtype", dtype, "--out", str(out_path),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    try:
        outcome, said = await asyncio.gather(_follow(process, on_progress), _read_errors(process))
        status = await process.wait()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if isinstance(outcome, LoaderError):
        raise outcome
    if outcome is None or status != 0:
        ending = f"signal {-status}" if status < 0 else f"status {status}"
        raise PreparationLost(f"preparing {manifest_path} ended with {ending}: {said or 'it said nothing'}")


async def _follow(
    process: asyncio.subprocess.Process, on_progress: Callable[[Progress], None]
) -> dict[str, Any] | LoaderError | None:
    """The last event: what `done` says, the error it reports, or nothing."""
    if process.stdout is None:
        return None
    outcome: dict[str, Any] | LoaderError | None = None
    async for line in process.stdout:
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == "progress":
                on_progress(Progress(event["stage"], event["done_bytes"], event["total_bytes"]))
            elif kind == "error":
                outcome = error_from_code(event["code"], event["message"])
            elif kind == "done":
                outcome = event
        except (ValueError, KeyError, TypeError):
            continue
    return outcome


async def _read_errors(process: asyncio.subprocess.Process) -> str:
    if process.stderr is None:
        return ""
    return (await process.stderr.read()).decode("utf-8", "replace").strip()[-2000:]
