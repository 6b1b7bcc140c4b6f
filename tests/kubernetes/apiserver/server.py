"""The server: a thread with an event loop of its own, and the hooks that tests pull.

Model: all state is touched in that loop only; hooks called from a test's thread are run there. It serves HTTPS, because
clients of Kubernetes send bearer tokens over TLS only (`client-go/tools/clientcmd/client_config.go`).
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from aiohttp import web

from tests.kubernetes.apiserver.access import MASTERS, Access, Denial, service_account_user
from tests.kubernetes.apiserver.calls import User
from tests.kubernetes.apiserver.certificates import make_certificates
from tests.kubernetes.apiserver.endpoints import Endpoints, Recorded
from tests.kubernetes.apiserver.errors import expired
from tests.kubernetes.apiserver.faults import Fault, Faults
from tests.kubernetes.apiserver.registry import Registry
from tests.kubernetes.apiserver.resources import Catalogue, builtin_types
from tests.kubernetes.apiserver.store import Cut, Store, Subscription
from tests.kubernetes.apiserver.watches import Watches
from tests.kubernetes.clock import stamp

Object = dict[str, Any]
T = TypeVar("T")
# Upstream's interval is a minute; here a bookmark comes soon enough for a test to see one.
BOOKMARK_INTERVAL_S = 5.0
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
_MAX_BODY_BYTES = 3 * 1024 * 1024


class ApiServer:
    """`with ApiServer(folder) as server:` serves at `server.url` until the end of the block."""

    def __init__(self, folder: Path, cluster_ip: Callable[[], str] | None = None) -> None:
        self.folder = folder
        self.faults = Faults()
        addresses = itertools.count(1)
        self._store = Store()
        self._catalogue = Catalogue(builtin_types())
        self._access = Access(self._store)
        allocate = cluster_ip or (lambda: f"127.255.0.{next(addresses)}")
        self._registry = Registry(self._store, self._catalogue, allocate)
        self._watches = Watches(self._registry, BOOKMARK_INTERVAL_S)
        self._endpoints = Endpoints(self._registry, self._access, self.faults, self._watches)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.certificates = make_certificates(
            folder / "certificates",
            [
                "localhost",
                "kubernetes",
                "kubernetes.default",
                "kubernetes.default.svc",
                "kubernetes.default.svc.cluster.local",
            ],
            ["127.0.0.1"],
        )
        self.admin_token = self._access.issue(User("kubernetes-admin", (MASTERS, "system:authenticated")))

    def __enter__(self) -> ApiServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="apiserver", daemon=True)
        self._thread.start()
        if not ready.wait(120) or not self.port:
            raise RuntimeError("the tests' API server did not start")

    def stop(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._thread = None

    def _run(self, ready: threading.Event) -> None:
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        self._loop = loop
        try:
            loop.run_until_complete(self._open())
            ready.set()
            loop.run_forever()
        finally:
            ready.set()
            loop.run_until_complete(self._close())
            loop.close()

    async def _open(self) -> None:
        self._bootstrap()
        application = web.Application(client_max_size=_MAX_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._endpoints.handle)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificates.certificate, self.certificates.key)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        self._store.cut(Cut())
        await self._endpoints.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _bootstrap(self) -> None:
        """What a cluster has before anybody applies anything (`pkg/controlplane/controller/systemnamespaces`)."""
        namespaces = self._catalogue.find("", "v1", "namespaces")
        assert namespaces is not None
        for name in _NAMESPACES:
            self._put(
                "v1", "Namespace", ("", "namespaces"), {"name": name, "labels": {"kubernetes.io/metadata.name": name}},
                spec={"finalizers": ["kubernetes"]}, status={"phase": "Active"},
            )  # fmt: skip

    def _put(self, api_version: str, kind: str, key: tuple[str, str], metadata: Object, **parts: Any) -> None:
        import uuid

        metadata = {**metadata, "uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        self._store.put(key, {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts})

    # Hooks: from any thread.

    def run(self, call: Callable[[], T]) -> T:
        """Runs `call` in the server's loop, between two requests."""
        assert self._loop is not None

        async def wrapped() -> T:
            return call()

        coroutine: Coroutine[Any, Any, T] = wrapped()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def token_of(self, namespace: str, account: str) -> str:
        """A token of a service account, which need not be there yet."""
        return self.run(lambda: self._access.issue(service_account_user(namespace, account)))

    def system_token(self, name: str) -> str:
        """A token of a component of the cluster itself, which may do everything."""
        return self.run(lambda: self._access.issue(User(f"system:{name}", (MASTERS, "system:authenticated"))))

    @property
    def denied(self) -> list[Denial]:
        return self.run(lambda: list(self._access.denied))

    def forget_denied(self) -> None:
        self.run(self._access.denied.clear)

    def cut_watches(self, resource: str = "*", user: str = "") -> int:
        """Closes watches, as a server that restarts or a load balancer does; the number of those closed."""
        return self.run(lambda: self._store.cut(Cut(), _watching(resource, user)))

    def expire_versions(self, resource: str = "*") -> int:
        """Compacts: watches get 410 Gone, and every resourceVersion known so far is too old to resume from."""

        def expire() -> int:
            self._store.compact()
            return self._store.cut(Cut(expired().status()), _watching(resource, ""))

        return self.run(expire)

    def fail(
        self,
        verb: str = "*",
        resource: str = "*",
        status: int | str | None = 500,
        times: int | None = 1,
        **more: Any,
    ) -> Fault:
        """See `Fault`: `delay_s`, `retry_after_s`, `namespace`, `user`, `lost`, `chance`."""
        return self.faults.add(Fault(verb, resource, status, times, **more))

    def recorded(self, *, writes: bool = False, user: str = "") -> list[Recorded]:
        """Calls answered so far, oldest first."""
        every = self.run(lambda: list(self._endpoints.recorded))
        return [each for each in every if (not writes or each.is_write) and user in each.user]

    def forget_recorded(self) -> None:
        self.run(self._endpoints.recorded.clear)

    @property
    def watches(self) -> int:
        return self.run(lambda: self._store.watches)

    @property
    def revision(self) -> int:
        return self.run(lambda: self._store.revision)

    def objects(self, plural: str, group: str = "", namespace: str | None = None) -> list[Object]:
        """Objects as they are stored, without a call that the record would show."""
        return self.run(lambda: list(self._store.list((group, plural), namespace)))

    def set_bookmark_interval(self, interval_s: float) -> None:
        self._watches.bookmark_interval_s = interval_s


def _watching(resource: str, user: str) -> Callable[[Subscription], bool]:
    return lambda each: resource in ("*", each.key[1]) and user in each.who
