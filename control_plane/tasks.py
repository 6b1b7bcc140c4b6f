"""The end of a task that runs for as long as its owner does. Limits: what it failed with before is raised to whoever
ends it."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancels it and waits until it is over; there may be none yet."""
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
