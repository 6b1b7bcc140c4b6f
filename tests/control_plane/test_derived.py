"""What is kept of models that nobody knows any more is swept, when it is time and only where that can be told."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from control_plane.derived import DerivedObjects
from control_plane.functions import FunctionStore
from model_loader.forms.sweeping import artifact_key
from model_loader.objects import DirectoryStore

IMPORTED, USED, GONE = "a" * 64, "b" * 64, "c" * 64
PAUSE_S = 3600.0


class Functions:
    async def refresh(self) -> None:
        return

    def list(self, tenant: str | None) -> list[Any]:
        assert tenant is None
        return [SimpleNamespace(current=SimpleNamespace(identity=identity)) for identity in (USED, None)]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "objects")
    old_s = time.time() - 30 * 86_400
    for identity in (IMPORTED, USED, GONE):
        key = artifact_key(identity, "d" * 64)
        store.put(key, b"kernel")
        os.utime(tmp_path / "objects" / key, (old_s, old_s))
    return store


@pytest.fixture
def derived(tmp_path: Path, store: DirectoryStore, clock: Clock) -> DerivedObjects:
    (tmp_path / "models" / IMPORTED).mkdir(parents=True)
    functions = cast("FunctionStore", Functions())
    return DerivedObjects(lambda: store, tmp_path / "models", functions, PAUSE_S, clock_s=clock)


def kept(store: DirectoryStore) -> set[str]:
    return {found.key.split("/")[1] for found in store.list("artifacts/")}


async def test_what_is_imported_or_used_stays_and_a_look_comes_when_it_is_time(
    derived: DerivedObjects, store: DirectoryStore, clock: Clock
) -> None:
    assert await derived.sweep() is None and kept(store) == {IMPORTED, USED, GONE}
    clock.now_s += PAUSE_S
    swept = await derived.sweep()
    assert swept is not None and swept.objects == 1 and kept(store) == {IMPORTED, USED}
    assert await derived.sweep() is None


async def test_nothing_is_swept_where_the_models_cannot_be_read(
    derived: DerivedObjects, store: DirectoryStore, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "models" / IMPORTED).rmdir()
    (tmp_path / "models").rmdir()
    clock.now_s += PAUSE_S
    assert await derived.sweep() is None and kept(store) == {IMPORTED, USED, GONE}


async def test_a_model_that_is_removed_is_forgotten_at_once(derived: DerivedObjects, store: DirectoryStore) -> None:
    assert (await derived.forget(IMPORTED)).nbytes == len(b"kernel")
    assert kept(store) == {USED, GONE}
