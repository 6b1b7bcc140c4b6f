"""A service under fire, whole: one gateway or two over one database, a folder or a bucket for its objects.

    with site(folder, gateways=2, servers=True) as place:    # PostgreSQL and SeaweedFS behind a faulty proxy
        place.deploy(...)

Each gateway has a data directory, a port and a slot of its own. Limits: all of it on this machine; what two gateways
share on SQLite is a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.client import Endpoint, Locator
from tests.chaos.books import Books, PostgresBooks
from tests.chaos.stored import BucketObjects, FolderObjects, Objects
from tests.support import postgres
from tests.support.faulty_proxy import FaultyProxy
from tests.support.postgres import PostgresServer
from tests.support.seaweed import ADMIN, BUCKET, NotInstalled, Seaweed, binary, boto
from tests.support.service import HttpError, Service

LEASE_S = 3.0
"""Of gateways of which another is to take over; three times as short as would be wise for users."""
PREFIX = "kv-under-fire"


@dataclass(frozen=True, slots=True)
class Bucket:
    """S3 under fire: the server, and what lies between it and the service."""

    seaweed: Seaweed
    proxy: FaultyProxy


@dataclass(frozen=True, slots=True)
class Site:
    gateways: Sequence[Service]
    books: Books
    objects: Objects
    sqlite: Path | None
    """The database's file; None: it is a server's."""
    postgres: PostgresServer | None = None
    bucket: Bucket | None = None

    @property
    def folder(self) -> Path | None:
        """Of the objects; None: they are in a bucket."""
        return self.objects.folder if isinstance(self.objects, FolderObjects) else None

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Of the first gateway that answers. Raises what the last one came to."""
        failure: Exception | None = None
        for gateway in self.gateways:
            try:
                return gateway.call(method, path, body, timeout_s=20)
            except HttpError as error:
                if error.status != 503:
                    raise
                failure = error
            except OSError as error:
                failure = error
        raise failure or RuntimeError("a site without gateways")

    def replicas(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.ask("GET", "/api/v1/replicas")["data"]
        return [row for row in rows if row["state"] not in ("ended", "failed")]

    def places(self, first: int) -> list[Locator]:
        """All gateways, beginning with one: as a reader is told them."""
        count = len(self.gateways)
        found = [self.gateways[(first + each) % count] for each in range(count)]
        return [_locator(gateway) for gateway in found]

    def deploy(self, name: str, model: str, **fields: Any) -> None:
        self.gateways[0].deploy(name, model, **fields)
        for gateway in self.gateways[1:]:
            gateway.wait_imported(name)


def _locator(gateway: Service) -> Locator:
    return lambda: Endpoint(gateway.url, gateway.key)


def missing(*, database: bool, bucket: bool) -> str:
    """Why such a site cannot be had here; empty if it can."""
    if database and (reason := postgres.missing()) is not None:
        return reason
    if bucket:
        try:
            import boto3  # noqa: F401

            binary()
        except ImportError:
            return "the extra s3 is not installed"
        except NotInstalled as error:
            return str(error)
    return ""


@contextlib.contextmanager
def site(
    folder: Path, *, gateways: int = 1, database: bool = False, bucket: bool = False, env: dict[str, str] | None = None
) -> Iterator[Site]:
    """`database`: a PostgreSQL server's, else SQLite. `bucket`: a SeaweedFS server's, else a folder."""
    with contextlib.ExitStack() as held:
        environment, args, server, fire = dict(env or {}), list[str](), None, None
        # Alone on SQLite and a folder it runs as `stoker up` does without any setting.
        shared = gateways > 1
        sqlite = None if database else folder / "shared.db" if shared else folder / "0" / "stoker.db"
        objects: Objects = FolderObjects(folder / "objects" if shared or database else folder / "0" / "objects")
        if database:
            # What a commit has told is to be there after a kill of the server.
            server = held.enter_context(postgres.server({"synchronous_commit": "on"}))
            url = held.enter_context(server.database())
            args += ["--database", url]
        elif shared:
            args += ["--database", f"sqlite:///{sqlite}"]
        if bucket:
            seaweed = held.enter_context(Seaweed(folder / "seaweed"))
            proxy = held.enter_context(FaultyProxy(seaweed.port))
            fire = Bucket(seaweed, proxy)
            environment |= ADMIN.environ()
            args += ["--store", seaweed.uri(PREFIX, endpoint=proxy.url)]
            objects = BucketObjects(boto(seaweed.endpoint), BUCKET, PREFIX + "/")
        elif isinstance(objects, FolderObjects) and (shared or database):
            args += ["--store", objects.folder.as_uri()]
        if shared:
            environment["STOKER_LEASE_S"] = str(LEASE_S)
        books = PostgresBooks(url) if database else Books(sqlite or folder)
        services = [Service(folder / str(number), env=environment, args=tuple(args)) for number in range(gateways)]
        for service in services:
            held.enter_context(service)
        yield Site(services, books, objects, sqlite, server, fire)


__all__ = ["LEASE_S", "Bucket", "Site", "missing", "site"]
