"""Work on checkpoints that takes long, in processes of `model_loader`, line by line: importing and verifying.

Limits: `AT_ONCE` of each kind at a time; a process ends with whoever reads its lines, and an import that was ended so
goes on where it was when it is run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Final

from control_plane.errors import Internal

AT_ONCE: Final = 2
LINE_BYTES: Final = 1 << 20
_importing: Final = asyncio.Semaphore(AT_ONCE)
_verifying: Final = asyncio.Semaphore(AT_ONCE)

Line = dict[str, Any]


def import_command(uri: str, models_dir: Path, allowed: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "model_loader.importer", uri, "--models-dir", str(models_dir)]
    for pattern in allowed:
        command += ["--allow", pattern]
    return command


async def run_import(uri: str, models_dir: Path, allowed: Sequence[str]) -> AsyncGenerator[Line, None]:
    """`progress`, then `done` or `error`."""
    async with contextlib.aclosing(_run(_importing, import_command(uri, models_dir, allowed))) as lines:
        async for line in lines:
            yield line


async def run_verification(manifests: Sequence[Path]) -> AsyncGenerator[Line, None]:
    """`progress` and `bad`, then `done` or `error`."""
    command = [sys.executable, "-m", "model_loader.verification", *map(str, manifests)]
    async with contextlib.aclosing(_run(_verifying, command)) as lines:
        async for line in lines:
            yield line


async def _run(room: asyncio.Semaphore, command: Sequence[str]) -> AsyncGenerator[Line, None]:
    if room.locked():
        yield {"event": "progress", "stage": "waiting", "done_bytes": 0, "total_bytes": 0}
    async with room:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,  # a Ctrl-C at our terminal is not meant for it
        )
        try:
            if process.stdout is None or process.stderr is None:
                raise Internal(f"{command[2]} has no pipes")
            errors = asyncio.ensure_future(process.stderr.read(65536))
            ended = False
            async for raw in process.stdout:
                line: Line = json.loads(raw)
                ended = ended or line["event"] in ("done", "error")
                yield line
            said = (await errors).decode("utf-8", "replace").strip().splitlines()
            if not ended:
                status = await process.wait()
                why = f": {said[-1][:500]}" if said else ""
                yield {
                    "event": "error", "code": "import_failed", "retry": True,
                    "message": f"{command[2]} ended with {status} before it was done{why}: try again",
                }  # fmt: skip
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
