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
from function_runtime.held import HeldRequest
from function_runtime.kv.arrival import Arrival
from function_runtime.kv.chunk import ChunkHead
from function_runtime.kv.forms import Form, chunk_nbytes, decode, encode, flight_identity, identity_of, layer_nbytes
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.quantising import KEPT_FOR_S, Quantised, Quantising
from function_runtime.kv.reader import Capabilities, Reading, Restoration, read_kv
from function_runtime.kv.speeds import Speeds
from function_runtime.kv.writer import KvWriter, Pending
from function_runtime.kv.written import Written
from function_runtime.passes import NONE, Passes
from function_runtime.protocol import Begun, KvChunk, TokenEvent, Work
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

    def write(
        self, start: int, end: int, identity: KvIdentity, *, data: memoryview | None = None, passes: Passes = NONE
    ) -> None:
        chain = Chain(identity, "a")
        head = ChunkHead(
            identity, "a", chain.at(PROMPT, start), chain.at(PROMPT, end), start, end, PROMPT[start:end], passes
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


def begun_on(prefix: tuple[KvChunk, ...], kv: tuple[KvChunk, ...], form: str = "fp8") -> Work:
    """A request whose first attempt began on these lossy chunks and gave one token."""
    passes = loaded(prefix)
    produced = (TokenEvent(choice=0, token_id=7),)
    ends = (passes.end, len(PROMPT))
    return fresh(kv, form, produced=produced, prefill_ends=ends, begun=Begun(passes=passes.numbers))


def loaded(prefix: tuple[KvChunk, ...]) -> Passes:
    passes = NONE
    for chunk in prefix:
        passes = passes.with_loaded(chunk.end, chunk.digest)
    return passes


def named(prefix: tuple[KvChunk, ...]) -> tuple[KvChunk, ...]:
    """As the records of a request that began on them name them."""
    return tuple(
        msgspec.structs.replace(chunk, lineage=loaded(prefix[: i + 1]).digest) for i, chunk in enumerate(prefix)
    )


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
    layers = chunk_nbytes(form, LAYOUT, 32)
    at = victim.offset + victim.nbytes - layers + data + scales // 2
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


def test_another_tenant_does_not_meet_it(stored: Stored) -> None:
    chunks = stored.prefix("fp8")
    outcome = read(msgspec.structs.replace(fresh(chunks, "fp8"), kv_scope="b"), stored)
    assert outcome.restored is None and "another tenant" in outcome.detail and not outcome.bad


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


def test_a_resume_goes_on_with_the_very_chunks_it_began_on(stored: Stored) -> None:
    prefix = stored.prefix("fp8", 64)
    stored.write(64, 96, flight_identity("fp8", RAW), passes=loaded(prefix).with_pass(96, 100))
    (after,) = stored.chunks()
    outcome = read(begun_on(prefix, (*named(prefix), after)), stored)
    assert outcome.restored is not None and outcome.restored.lengths == (96,), outcome.misses
    first, _, last = outcome.restored.choices[0]
    assert bytes(first.data) == bytes(decode("fp8", LAYOUT, 32, encode("fp8", LAYOUT, values(0, 32))))
    assert bytes(last.data) == bytes(values(64, 96))


def test_a_resume_takes_no_other_chunk_of_the_same_tokens_and_form(stored: Stored) -> None:
    prefix = stored.prefix("fp8", 64)
    stored.write(0, 32, identity_of("fp8", RAW), data=values(1, 33))
    (other,) = stored.chunks()
    assert read(begun_on(prefix, (other, prefix[1])), stored).restored is None
    assert read(begun_on(prefix, named((other, prefix[1]))), stored).restored is None
    # Nor what was computed after another prefix.
    stored.write(0, 32, flight_identity("fp8", RAW), passes=NONE.with_pass(32, 100))
    assert read(begun_on(prefix, stored.chunks()), stored).restored is None


def test_a_raw_copy_stands_in_for_a_lossy_chunk_that_is_gone(stored: Stored) -> None:
    prefix = stored.prefix("fp8", 32)
    stored.write(0, 32, flight_identity("fp8", RAW), passes=loaded(prefix))
    copies = stored.chunks()
    stored.path(prefix[0]).unlink()
    outcome = read(begun_on(prefix, (*named(prefix), *copies)), stored)
    assert outcome.restored is not None and outcome.restored.lengths == (32,)


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


def test_only_what_is_not_kept_yet_is_quantised_also_behind_a_lossy_prefix(stored: Stored) -> None:
    prefix = stored.prefix("fp8", 64)
    passes = loaded(prefix)
    for end in (96, 100):
        passes = passes.with_pass(end, end)
        stored.write(end - 32 if end == 96 else 96, end, flight_identity("fp8", RAW), passes=passes)
    after, tail = stored.chunks()
    written = Written(HeldRequest(fresh((), "fp8"), None), RAW)
    written.chunks = {chunk.start: chunk for chunk in (*prefix, after, tail)}
    clock = [0.0]
    quantising = Quantising(32, lambda: clock[0])
    position, sources = quantising.sources(written)
    assert position == 96 and [(s.lossy.start, s.chunk) for s in sources] == [(64, after)]
    assert quantising.prefix(written, sources).nbytes == chunk_nbytes("fp8", LAYOUT, 32)
    quantising.run(Quantised(written, ""), sources, lambda: stored.store, stored.writer, lambda: True)
    (kept,) = stored.chunks()
    assert kept.form == "fp8" and kept.parent == prefix[-1].chain
    # For a while it is known to be kept; then it is made again, in case the index let it go.
    quantising.saw(kept)
    assert quantising.sources(written) == (96, [])
    clock[0] = KEPT_FOR_S + 1
    assert len(quantising.sources(written)[1]) == 1
    written.chunks = {0: prefix[0], 64: after}
    assert quantising.sources(written) == (32, []), "a prefix has no holes"


def test_a_raw_chunk_that_is_damaged_is_not_quantised(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    for start in (0, 32):
        stored.write(start, start + 32, flight_identity("fp8", RAW))
    chunks = stored.chunks()
    raw = bytearray(stored.path(chunks[1]).read_bytes())
    raw[chunks[1].offset + chunks[1].nbytes - 1] ^= 1
    stored.path(chunks[1]).write_bytes(raw)
    written = Written(HeldRequest(fresh((), "fp8"), None), RAW)
    written.chunks = {chunk.start: chunk for chunk in chunks}
    quantising = Quantising(32)
    _, sources = quantising.sources(written)
    quantising.run(Quantised(written, ""), sources, lambda: stored.store, stored.writer, lambda: True)
    assert [chunk.start for chunk in stored.chunks()] == [0]
    assert "kv not kept from 32 on" in capsys.readouterr().err
