"""The control plane as one process: put together, started, drained, ended.

    bind -> database -> keys, functions, journal -> adopt -> serve HTTP -> agents in the background

It listens before anything slow, is ready once it can accept requests, and needs no agent for that. A first SIGTERM or
SIGINT drains: no new requests, those in flight may finish, what is left is parked in the journal and goes on with the
next start; a second ends at once. Limits: agents and replicas are left alone; `stoker down` ends them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from aiohttp import web

from control_plane.api.middleware import error_middleware
from control_plane.backends.base import Backend
from control_plane.backends.local import LocalBackend
from control_plane.context import CONTEXT, AppContext, new_gateway_id
from control_plane.database import Database
from control_plane.decisions import Decisions
from control_plane.dispatch import Dispatcher
from control_plane.errors import StokerError
from control_plane.fleet import Fleet
from control_plane.functions import FunctionStore, ImportState
from control_plane.gateway.acceptance import origin_of
from control_plane.gateway.prompts import PromptMakers
from control_plane.gateway.routes import routes
from control_plane.importing import Importing
from control_plane.journal import Journal
from control_plane.kv_collection import KvCollection
from control_plane.kv_desk import KvDesk
from control_plane.kv_index import KvIndex
from control_plane.ledger import Ledger
from control_plane.live_request import LiveRequest, TimeLimits
from control_plane.loop import ControlLoop
from control_plane.metrics import Metrics
from control_plane.object_store import StoreWatch
from control_plane.records import OutcomeError, RequestRecord, RequestState
from control_plane.request_log import RequestLog
from control_plane.seating import Seating
from control_plane.serving import Serving, limits_of
from control_plane.settings import Settings
from control_plane.tenants import Keys
from control_plane.upkeep import Upkeep

logger = logging.getLogger(__name__)

BACKLOG = 1024
EXIT_AT_ONCE = 130
SWITCH_S = 0.0005
"""How long the event loop may keep the interpreter from the journal's writer: a commit waits that much at most."""
DEFAULT_LIMITS = TimeLimits(600.0, 120.0, 120.0, 60.0, 3600.0)
"""For an adopted request whose function is gone."""


def build_app(context: AppContext) -> web.Application:
    app = web.Application(middlewares=[error_middleware], client_max_size=context.settings.http.body_bytes)
    app[CONTEXT] = context
    app.add_routes(routes(context))
    return app


async def open_context(settings: Settings, backend: Backend | None = None) -> AppContext:
    """Everything but HTTP, opened and put together; nothing runs yet."""
    gateway_id = new_gateway_id()
    db = await Database.open(settings.database_url, settings.database)
    journal = Journal(db, gateway_id, settings.retention, settings.gateway)
    ledger, decisions, keys = Ledger(db), Decisions(db), Keys(db)
    functions = FunctionStore(db, settings.models)
    metrics = Metrics()
    dispatcher = Dispatcher(journal, decisions, settings.queue)
    kv_index = KvIndex(db)
    kv_desk = KvDesk(kv_index, decisions, settings.kv)
    store = StoreWatch(settings.store_uri)
    kv_collection = KvCollection(db, journal, settings.kv, settings.store_uri, opener=store.opened)
    dispatcher.on_kv = kv_desk.hear

    def request_ended(live: LiveRequest, state: RequestState, total_s: float) -> None:
        metrics.request_ended(live, state, total_s)
        kv_desk.ended(live)

    dispatcher.endings.on_end = request_ended
    fleet = Fleet(backend or LocalBackend(settings), ledger)
    seating = Seating(fleet, dispatcher, gateway_id)
    serving = Serving(functions, dispatcher, settings.queue)
    prompts = PromptMakers()
    importing = Importing(settings, functions, fleet, prompts)
    serving.import_again = importing.again
    loop = ControlLoop(settings, functions, serving, dispatcher, fleet, seating, decisions)
    loop.on_new_agent = importing.slot_appeared
    return AppContext(
        settings=settings,
        gateway_id=gateway_id,
        db=db,
        journal=journal,
        ledger=ledger,
        functions=functions,
        keys=keys,
        decisions=decisions,
        dispatcher=dispatcher,
        fleet=fleet,
        seating=seating,
        loop=loop,
        serving=serving,
        importing=importing,
        prompts=prompts,
        metrics=metrics,
        kv_index=kv_index,
        kv_desk=kv_desk,
        kv_collection=kv_collection,
        store=store,
    )


async def start_context(context: AppContext) -> None:
    """Read what is known, take over what an earlier life left, begin to watch the slots."""
    await context.keys.refresh()
    # Taken out of the environment: what this process starts has no business with it.
    given = os.environ.pop("STOKER_ADMIN_KEY", "").strip()
    await context.keys.ensure_admin_key(context.settings.admin_key_path, given)
    await context.journal.register()
    await context.functions.refresh()
    for function in context.functions.list():
        if function.current.state is not ImportState.READY:
            await context.serving.load_older((function.tenant, function.name))
    await adopt(context)
    await context.fleet.start()
    context.ready = True


async def adopt(context: AppContext) -> None:
    """Make the unfinished requests of dead gateways ours. In embedded mode the data directory's lock says that nobody
    else lives, so no lease has to run out first."""
    records = await context.journal.adopt(alive=())
    for key in {(record.tenant, record.function) for record in records}:
        await context.serving.load_older(key)
    for record in records:
        try:
            await _adopt_one(context, record)
        except Exception:
            # It stays in the journal for the next start; the others must not suffer for it.
            logger.exception("event=adopt_failed request=%s", record.id)
    if records:
        logger.info("event=adopted requests=%d", len(records))


async def _adopt_one(context: AppContext, record: RequestRecord) -> None:
    revision = context.serving.revision((record.tenant, record.function), record.revision)
    limits = limits_of(revision) if revision is not None else DEFAULT_LIMITS
    shares, price = ("tenant", 0)
    if revision is not None:
        shares, price = revision.spec.share_prefixes, revision.spec.price_microusd_per_hour
    origin = origin_of(record, limits, await context.keys.kv_scope(record.tenant), shares, price)
    origin = dataclasses.replace(origin, reuse=context.kv_desk.reuse(origin))
    # Whoever was reading it is gone with the gateway: that is not the client's leaving.
    live = LiveRequest(origin, detached=True, log=RequestLog(await context.journal.log(record.id)))
    live.epoch = record.epoch
    live.kv = await context.journal.kv(record.id)
    live.prefill_ends = record.prefill_ends
    live.cached_tokens = record.cached_tokens
    live.accept_ns = time.monotonic_ns() - max(time.time_ns() - record.created_us * 1000, 0)
    if not origin.durable and record.state is RequestState.RUNNING:
        error = OutcomeError(500, "gateway_lost", "the gateway died and this function keeps no log (durability: off)")
        context.dispatcher.requests[live.request_id] = live
        context.dispatcher.fail(live, RequestState.FAILED, error)
    elif live.complete:
        context.dispatcher.end_complete(live)
    elif record.state is RequestState.RUNNING and record.replica_id is not None:
        context.seating.adoption.hold(live, record.replica_id)
    else:
        context.dispatcher.enter(live)


async def drain_context(context: AppContext) -> None:
    """No new requests; those in flight may finish."""
    context.draining = True
    in_flight = len(context.dispatcher.requests)
    if in_flight:
        logger.info("event=draining in_flight=%d", in_flight)
        try:
            async with asyncio.timeout(context.settings.http.shutdown_drain_s):
                await context.dispatcher.emptied()
        except TimeoutError:
            logger.info("event=parked requests=%d", len(context.dispatcher.requests))


async def close_context(context: AppContext) -> None:
    context.ready = False
    context.loop.stop()
    await context.importing.close()
    await context.dispatcher.close()
    await context.kv_desk.close()
    await context.seating.close()
    await context.fleet.close(end_agents=False, grace_s=0.0)
    await context.decisions.close()
    await context.store.close()
    try:
        await context.journal.release()
    except StokerError as error:
        logger.warning("event=lease_not_released error=%s", error)
    await context.db.close()


def bind(host: str, port: int) -> socket.socket:
    """Raises OSError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


async def serve(
    settings: Settings,
    on_listening: Callable[[str], None] | None = None,
    on_store: Callable[[StoreWatch], None] | None = None,
) -> None:
    """Run until a signal (or POST /api/v1/drain) ends it. `on_listening` is told the URL, `on_store` whenever the
    object store becomes usable or unusable."""
    listener = bind(settings.http.host, settings.http.port)
    port = listener.getsockname()[1]
    host = f"[{settings.http.host}]" if ":" in settings.http.host else settings.http.host
    context = await open_context(settings)
    context.store.on_change = on_store
    _handle_signals(context)
    sys.setswitchinterval(SWITCH_S)
    runner = web.AppRunner(
        build_app(context), access_log=None, handler_cancellation=True, shutdown_timeout=0.5, keepalive_timeout=75.0
    )
    upkeep = Upkeep(context)
    try:
        await start_context(context)
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        upkeep.start()
        logger.info("event=ready url=http://%s:%d gateway=%s", host, port, context.gateway_id)
        if on_listening is not None:
            on_listening(f"http://{host}:{port}")
        gc.collect()
        gc.freeze()  # what start-up made stays: the collector need not look at it again on the way of a token
        await context.stop.wait()
        await drain_context(context)
    finally:
        context.draining = True
        await upkeep.close()
        await runner.cleanup()
        listener.close()
        await close_context(context)


def _handle_signals(context: AppContext) -> None:
    def stop() -> None:
        if context.stop.is_set():
            os._exit(EXIT_AT_ONCE)  # the journal has everything; nothing else is worth waiting for
        context.stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
