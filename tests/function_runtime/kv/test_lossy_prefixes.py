"""Chunks in a lossy form: written, read and doubted like raw ones, and never mixed with KV of another making."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from function_runtime.engine_like import KvLayout
from function_runtime.kv.arrival import Arrival
from function_runtime.kv.chunk import ChunkHead, header_nbytes
from function_runtime.kv.forms import Form, chunk_nbytes, decode, encode, flight_identity, identity_of, layer_nbytes
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.reader import Capabilities, Reading, Restoration, read_kv
from function_runtime.kv.speeds import Speeds
from function_runtime.kv.writer import KvWriter, Pending
from function_runtime.protocol import KvChunk, Work
from model_loader.objects import DirectoryStore
from tests.function_runtime.kv.test_writing_and_reading import into
from tests.support.replica_client import work

LAYOUT = KvLayout(num_layers=4, kv_heads=2, head_dim=32, dtype="float32", block_size=16)
RAW = KvIdentity(checkpoint="c" * 64, layout=LAYOUT, rope="theta=1e4", engine_format="native-1/cpu")
PROMPT = tuple(range(100, 200))
LOSSY: tuple[Form, ...] = ("fp8", "int4")


def values(start: int, end: int) -> memoryview:
    random = torch.Generator().manual_seed(start)
    shape = (LAYOUT.num_layers, 2, end - start, LAYOUT.kv_heads, LAYOUT.head_dim)
    return memoryview(bytearray(torch.randn(shape, generator=random).numpy().tobytes()))


class Stored:
    def __init__(self, root: Path) -> None:
        self.store = DirectoryStore(root)
        self.told: list[Any] = []
        self.writer = KvWriter(lambda: self.store, into(self.told))

    def write(self, start: int, end: int, identity: KvIdentity, *, data: memoryview | None = None) -> None:
        chain = Chain(identity, "a")
        head = ChunkHead(
            identity, "a", chain.at(PROMPT, start), chain.at(PROMPT, end), start, end, PROMPT[start:end]
        )  # fmt: skip
        self.writer.put(Pending("r", 0, head, data or values(start, end), is_wanted=lambda: True))

    def chunks(self) -> tuple[KvChunk, ...]:
        assert self.writer.flush(10)
        found = tuple(chunk for _, chunks, _ in self.told for chunk in chunks)
        self.told.clear()
        return found

    def prefix(self, form: Form, end: int = 96) -> tuple[KvChunk, ...]:
        for start in range(0, end, 32):
            self.write(start, start + 32, identity_of(form, RAW))
        return self.chunks()

    def path(self, chunk: KvChunk) -> Path:
        return Path(self.store.root / chunk.pack)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    stored = Stored(tmp_path / "objects")
    yield stored
    stored.writer.close()


def fresh(kv: tuple[KvChunk, ...], form: str, **fields: Any) -> Work:
    return work(PROMPT, kv=kv, kv_scope="a", prefix_form=form, **fields)


def read(work_: Work, stored: Stored) -> Restoration:
    with ThreadPoolExecutor(4) as executor:
        return read_kv(work_, RAW, stored.store, executor, 10)


def speeds(bytes_per_s: float, latency_s: float, token_s: float = 1e-3) -> Speeds:
    return Speeds(token_s, 0.0, token_s, 0.0, latency_s, bytes_per_s)


def fetched(work_: Work, stored: Stored, pieces_of: Speeds | None = None) -> Arrival:
    with ThreadPoolExecutor(4) as executor:
        reading = Reading(work_, RAW)
        if pieces_of is None:
            arrival = reading.begin_all(10.0, stored.store, executor)
        else:
            chosen = reading.plan(pieces_of, Capabilities(LAYOUT.num_layers))
            assert chosen.pieces > 1, chosen
            arrival = reading.begin(chosen, stored.store, executor)
        while not arrival.resolved:
            arrival.wait(1.0)
    return arrival


@pytest.mark.parametrize("form", LOSSY)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_is_read_is_what_the_form_makes_of_it(stored: Stored, form: Form, in_pieces: bool) -> None:
    chunks = stored.prefix(form)
    assert {chunk.form for chunk in chunks} == {form}
    # Computing takes as long as reading, from a store without latency: chunks come in pieces.
    nbytes = chunk_nbytes(form, LAYOUT, 32)
    arrival = fetched(fresh(chunks, form), stored, speeds(nbytes / 0.3, 1e-6, token_s=1e-2) if in_pieces else None)
    assert arrival.is_sound_throughout and arrival.is_lossy
    for chunk in arrival.chunks:
        expected = decode(form, LAYOUT, 32, encode(form, LAYOUT, values(chunk.start, chunk.end)))
        assert bytes(chunk.data) == bytes(expected)


@pytest.mark.parametrize(("form", "share"), [("fp8", 0.27), ("int4", 0.17)])
def test_a_store_holds_a_fraction_of_the_bytes(stored: Stored, form: Form, share: float) -> None:
    lossy = sum(chunk.nbytes for chunk in stored.prefix(form))
    raw = sum(chunk.nbytes for chunk in stored.prefix("raw"))
    # Float32 here; head and scales weigh more on so small a model.
    assert lossy < raw * (share + 0.03)
    assert chunk_nbytes(form, LAYOUT, 32) < chunk_nbytes("raw", LAYOUT, 32) * share


@pytest.mark.parametrize("form", LOSSY)
def test_a_damaged_scale_is_a_miss(stored: Stored, form: Form) -> None:
    chunks = stored.prefix(form)
    victim = chunks[1]
    data, scales = layer_nbytes(form, LAYOUT, 32)
    head = ChunkHead(
        identity_of(form, RAW), "a", bytes(32), bytes(32), victim.start, victim.end, PROMPT[32:64]
    )  # fmt: skip
    at = victim.offset + header_nbytes(victim.nbytes, head) + data + scales // 2
    raw = bytearray(stored.path(victim).read_bytes())
    raw[at] ^= 1
    stored.path(victim).write_bytes(raw)
    outcome = read(fresh(chunks, form), stored)
    assert outcome.restored is not None and outcome.restored.lengths == (32,)
    assert [chunk for chunk, _ in outcome.bad] == [victim]


def test_a_raw_reader_takes_no_lossy_chunk_and_a_lossy_one_no_raw_one(stored: Stored) -> None:
    lossy, raw = stored.prefix("fp8"), stored.prefix("raw")
    assert read(fresh(lossy, "raw"), stored).restored is None
    assert read(fresh(lossy, "int4"), stored).restored is None
    # Whatever a record claims to be, the identity in the chunk decides.
    claimed = tuple(msgspec.structs.replace(chunk, form="raw") for chunk in lossy)
    assert read(fresh(claimed, "raw"), stored).restored is None
    claimed = tuple(msgspec.structs.replace(chunk, form="fp8") for chunk in raw)
    assert read(fresh(claimed, "fp8"), stored).restored is None
    unknown = tuple(msgspec.structs.replace(chunk, form="fp4") for chunk in lossy)
    assert "fp4" in read(fresh(unknown, "fp4"), stored).detail


def test_the_last_token_is_never_taken_from_a_lossy_chunk(stored: Stored) -> None:
    chunks = stored.prefix("fp8")
    ending = msgspec.structs.replace(fresh(chunks, "fp8"), prompt=PROMPT[:96])
    assert [w.chunk.end for w in Reading(ending, RAW).wanted] == [32, 64]


def test_nothing_is_computed_in_front_of_a_lossy_prefix(stored: Stored) -> None:
    # Computing the beginning while the rest is read would be fastest, were it the same KV.
    chunks, raw = stored.prefix("fp8"), stored.prefix("raw")
    slow = speeds(chunk_nbytes("fp8", LAYOUT, 32) / 0.04, 1e-4)
    assert Reading(fresh(chunks, "fp8"), RAW).plan(slow, Capabilities(1)).start == 0
    slower = speeds(chunk_nbytes("raw", LAYOUT, 32) / 0.04, 1e-4)
    assert Reading(fresh(raw, "raw"), RAW).plan(slower, Capabilities(1)).start > 0


def test_state_in_flight_beside_lossy_prefixes_is_no_one_elses(stored: Stored) -> None:
    stored.write(0, 32, flight_identity("fp8", RAW))
    flight = stored.chunks()
    assert flight[0].form == "raw"
    assert read(fresh(flight, "fp8"), stored).restored is not None
    for other in ("raw", "int4"):
        assert read(fresh(flight, other), stored).restored is None
    assert read(fresh(stored.prefix("raw"), "fp8"), stored).restored is None


def test_a_chunk_its_form_cannot_hold_is_dropped_alone(stored: Stored) -> None:
    shape = (LAYOUT.num_layers, 2, 32, LAYOUT.kv_heads, LAYOUT.head_dim)
    bad = memoryview(bytearray(torch.full(shape, float("inf")).numpy().tobytes()))
    stored.write(0, 32, identity_of("fp8", RAW), data=bad)
    stored.write(32, 64, identity_of("fp8", RAW))
    assert stored.writer.flush(10)
    assert [bool(chunks) for _, chunks, _ in stored.told] == [False, True]
    assert stored.writer.counts.unfit_chunks == 1 and stored.writer.stopped == ""
