"""The control plane as one process: put together, started, drained, ended.

    bind -> database -> keys, functions, lease -> adopt (alone) -> slots in the background -> serve HTTP

It listens before anything slow, is ready once it can accept requests, and needs no agent for that. A first SIGTERM or
SIGINT drains: no new requests, those in flight may finish, what is left is parked in the journal and goes on with the
next start; a second ends at once. Limits: agents and replicas are left alone; `stoker down` ends them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable

from aiohttp import web

from control_plane.adopting import Adopting
from control_plane.allowances import Allowances
from control_plane.api.middleware import error_middleware
from control_plane.backends.base import Backend
from control_plane.backends.linked import LinkedSlots
from control_plane.backends.local import LocalBackend
from control_plane.backends.shared import SharedBackend
from control_plane.backends.slot_files import SlotFiles
from control_plane.budgets import Budgets
from control_plane.context import CONTEXT, AppContext, new_gateway_id
from control_plane.database import Database
from control_plane.decisions import Decisions
from control_plane.demand import Demand, DemandSender
from control_plane.derived import DerivedObjects
from control_plane.dispatch import Dispatcher
from control_plane.drains import Drains
from control_plane.errors import StokerError
from control_plane.fleet import Fleet
from control_plane.functions import ChangeKind, FunctionChange, FunctionStore, ImportState
from control_plane.gateway.internal import news_middleware
from control_plane.gateway.prompts import PromptMakers
from control_plane.gateway.relay import relay_middleware
from control_plane.gateway.routes import routes
from control_plane.gateways import Gateways, internal_token
from control_plane.importing import Importing
from control_plane.journal import Journal
from control_plane.kv_collection import KvCollection
from control_plane.kv_desk import KvDesk
from control_plane.kv_index import KvIndex
from control_plane.kv_sharing import KvSharing
from control_plane.lanes import FunctionKey
from control_plane.ledger import Ledger
from control_plane.live_request import LiveRequest
from control_plane.load_store import LoadStore
from control_plane.loop import ControlLoop
from control_plane.metrics import Metrics
from control_plane.moving import Moves
from control_plane.object_store import StoreWatch
from control_plane.objectives import Objectives
from control_plane.observations import Observations
from control_plane.parking import Parking
from control_plane.peers import Peers
from control_plane.placing import Placing
from control_plane.predicted import Predicted
from control_plane.queue_shares import QueueShares
from control_plane.quotas import Quotas
from control_plane.records import RequestState
from control_plane.sealing import MasterKey, TenantKeys
from control_plane.seating import Seating
from control_plane.serving import Serving
from control_plane.settings import Settings
from control_plane.shares import Shares
from control_plane.slot_scaling import SlotScaling
from control_plane.slot_table import SlotTable
from control_plane.standings import Standings
from control_plane.store_tokens import StoreTokens
from control_plane.tenants import Keys
from control_plane.traces import open_traces
from control_plane.upkeep import Upkeep
from control_plane.waiting_room import wait_for_needs

logger = logging.getLogger(__name__)

BACKLOG = 1024
EXIT_AT_ONCE = 130
SWITCH_S = 0.0005
"""How long the event loop may keep the interpreter from the journal's writer: a commit waits that much at most."""


def build_app(context: AppContext) -> web.Application:
    app = web.Application(
        middlewares=[error_middleware, news_middleware, relay_middleware],
        client_max_size=context.settings.http.body_bytes,
    )
    app[CONTEXT] = context
    app.add_routes(routes(context))
    return app


async def open_context(settings: Settings, backend: Backend | None = None) -> AppContext:
    """Everything but HTTP, opened and put together; nothing runs yet."""
    gateway_id = new_gateway_id()
    db = await Database.open(settings.database_url, settings.database)
    ledger, decisions, keys = Ledger(db), Decisions(db), Keys(db)
    path = None if settings.shared else settings.data_dir / "master.key"
    # Out of the environment like the admin's key: what this process starts has no business with it.
    master = MasterKey(path, os.environ.pop("STOKER_MASTER_KEY", "").strip())
    tenant_keys = TenantKeys(db, keys, master)
    journal = Journal(db, gateway_id, settings.retention, tenant_keys)
    gateways = Gateways(db, gateway_id, settings.gateway, alone=not settings.shared)
    peers = Peers(gateways, internal_token(await keys.internal_secret("gateways")))
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
        dispatcher.service_times.ended(live)
        budgets.ended(live.origin.tenant, live.origin.key_id, live.log.last_seq)
        kv_desk.ended(live)
        dispatcher.load.ended(live)

    dispatcher.endings.on_end = request_ended
    shares = Shares(db, gateways)
    budgets = Budgets(db, shares)
    journal.on_charged = ledger.on_charged = budgets.charged
    queue_shares = QueueShares(shares, dispatcher.lanes, settings.queue)
    if not gateways.alone:
        dispatcher.lanes.granted = queue_shares.granted
        dispatcher.claim_room = lambda key, nbytes, judged: queue_shares.ensure(key, nbytes, judged=judged)
    store_tokens = StoreTokens(await keys.internal_secret("store"), lambda: db.clock.now_us() / 1e6)
    slot_files = SlotFiles(settings, store_tokens, store.opened)
    slots = backend or _slots(settings, db, gateways, peers)
    if isinstance(slots, LinkedSlots):
        slots.files = slot_files
        slot_files.slots_elsewhere = slots.any_elsewhere
    fleet = Fleet(slots, ledger)
    seating = Seating(fleet, dispatcher, journal, gateways.alone)
    serving = Serving(functions, dispatcher, settings.queue)
    quotas = Quotas(db)
    standings = Standings(serving, quotas)
    fleet.watchers.append(standings.replica_changed)
    objectives = Objectives(dispatcher, serving, fleet, standings, decisions, settings.queue.wait_estimate_s)
    objectives.leads = lambda: gateways.leads
    if not gateways.alone:
        objectives.waiting_elsewhere = queue_shares.others
        queue_shares.most_waiting = lambda key: objectives.most_waiting(key, settings.queue.max_requests)
    adopting = Adopting(journal, tenant_keys, serving, dispatcher, seating, kv_desk, db.clock)
    prompts = PromptMakers()
    importing = Importing(settings, functions, fleet, prompts)
    importing.publish = slot_files.publish if slot_files.publishes else None
    prompts.locate = fleet.placing.grants.locate = slot_files.locate
    serving.import_again = importing.again
    demand = Demand(dispatcher.lanes, gateways, dispatcher.load)
    observations = Observations(dispatcher.load, gateways, functions, LoadStore(db, gateway_id))
    sender = DemandSender(demand, gateways, peers)
    loop = ControlLoop(
        settings, functions, serving, dispatcher, fleet, seating, decisions, gateways, demand, sender, observations
    )
    _tell_placing(fleet.placing, seating, functions)
    fleet.placing.turns = lambda: dispatcher.turns
    fleet.placing.on_room = loop.poke_later

    slot_scaling = SlotScaling(fleet, slots, decisions, settings.slot.hold_s, lambda: loop.leads)
    predicted = Predicted(functions, fleet)
    predicted.forecast = dispatcher.service_times.forecast = loop.forecasting.of
    loop.observation.service = dispatcher.service_times.model
    fleet.placing.load, fleet.placing.expected = predicted.load, predicted.expected
    fleet.placing.context_tokens, slot_scaling.expected = predicted.context_tokens, predicted.replicas
    moves = Moves(fleet, slots, decisions, lambda: loop.leads, loop.end_replica)
    kv_sharing = KvSharing(fleet, slots, lambda: loop.leads)
    traces = adopting.traces = open_traces(os.environ, settings.traces.share, gateway_id)
    if traces is not None:
        traces.leads = lambda: fleet.keeps_books
        fleet.watchers.append(traces.replica_changed)
        fleet.slot_watchers.append(traces.slot_changed)
    loop.on_new_agent = importing.slot_appeared
    drains = Drains(db)
    loop.parking = Parking(drains, dispatcher, fleet, seating, decisions)
    loop.parking.poke = loop.poke
    allowances = Allowances(standings, functions, serving, fleet, seating, decisions)
    allowances.end = loop.parking.make_room
    allowances.poke = loop.poke
    fleet.watchers.append(allowances.replica_changed)
    fleet.is_outranked, fleet.may_clear = allowances.outranked, allowances.clears
    fleet.on_no_room = allowances.no_room
    allowances.may_grow = lambda key: slot_scaling.may_grow(fleet.placing.kind_of(key))
    allowances.has_slots = lambda key: slot_scaling.has_slots(fleet.placing.kind_of(key))
    fleet.placing.may_end, fleet.placing.priority = allowances.may_end, allowances.priority
    loop.observation.may_have, loop.observation.device_price = allowances.may_have, standings.device_price
    loop.on_decided = allowances.decided
    quotas.on_change = loop.poke_all
    sender.on_strict = standings.told
    adopting.paused_us = drains.paused_us
    context = AppContext(
        settings=settings,
        gateway_id=gateway_id,
        db=db,
        gateways=gateways,
        peers=peers,
        journal=journal,
        ledger=ledger,
        functions=functions,
        keys=keys,
        tenant_keys=tenant_keys,
        decisions=decisions,
        dispatcher=dispatcher,
        drains=drains,
        shares=shares,
        queue_shares=queue_shares,
        budgets=budgets,
        quotas=quotas,
        standings=standings,
        allowances=allowances,
        objectives=objectives,
        fleet=fleet,
        seating=seating,
        adopting=adopting,
        sender=sender,
        loop=loop,
        slot_scaling=slot_scaling,
        moves=moves,
        kv_sharing=kv_sharing,
        predicted=predicted,
        serving=serving,
        importing=importing,
        prompts=prompts,
        metrics=metrics,
        kv_index=kv_index,
        kv_desk=kv_desk,
        kv_collection=kv_collection,
        derived=DerivedObjects(store.opened, settings.models_dir, functions, settings.kv.orphan_s),
        slot_files=slot_files,
        store=store,
        traces=traces,
    )
    _connect_gateways(context)
    if settings.kubernetes.pods:
        from control_plane.backends.kubernetes.backend import KubernetesBackend
        from control_plane.backends.kubernetes.cluster import Cluster

        if isinstance(slots, KubernetesBackend):
            context.cluster = Cluster(context, slots)
    return context


def _tell_placing(placing: Placing, seating: Seating, functions: FunctionStore) -> None:
    def in_flight(replica_id: str) -> int:
        seat = seating.seat(replica_id)
        return seat.taken if seat is not None else 0

    def kept(key: FunctionKey) -> int:
        function = functions.find(key[1], key[0])
        return function.spec.scaling.min_replicas if function is not None else 0

    def changed(change: FunctionChange) -> None:
        placing.specs += 1
        current = change.function.current
        if current.state is ImportState.READY and current.spec.engine == "native":
            placing.grants.learn(current.identity or "", current.manifest_path or "")

    def own_kv(key: FunctionKey) -> bool:
        function = functions.find(key[1], key[0])
        return function is not None and function.spec.engine_options.kv_bytes > 0

    placing.in_flight, placing.kept, placing.own_kv = in_flight, kept, own_kv
    functions.subscribe(changed)


def _slots(settings: Settings, db: Database, gateways: Gateways, peers: Peers) -> Backend:
    if settings.kubernetes.pods:
        from control_plane.backends.kubernetes.cluster import make_backend

        return make_backend(settings)
    if gateways.alone:
        return LocalBackend(settings)
    shared = SharedBackend(settings, SlotTable(db, gateways.id), gateways)
    shared.on_registered = lambda: peers.tell("slots")
    return shared


def _connect_gateways(context: AppContext) -> None:
    """What follows when a gateway comes or goes, or when the lead does."""
    gateways, loop = context.gateways, context.loop

    def leads(leads: bool) -> None:
        context.fleet.keeps_books = leads
        context.importing.lead(leads)
        context.allowances.forget()
        if context.cluster is not None:
            context.cluster.lead_changed()

    def imported(change: FunctionChange) -> None:
        if change.kind is ChangeKind.IMPORTED and gateways.leads:
            context.peers.tell("functions")

    def regained() -> None:
        context.shares.void()
        context.adopting.regained()

    context.fleet.keeps_books = context.importing.leads = False
    loop.on_lead = leads
    gateways.on_change = loop.gateways_changed
    gateways.on_orphans = context.adopting.orphans
    gateways.on_regained = regained
    context.adopting.on_adopted = context.queue_shares.due.set
    context.functions.subscribe(imported)
    context.journal.may_write = lambda: gateways.held


async def start_context(context: AppContext, url: str = "", predecessor: str = "") -> None:
    """Read what is known, take over what an earlier life left, begin to watch the slots. `url`: where it listens;
    `predecessor`: the gateway whose data directory this is now."""
    await context.keys.refresh()
    await context.tenant_keys.refresh()
    await context.budgets.refresh()
    await context.quotas.refresh()
    # Taken out of the environment: what this process starts has no business with it.
    given = os.environ.pop("STOKER_ADMIN_KEY", "").strip()
    await context.keys.ensure_admin_key(context.settings.admin_key_path, given)
    await context.gateways.start(context.settings.gateway.url or url, predecessor)
    await context.journal.prepare()
    await context.functions.refresh()
    for function in context.functions.list():
        if function.current.state is not ImportState.READY:
            await context.serving.load_older((function.tenant, function.name))
    await context.drains.refresh()
    if context.gateways.alone:
        await context.adopting.at_start()
    context.loop.gateways_changed()
    await context.fleet.start()
    await context.peers.tell_all("gateways", "keys")
    context.ready = True


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
    await context.slot_scaling.close()
    await context.adopting.close()
    await context.dispatcher.close()
    await context.kv_desk.close()
    await context.seating.close()
    if context.cluster is not None:
        await context.cluster.close()
    await context.fleet.close(end_agents=False, grace_s=0.0)
    try:
        await context.loop.observations.keep(whole=True)
    except StokerError as error:
        logger.warning("event=load_not_kept error=%s", error)
    await context.decisions.close()
    await context.store.close()
    context.sender.close()
    try:
        await context.budgets.settle()
        await context.gateways.close()
        await context.peers.tell_all("gateways")
    except StokerError as error:
        logger.warning("event=lease_not_released error=%s", error)
    await context.peers.close()
    await context.db.close()
    if context.traces is not None:
        await asyncio.to_thread(context.traces.close)


def reachable(host: str) -> str:
    """How others reach what listens on this address: one that means every address is none."""
    return platform.node() if host in ("0.0.0.0", "[::]") else host


def succeed(settings: Settings, gateway_id: str) -> str:
    """Who ran on this data directory before: its lock is held, so that one is gone."""
    path = settings.data_dir / "gateway.id"
    predecessor = path.read_text().strip() if path.exists() else ""
    path.write_text(gateway_id + "\n")
    return predecessor


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
    await wait_for_needs(settings, listener)
    context = await open_context(settings)
    context.store.on_change = on_store
    _handle_signals(context)
    sys.setswitchinterval(SWITCH_S)
    runner = web.AppRunner(
        build_app(context), access_log=None, handler_cancellation=True, shutdown_timeout=0.5, keepalive_timeout=75.0
    )
    upkeep = Upkeep(context)
    try:
        await start_context(context, f"http://{reachable(host)}:{port}", succeed(settings, context.gateway_id))
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        upkeep.start()
        logger.info("event=ready url=http://%s:%d gateway=%s", host, port, context.gateway_id)
        if settings.shared and not settings.store.uri:
            # Requests survive all the same: what another's replica does not find in its store is computed again.
            logger.warning("event=store_not_shared hint=give every gateway of this database the same --store")
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
