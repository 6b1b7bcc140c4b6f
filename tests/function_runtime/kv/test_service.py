"""Durable KV of a replica: whose chunks it deletes, and how long it takes one for stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from function_runtime.held import HeldRequest
from function_runtime.inbox import Inbox
from function_runtime.kv import service as service_module
from function_runtime.kv.known import KNOWN_FOR_S, KnownChunks
from function_runtime.kv.service import DurableKv
from function_runtime.passes import NONE, Passes
from function_runtime.protocol import KvSealed
from model_loader.objects import DirectoryStore
from tests.function_runtime.kv.test_chunks import IDENTITY, LAYOUT
from tests.support.replica_client import work

PROMPT = tuple(range(100, 164))
CHUNK = 32
BY_ONE_PASS = Passes(((CHUNK, CHUNK),))


@dataclass(frozen=True)
class Sealed:
    """Positions whose KV is complete."""

    request_id: str
    start: int = 0
    end: int = CHUNK
    passes: Passes = NONE
    choice: int = 0
    epoch: int = 1
    partial: bool = False


class Loop:
    """What `DurableKv` needs of the replica's loop."""

    is_awake = True

    def kv_sealed(self, held: HeldRequest, message: KvSealed) -> None:
        held.seal(message)


class Replica:
    def __init__(self, root: Path) -> None:
        self.store = DirectoryStore(root)
        self.inbox = Inbox()
        loop = cast(Any, Loop())
        self.kv = DurableKv(self.store.uri, IDENTITY, self.inbox, lambda: loop, chunk_tokens=CHUNK)

    def hold(self) -> HeldRequest:
        return HeldRequest(work(PROMPT), None)

    def write(self, held: HeldRequest) -> str:
        """The pack of its first chunk."""
        data = memoryview(bytearray(LAYOUT.nbytes_per_token * CHUNK))
        self.kv.write(held, Sealed(held.id, passes=BY_ONE_PASS), data)
        self.kv.flush(10.0)
        self.inbox.run_all()
        ((chunk,),) = [message.chunks for message in held.kv]
        return chunk.pack

    def has_already(self, held: HeldRequest) -> bool:
        return self.kv.has_already(held, Sealed(held.id, passes=BY_ONE_PASS))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [1000.0]
    monkeypatch.setattr(service_module, "KnownChunks", lambda clock: KnownChunks(lambda: now_s[0]))
    return now_s


@pytest.fixture
def replica(tmp_path: Path, clock: list[float]) -> Iterator[Replica]:
    replica = Replica(tmp_path / "objects")
    yield replica
    replica.kv.close()
    replica.inbox.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_only_the_end_of_a_request_lets_its_packs_go(replica: Replica, goes_on: bool) -> None:
    held = replica.hold()
    pack = replica.write(held)
    assert replica.store.exists(pack)
    if goes_on:
        replica.kv.hand_over(held)
    else:
        replica.kv.release(held)
    replica.kv.close()
    assert (replica.store.exists(pack) is not None) == goes_on


def test_a_pack_that_was_given_away_is_not_deleted_with_who_shared_it(replica: Replica) -> None:
    first, second = replica.hold(), replica.hold()
    pack = replica.write(first)
    assert replica.has_already(second)
    replica.kv.hand_over(first)
    replica.kv.release(second)
    replica.kv.close()
    assert replica.store.exists(pack)


def test_what_was_given_away_is_taken_for_stored_no_longer_than_anything_else(
    replica: Replica, clock: list[float]
) -> None:
    """Nobody here hears when it is deleted: counted on for ever it would be named, and never written again."""
    first, second = replica.hold(), replica.hold()
    replica.write(first)
    clock[0] += KNOWN_FOR_S + 1
    assert replica.has_already(second), "a request here counts on it"
    replica.kv.hand_over(first)
    replica.kv.hand_over(second)
    assert not replica.has_already(replica.hold())
