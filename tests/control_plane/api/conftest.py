from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from control_plane.api import routes
from control_plane.api.middleware import error_middleware
from control_plane.budgets import Budgets
from control_plane.context import AppContext
from control_plane.database import Database
from control_plane.decisions import Decisions
from control_plane.derived import DerivedObjects
from control_plane.dispatch import Dispatcher
from control_plane.fleet import Fleet
from control_plane.functions import FunctionStore
from control_plane.gateways import Gateways
from control_plane.journal import Journal
from control_plane.kv_index import KvIndex
from control_plane.quotas import Quotas
from control_plane.serving import Serving
from control_plane.settings import GatewaySettings, ModelSettings, QueueSettings, Settings
from control_plane.shares import Shares
from control_plane.standings import Standings
from control_plane.tenants import Keys, Role
from model_loader.objects import DirectoryStore


@dataclass
class Service:
    """The API over a real database, and keys to call it with."""

    client: TestClient[Any, Any]
    database: Database
    keys: Keys
    functions: FunctionStore
    admin: str
    user: str
    models_dir: Path
    allowed_dir: Path
    """Models may be imported out of this folder."""

    @property
    def url(self) -> str:
        return str(self.client.make_url("/")).rstrip("/")

    async def call(
        self, method: str, path: str, *, key: str | None = None, status: int = 200, **given: Any
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key or self.admin}", **given.pop("headers", {})}
        async with self.client.request(method, path, headers=headers, **given) as response:
            body: dict[str, Any] = await response.json()
            assert response.status == status, body
            assert response.headers["x-request-id"]
            return body


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    database = await Database.open(tmp_path / "stoker.db")
    keys = Keys(database)
    functions = FunctionStore(database, ModelSettings(allowed=("pypi://*", "hf://*")))
    journal = Journal(database, "gw-1")
    dispatcher = Dispatcher(journal, Decisions(database), QueueSettings())
    parts = SimpleNamespace(db=database, keys=keys, functions=functions, dispatcher=dispatcher)
    allowed = ("pypi://*", "hf://*", f"file://{tmp_path}/allowed/*")
    parts.journal, parts.settings = journal, Settings(tmp_path, models=ModelSettings(allowed=allowed))
    parts.fleet = Fleet(cast(Any, None), cast(Any, None))
    """Without a slot there is nothing it asks of its backend."""
    objects = DirectoryStore(tmp_path / "objects")
    parts.derived = DerivedObjects(lambda: objects, parts.settings.models_dir, functions, 3600.0)
    gateways = Gateways(database, "gw-1", GatewaySettings(), alone=True)
    parts.gateways, parts.quotas = gateways, Quotas(database)
    serving = Serving(functions, dispatcher, QueueSettings())
    parts.standings = Standings(serving, parts.quotas)
    parts.budgets = Budgets(database, Shares(database, gateways))
    parts.kv_index, parts.kv_collection = KvIndex(database), None
    context = cast(AppContext, parts)
    app = web.Application(middlewares=[error_middleware])
    app.add_routes(routes(context))

    async def fall_over(request: web.Request) -> web.Response:
        raise RuntimeError("a secret of the inside")

    app.router.add_get("/fall-over", fall_over)
    _, admin = await keys.create("default", "admin", Role.ADMIN)
    _, user = await keys.create("default", "user", Role.USER)
    async with TestClient(TestServer(app, host="127.0.0.1")) as client:
        models_dir = parts.settings.models_dir
        yield Service(client, database, keys, functions, admin, user, models_dir, tmp_path / "allowed")
    await database.close()
