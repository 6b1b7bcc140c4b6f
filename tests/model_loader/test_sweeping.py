"""What is made from models leaves the store with them, and nothing else does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from model_loader.disk_tier import DiskTier
from model_loader.forms.kept import forget_forms
from model_loader.forms.sweeping import GRACE_S, Swept, artifact_key, forget_checkpoint, form_names, sweep_derived
from model_loader.objects.directory import DirectoryStore

KNOWN, GONE = "a" * 64, "b" * 64
COMPILED = "c" * 64
LATER_S = GRACE_S + 3600


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "objects")


def fill(store: DirectoryStore, identity: str) -> list[str]:
    keys = [f"forms/{name}/{part}" for name in sorted(form_names(identity)) for part in ("body", "head")]
    keys.append(artifact_key(identity, COMPILED))
    for key in keys:
        store.put(key, b"x" * 10)
    return keys


def left(store: DirectoryStore) -> list[str]:
    return sorted(found.key for found in store.list(""))


def test_what_is_of_known_models_and_what_is_of_others_stays(store: DirectoryStore) -> None:
    known, gone = fill(store, KNOWN), fill(store, GONE)
    for key in ("kv/packs/1", "forms/readme", "artifacts/notes.txt"):
        store.put(key, b"somebody else's")
        known.append(key)
    swept = sweep_derived(store, [KNOWN], time.time() + LATER_S)
    assert swept == Swept(len(gone), 10 * len(gone))
    assert left(store) == sorted(known)


def test_what_is_younger_than_the_grace_stays_and_a_form_goes_as_a_whole(store: DirectoryStore, tmp_path: Path) -> None:
    keys = fill(store, GONE)
    assert sweep_derived(store, [], time.time() + GRACE_S / 2) == Swept()
    body = next(key for key in keys if key.endswith("/body"))
    old_s = time.time() - LATER_S
    for path in (tmp_path / "objects").rglob("*"):
        if path.is_file() and not str(path).endswith(body.replace("body", "head")):
            os.utime(path, (old_s, old_s))
    sweep_derived(store, [], time.time())
    assert left(store) == sorted([body, body.replace("body", "head")]), "its head was just written"


def test_one_run_removes_so_many_and_the_next_goes_on(store: DirectoryStore) -> None:
    count = len(fill(store, GONE))
    assert sweep_derived(store, [], time.time() + LATER_S, most_removed=2).objects == 2
    assert sweep_derived(store, [], time.time() + LATER_S).objects == count - 2
    assert left(store) == []


def test_kernels_kept_without_a_name_of_their_checkpoint_go(store: DirectoryStore) -> None:
    store.put(f"artifacts/{COMPILED}.bin", b"old")
    assert sweep_derived(store, [COMPILED], time.time() + LATER_S).objects == 1


def test_a_checkpoint_is_forgotten_with_all_that_was_made_of_it(store: DirectoryStore) -> None:
    known, gone = fill(store, KNOWN), fill(store, GONE)
    assert forget_checkpoint(store, GONE).objects == len(gone)
    assert left(store) == sorted(known)
    assert forget_checkpoint(store, GONE) == Swept()


def test_a_disk_tier_forgets_a_form_with_its_head(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    names = sorted(form_names(GONE))
    other = sorted(form_names(KNOWN))[0]
    for name in (names[0], other):
        tier.put(name, 0, b"chunk")
        (tmp_path / f"{name}.head").write_bytes(b"head")
    forget_forms(tier, names)
    assert not tier.has(names[0], 0) and not (tmp_path / f"{names[0]}.head").exists()
    assert tier.has(other, 0) and (tmp_path / f"{other}.head").exists() and tier.used_bytes == 5
