"""The stores that the contract is tested over: a directory, that of a control plane, and S3 as SeaweedFS serves it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model_loader.objects import DirectoryStore, ObjectStore, open_store
from tests.support.seaweed import ADMIN, Credentials, Seaweed
from tests.support.served_store import ServedStore

Opener = Callable[..., ObjectStore]


@pytest.fixture
def open_s3(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens stores as `ADMIN` or as somebody else; they are closed at the end."""
    opened: list[ObjectStore] = []

    def open_as(credentials: Credentials = ADMIN, prefix: str = "", **where: str) -> ObjectStore:
        for name, value in credentials.environ().items():
            monkeypatch.setenv(name, value)
        store = open_store(seaweed.uri(prefix or f"t-{secrets.token_hex(4)}", **where))
        opened.append(store)
        return store

    yield open_as
    for store in opened:
        store.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedStore]:
    with ServedStore(tmp_path / "served") as served:
        yield served


@pytest.fixture(params=["directory", "http", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "directory":
        yield DirectoryStore(tmp_path / "objects")
    elif request.param == "http":
        with contextlib.closing(request.getfixturevalue("served").store()) as store:
            yield store
    else:
        yield request.getfixturevalue("open_s3")()
