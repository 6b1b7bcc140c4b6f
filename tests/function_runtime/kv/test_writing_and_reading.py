"""From the writer's queue through a store to the reader: the longest sound beginning, and reasons for the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from function_runtime.engine_like import RestoredKv
from function_runtime.kv import writer as writer_module
from function_runtime.kv.identity import Chain
from function_runtime.kv.reader import Restoration, read_kv
from function_runtime.kv.sealing import CLEAR, ChunkSeal
from function_runtime.kv.writer import KvWriter, Pending, Told
from function_runtime.protocol import KvChunk, TokenEvent, Work
from model_loader.errors import StoreError
from model_loader.objects import DirectoryStore, ObjectStore
from tests.function_runtime.kv.test_chunks import IDENTITY, LAYOUT, head_of
from tests.support.replica_client import work

PROMPT = tuple(range(100, 150))
ANSWERS = ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18), (21, 22, 23, 24))


def request(kv: tuple[KvChunk, ...] = (), **fields: Any) -> Work:
    produced = [TokenEvent(choice=c, token_id=t) for c, tokens in enumerate(ANSWERS) for t in tokens]
    return work(PROMPT, max_tokens=100, n=2, produced=tuple(produced), kv=kv, kv_scope="a", **fields)


def sequence(choice: int) -> tuple[int, ...]:
    return (*PROMPT, *ANSWERS[choice])


def data_of(choice: int, start: int, end: int) -> bytes:
    return bytes([(choice * 100 + start + end) % 251]) * (LAYOUT.nbytes_per_token * (end - start))


def into(told: list[Any]) -> Callable[[Told, str], None]:
    """Takes what a writer tells apart, by owner."""
    return lambda said, dropped: told.extend((owner, chunks, dropped) for owner, chunks in said)


class Stored:
    """A store, and chunks written to it."""

    def __init__(self, root: Path) -> None:
        self.store = DirectoryStore(root)
        self.told: list[tuple[Hashable, tuple[KvChunk, ...], str]] = []
        self.writer = KvWriter(lambda: self.store, into(self.told))

    def write(
        self, choice: int, start: int, end: int, owner: str = "r", scope: str = "a", seal: ChunkSeal = CLEAR
    ) -> None:
        head = head_of(start, end, tokens=sequence(choice), scope=scope)
        data = memoryview(bytearray(data_of(choice, start, end)))
        self.writer.put(Pending(owner, choice, head, data, is_wanted=lambda: True, seal=seal))

    def chunks(self) -> tuple[KvChunk, ...]:
        assert self.writer.flush(10)
        return tuple(chunk for _, chunks, _ in self.told for chunk in chunks)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    stored = Stored(tmp_path / "objects")
    yield stored
    stored.writer.close()


def read(work_: Work, store: ObjectStore, within_s: float = 10) -> Restoration:
    with ThreadPoolExecutor(4) as executor:
        return read_kv(work_, IDENTITY, store, executor, within_s)


def restored(outcome: Restoration) -> RestoredKv:
    assert outcome.restored is not None
    return outcome.restored


def test_what_was_written_is_read_back_per_choice(stored: Stored) -> None:
    for choice, start, end in [(0, 0, 32), (0, 32, 50), (0, 32, 64), (1, 32, 53)]:
        stored.write(choice, start, end)
    outcome = read(request(stored.chunks()), stored.store)
    kv = restored(outcome)
    assert kv.lengths == (64, 53) and not outcome.misses
    assert [run.tokens for run in kv.choices[0]] == [32, 32] and [run.tokens for run in kv.choices[1]] == [21]
    assert bytes(kv.choices[0][1].data) == data_of(0, 32, 64)


def test_a_hole_ends_the_prefix(stored: Stored) -> None:
    for start, end in [(0, 16), (32, 48), (48, 64)]:
        stored.write(0, start, end)
    assert restored(read(request(stored.chunks()), stored.store)).lengths == (16, 0)


def test_without_a_beginning_there_is_nothing(stored: Stored) -> None:
    stored.write(0, 16, 48)
    assert read(request(stored.chunks()), stored.store).restored is None


def test_a_bad_chunk_falls_back_to_a_shorter_one_from_the_same_start(stored: Stored) -> None:
    stored.write(0, 0, 32)
    stored.write(0, 32, 50)
    first = stored.chunks()
    stored.write(0, 32, 64)
    (*_, longest) = stored.chunks()
    path = stored.store.root / longest.pack
    raw = bytearray(path.read_bytes())
    raw[longest.offset + longest.nbytes - 1] ^= 1
    path.write_bytes(raw)
    outcome = read(request((*first, longest)), stored.store)
    assert restored(outcome).lengths == (50, 0)
    assert "digest" in outcome.detail


@pytest.mark.parametrize("damage", ["deleted", "short", "empty", "zero tail", "another pack's bytes"])
def test_a_damaged_store_is_a_miss_with_its_reason(stored: Stored, damage: str) -> None:
    stored.write(0, 0, 32)
    (chunk,) = stored.chunks()
    path = stored.store.root / chunk.pack
    raw = path.read_bytes()
    match damage:
        case "deleted":
            path.unlink()
        case "short":
            path.write_bytes(raw[:-100])
        case "empty":
            path.write_bytes(b"")
        case "zero tail":
            path.write_bytes(raw[:-4096] + bytes(4096))
        case _:
            stored.write(0, 0, 32, scope="b")
            other = stored.chunks()[-1]
            path.write_bytes((stored.store.root / other.pack).read_bytes())
    outcome = read(request((chunk,)), stored.store)
    assert outcome.restored is None and outcome.misses


@pytest.mark.parametrize(
    "change",
    [
        {"start": 16},
        {"end": 31},
        {"end": 2**40},
        {"start": -1},
        {"choice": 5},
        {"choice": -1},
        {"offset": 64},
        {"offset": -64},
        {"nbytes": 10},
        {"nbytes": 2**62},
        {"digest": "0" * 64},
        {"chain": "0" * 64},
        {"pack": "../../etc/passwd"},
        {"pack": "kv/packs/00/none"},
    ],
    ids=str,
)
def test_a_record_that_lies_is_a_miss(stored: Stored, change: dict[str, Any]) -> None:
    stored.write(0, 0, 32)
    (chunk,) = stored.chunks()
    outcome = read(request((msgspec.structs.replace(chunk, **change),)), stored.store)
    assert outcome.restored is None and outcome.misses


def test_the_same_tokens_of_another_tenant_are_a_miss(stored: Stored) -> None:
    stored.write(0, 0, 32, scope="b")
    (chunk,) = stored.chunks()
    assert read(request((chunk,)), stored.store).restored is None
    forged = msgspec.structs.replace(chunk, chain=Chain(IDENTITY, "a").at(sequence(0), 32).hex())
    assert read(request((forged,)), stored.store).restored is None


def test_a_store_that_hangs_costs_no_more_than_the_deadline(stored: Stored) -> None:
    stored.write(0, 0, 16)
    stored.chunks()
    stored.write(0, 16, 48)
    chunks = stored.chunks()
    let_go = threading.Event()

    class Hanging(DirectoryStore):
        def get_into(self, key: str, offset: int, view: memoryview, *, within_s: float | None = None) -> None:
            if key == chunks[1].pack:
                let_go.wait(30)
            super().get_into(key, offset, view, within_s=within_s)

    with ThreadPoolExecutor(4) as executor:
        outcome = read_kv(request(chunks), IDENTITY, Hanging(stored.store.root), executor, 1.0)
        let_go.set()
    assert restored(outcome).lengths == (16, 0) and "in time" in outcome.detail


def test_chunks_of_one_scope_share_a_pack_and_scopes_do_not(stored: Stored) -> None:
    stored.write(0, 0, 16, owner="r1")
    stored.write(0, 16, 32, owner="r2")
    stored.write(0, 0, 16, owner="r3", scope="b")
    chunks = stored.chunks()
    packs = {owner: found[0].pack for owner, found, _ in stored.told if found}
    assert len(chunks) == 3 and packs["r1"] != packs["r3"]
    assert len(list(stored.store.list("kv/packs/"))) == len({chunk.pack for chunk in chunks})


def test_what_cannot_be_stored_is_dropped_and_said(tmp_path: Path) -> None:
    told: list[Any] = []

    class Full(DirectoryStore):
        def put(self, key: str, *parts: Any, durable: bool = True) -> int:
            raise StoreError("no space left")

    writer = KvWriter(lambda: Full(tmp_path), into(told))
    head = head_of(0, 16)
    writer.put(Pending("r", 0, head, memoryview(bytearray(head.data_bytes)), is_wanted=lambda: True))
    assert writer.flush(5)
    writer.close()
    assert told == [("r", (), "no space left")]


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    blocked = threading.Event()
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 10_000)

    def store() -> ObjectStore:
        blocked.wait(10)
        return DirectoryStore(tmp_path)

    writer = KvWriter(store, into(told))
    head = head_of(0, 16)
    for _ in range(8):
        writer.put(Pending("r", 0, head, memoryview(bytearray(head.data_bytes)), is_wanted=lambda: True))
    refused = [said for said in told if said[2]]
    assert refused and "full" in refused[0][2]
    blocked.set()
    assert writer.flush(5)
    writer.close()
    assert sum(len(chunks) for _, chunks, _ in told) + len(refused) == 8


def test_what_nobody_wants_any_more_is_not_stored(tmp_path: Path) -> None:
    told: list[Any] = []
    writer = KvWriter(lambda: DirectoryStore(tmp_path), into(told))
    head = head_of(0, 16)
    writer.put(Pending("r", 0, head, memoryview(bytearray(head.data_bytes)), is_wanted=lambda: False))
    assert writer.flush(5)
    writer.close()
    assert told == [("r", (), "")], "whoever waits for it hears that it is not coming"
    assert not list(tmp_path.rglob("packs"))


def test_what_a_tenants_key_sealed_is_read_with_that_key_and_no_other(stored: Stored) -> None:
    key = bytes(range(32))
    stored.write(0, 0, 16, seal=ChunkSeal(key))
    stored.write(0, 16, 32, seal=ChunkSeal(key))
    chunks = stored.chunks()
    packs = [stored.store.get(chunk.pack) for chunk in chunks]
    assert not any(data_of(0, start, start + 16)[:32] in pack for pack in packs for start in (0, 16))
    assert not any(b"tokens" in pack for pack in packs)
    assert restored(read(request(chunks, kv_key=key), stored.store)).lengths[0] == 32
    for wrong in (b"", key[::-1]):
        outcome = read(request(chunks, kv_key=wrong), stored.store)
        assert outcome.restored is None
        assert outcome.bad
