"""The stores that the contract is tested over: a directory, and S3 as SeaweedFS serves it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model_loader.objects import DirectoryStore, ObjectStore, open_store
from tests.support.seaweed import ADMIN, Credentials, Seaweed

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


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "directory":
        yield DirectoryStore(tmp_path / "objects")
    else:
        yield request.getfixturevalue("open_s3")()
