"""On the service's socket while the service cannot start: alive, not ready, and why.

    serve: bind -> waiting room, only if something is missing -> database, ... -> the service itself, on the same socket

Where something looks after the process (`required.is_attended`), a database that is away or a secret that is missing is
waited for, so that an installation comes up and says what it lacks instead of ending over and over again. A database is
tried again until it is there; a missing variable can only come with a new process: after `RENEW_S` this one ends.
Limits: what is wrong later, while the service runs, is the service's own to tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final

from aiohttp import web

from control_plane.errors import Unavailable
from control_plane.gateway.health import not_ready
from control_plane.required import is_attended, missing

if TYPE_CHECKING:
    from control_plane.settings import Settings

logger = logging.getLogger(__name__)

AGAIN_S: Final = 2.0
"""Pause between tries to open the database."""
RENEW_S: Final = 60.0
"""How long a process waits whose environment lacks something, so that somebody can read why. Whoever starts it again
pauses longer each time, up to minutes."""


class NotStarted(Unavailable):
    """The service waits for what it needs."""

    default_code = "not_started"


class WaitingRoom:
    """`reason` is what is waited for, in words; it is told to whoever asks."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @contextlib.asynccontextmanager
    async def open(self, listener: socket.socket) -> AsyncIterator[WaitingRoom]:
        """Answers on the listener until the block ends; the listener stays open."""
        app = web.Application()
        app.router.add_get("/health/live", self._live)
        app.router.add_route("*", "/{path:.*}", self._other)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.SockSite(runner, listener.dup()).start()
            yield self
        finally:
            await runner.cleanup()

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _other(self, request: web.Request) -> web.Response:
        if request.path in ("/health", "/health/ready"):
            return not_ready("not_started", self.reason, retry_after_s=round(AGAIN_S))
        error = NotStarted(f"the service cannot start yet: {self.reason}", retry_after_s=AGAIN_S)
        return web.json_response(error.body(), status=error.http_status, headers=error.headers())


Sleep = Callable[[float], Awaitable[None]]


async def wait_for_needs(settings: Settings, listener: socket.socket, sleep: Sleep = asyncio.sleep) -> None:
    """Returns once the service can start, at once where nothing would start it again; raises NotStarted when only
    another process can."""
    if not is_attended(os.environ):
        return
    lacking = missing(os.environ)
    if lacking:
        reason = "; ".join(lacking)
        logger.error("event=not_started reason=%s", reason)
        async with WaitingRoom(reason).open(listener):
            await sleep(RENEW_S)
        raise NotStarted(reason)
    fault = await _database_fault(settings)
    if not fault:
        return
    logger.error("event=not_started reason=%s", fault)
    async with WaitingRoom(fault).open(listener) as room:
        while fault:
            room.reason = fault
            await sleep(AGAIN_S)
            fault = await _database_fault(settings)
    logger.info("event=can_start")


async def _database_fault(settings: Settings) -> str:
    """Why the database cannot be opened; empty if it can."""
    from control_plane.database import Database
    from control_plane.errors import StorageUnavailable

    try:
        db = await Database.open(settings.database_url, settings.database)
    except StorageUnavailable as error:
        return error.message
    await db.close()
    return ""
