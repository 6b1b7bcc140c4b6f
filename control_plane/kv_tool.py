"""Work on packs that needs their format, done by `function_runtime.kv.tool` in a process of its own, line by line.

Limits: one such process at a time; it ends with whoever reads its lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from control_plane.errors import Unavailable

LINE_BYTES: Final = 64 << 20
"""A pack of thousands of chunks is one line."""

_one_at_a_time: Final = asyncio.Semaphore(1)

Line = dict[str, Any]


async def run_tool(
    command: str, store_uri: str, packs: Iterable[str] = (), kv_keys: Iterable[bytes] = ()
) -> AsyncIterator[Line]:
    """The tool's lines; `error` becomes `Unavailable`, and so does an end without `done`. `kv_keys`: of tenants that
    have keys."""
    async with _one_at_a_time:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "function_runtime.kv.tool", command, "--store", store_uri),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES,
            start_new_session=True,
        )
        try:
            if process.stdin is None or process.stdout is None:
                raise Unavailable("the KV tool has no pipes")
            feeding = asyncio.ensure_future(_feed(process.stdin, (*(f"key {key.hex()}" for key in kv_keys), *packs)))
            done = False
            async for raw in process.stdout:
                line: Line = json.loads(raw)
                if line["event"] == "error":
                    raise Unavailable(f"the store cannot be worked on: {line['message']}", code="object_store_error")
                done = done or line["event"] == "done"
                yield line
            await feeding
            if not done:
                raise Unavailable(f"the KV tool ended with {await process.wait()} before it was done")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _feed(stdin: asyncio.StreamWriter, packs: Iterable[str]) -> None:
    with contextlib.suppress(ConnectionError):
        for pack in packs:
            stdin.write(pack.encode() + b"\n")
            await stdin.drain()
        stdin.close()
