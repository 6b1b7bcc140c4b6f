"""What the handlers share: one object per gateway process, made by `app` and handed to every route."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiohttp import web

if TYPE_CHECKING:
    from control_plane.adopting import Adopting
    from control_plane.allowances import Allowances
    from control_plane.backends.kubernetes.cluster import Cluster
    from control_plane.backends.slot_files import SlotFiles
    from control_plane.budgets import Budgets
    from control_plane.database import Database
    from control_plane.decisions import Decisions
    from control_plane.demand import DemandSender
    from control_plane.derived import DerivedObjects
    from control_plane.dispatch import Dispatcher
    from control_plane.drains import Drains
    from control_plane.fleet import Fleet
    from control_plane.functions import FunctionStore
    from control_plane.gateway.prompts import PromptMakers
    from control_plane.gateways import Gateways
    from control_plane.importing import Importing
    from control_plane.journal import Journal
    from control_plane.kv_collection import KvCollection
    from control_plane.kv_desk import KvDesk
    from control_plane.kv_index import KvIndex
    from control_plane.kv_sharing import KvSharing
    from control_plane.ledger import Ledger
    from control_plane.loop import ControlLoop
    from control_plane.metrics import Metrics
    from control_plane.moving import Moves
    from control_plane.object_store import StoreWatch
    from control_plane.objectives import Objectives
    from control_plane.peers import Peers
    from control_plane.predicted import Predicted
    from control_plane.queue_shares import QueueShares
    from control_plane.quotas import Quotas
    from control_plane.sealing import TenantKeys
    from control_plane.seating import Seating
    from control_plane.serving import Serving
    from control_plane.settings import Settings
    from control_plane.shares import Shares
    from control_plane.slot_scaling import SlotScaling
    from control_plane.standings import Standings
    from control_plane.tenants import Keys
    from control_plane.traces import Traces


def new_gateway_id() -> str:
    return "gw-" + secrets.token_hex(6)


@dataclass(slots=True, kw_only=True)
class AppContext:
    settings: Settings
    gateway_id: str
    db: Database
    gateways: Gateways
    peers: Peers
    journal: Journal
    ledger: Ledger
    functions: FunctionStore
    keys: Keys
    tenant_keys: TenantKeys
    decisions: Decisions
    dispatcher: Dispatcher
    drains: Drains
    shares: Shares
    queue_shares: QueueShares
    budgets: Budgets
    quotas: Quotas
    standings: Standings
    allowances: Allowances
    objectives: Objectives
    fleet: Fleet
    seating: Seating
    adopting: Adopting
    sender: DemandSender
    loop: ControlLoop
    slot_scaling: SlotScaling
    moves: Moves
    kv_sharing: KvSharing
    predicted: Predicted
    serving: Serving
    importing: Importing
    prompts: PromptMakers
    metrics: Metrics
    kv_index: KvIndex
    kv_desk: KvDesk
    kv_collection: KvCollection
    derived: DerivedObjects
    slot_files: SlotFiles
    store: StoreWatch
    traces: Traces | None = None
    cluster: Cluster | None = None
    """Where slots are pods."""
    draining: bool = False
    """No new requests any more: the process is going down."""
    ready: bool = False
    body_bytes: int = 0
    """Of request bodies that are being read."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by a signal or over HTTP: drain and end."""

    async def look_again(self, what: tuple[str, ...]) -> None:
        """Another gateway says that there is news of these."""
        if "gateways" in what:
            self.gateways.look_soon()
        if "keys" in what:
            await self.keys.refresh()
            await self.tenant_keys.refresh()
            await self.budgets.refresh()
            await self.quotas.refresh()
        if "functions" in what:
            await self.functions.refresh()
        if "drains" in what:
            await self.drains.refresh()
        if "slots" in what:
            await self.fleet.look()


CONTEXT: Final = web.AppKey("context", AppContext)
