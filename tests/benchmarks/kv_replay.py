"""300 conversations of a trace through an engine that starts cold for each: seconds of prefill that the store saves.

Lengths are scaled down: a block of the trace (512 tokens) is 16 tokens here, and one chunk. Every request meets a
replica that remembers nothing: it asks the index, loads what its plan says from a directory, computes the rest; its new
chunks are written behind and kept by the very rule. What had a hit is computed once more without the store, and the two
times to the first token are compared, and the tokens. Requests are those of every 24th conversation of the trace, up to
48 blocks: an infinite cache would serve 37 % of their blocks. Limits: one at a time; a tiny model where SmolLM2 cannot
be fetched and with `--quick`; what else runs on the machine is in the seconds, in both alike.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from control_plane.database import Database
from control_plane.kv_desk import probability
from control_plane.kv_index import Counts, Keeper, KvIndex
from function_runtime.engine.engine import Engine
from function_runtime.kv.arrival import Arrival
from function_runtime.kv.chunk import ChunkHead
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.keeping import Prefix, Speeds, StorePrices, decide
from function_runtime.kv.reader import Capabilities, Reading
from function_runtime.kv.speeds import DIRECTORY_PRIOR, READERS
from function_runtime.kv.writer import KvWriter, Pending, Told
from function_runtime.protocol import KvChunk, Work
from model_loader.objects import DirectoryStore
from tests.benchmarks import report
from tests.benchmarks.kv_cost import checkpoint_in
from tests.benchmarks.kv_trace import NAME, find_trace, requests
from tests.function_runtime.engine.support import make_work

REQUESTS, QUICK_REQUESTS = 300, 60
MOST_BLOCKS = 48
ONE_IN, WHICH = 24, 7
BLOCK_TOKENS = 16
SCOPE = "bench"
PRICE_MICROUSD_PER_HOUR = 100_000


def sampled(path: Path, count: int) -> list[list[int]]:
    """Blocks of each request. The first is the same in all of the trace; the second tells the conversation."""
    found = [
        blocks for _, blocks in requests(path, 10**9)
        if blocks[min(1, len(blocks) - 1)] % ONE_IN == WHICH and len(blocks) <= MOST_BLOCKS
    ]  # fmt: skip
    return found[:count]


@dataclass
class Replayed:
    requests: int = 0
    blocks: int = 0
    known_blocks: int = 0
    """Named by the index."""
    loaded_blocks: int = 0
    """Loaded: the plan may say that computing is faster."""
    kept_requests: int = 0
    kept_bytes: int = 0
    read_bytes: int = 0
    reads: int = 0
    hits: int = 0
    with_store_s: float = 0.0
    """To the first token, of requests with a hit: asking, planning and loading included."""
    without_store_s: float = 0.0
    """The same requests, computed."""
    with_store_cpu_s: float = 0.0
    """CPU time of the same, writing behind included: what else the machine does is hardly in it."""
    without_store_cpu_s: float = 0.0
    others_s: float = 0.0
    """To the first token, of requests without a hit."""
    other_tokens: int = 0
    """First tokens that differ."""


@dataclass(frozen=True, slots=True)
class Ran:
    token: int
    """The first one."""
    loaded_tokens: int
    at_s: float
    """When the token was there, and the CPU time used by then."""
    cpu_s: float


@dataclass
class Replay:
    engine: Engine
    identity: KvIdentity
    store: DirectoryStore
    index: KvIndex
    readers: ThreadPoolExecutor
    vocabulary: int
    found: Replayed = field(default_factory=Replayed)

    def __post_init__(self) -> None:
        self._stored: list[KvChunk] = []
        self._writer = KvWriter(lambda: self.store, self._told, linger_s=0.0)
        self._keeper = Keeper("default", "fn", SCOPE, "", PRICE_MICROUSD_PER_HOUR)

    def _told(self, told: Told, dropped: str) -> None:
        self._stored += [chunk for _, chunks in told for chunk in chunks]

    async def take(self, number: int, blocks: Sequence[int]) -> None:
        # The last block's answer needs a token that is never stored: the prompt is one longer than its blocks.
        tokens = (*(token for block in blocks for token in self._tokens(block)), self._tokens(-1)[0])
        chain = Chain(self.identity, SCOPE)
        ends = range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)
        work = make_work(tokens, f"r{number}", scope=SCOPE, max_tokens=2, ignore_eos=True)
        found = self.found
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        known = await self.index.known(self.identity.digest.hex(), SCOPE, [chain.at(tokens, end).hex() for end in ends])
        first = self._run(msgspec.structs.replace(work, kv=known), chain)
        self._writer.flush(60)
        found.requests += 1
        found.blocks += len(blocks)
        found.known_blocks += len(known)
        found.loaded_blocks += first.loaded_tokens // BLOCK_TOKENS
        if first.loaded_tokens:
            found.hits += 1
            found.with_store_s += first.at_s - begin_s
            found.with_store_cpu_s += first.cpu_s - begin_cpu_s
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            again = self._run(msgspec.structs.replace(work, request_id=f"r{number}-again", write_kv=False), None)
            found.without_store_s += again.at_s - begin_s
            found.without_store_cpu_s += again.cpu_s - begin_cpu_s
            found.other_tokens += again.token != first.token
        else:
            found.others_s += first.at_s - begin_s
        await self._keep(blocks, chain.at(tokens, len(blocks) * BLOCK_TOKENS))

    def _tokens(self, block: int) -> list[int]:
        return random.Random(block).choices(range(6, self.vocabulary), k=BLOCK_TOKENS)

    def _run(self, work: Work, chain: Chain | None) -> Ran:
        arrival: Arrival | None = None
        before = self.store.stats.snapshot().kinds["get"]
        reading = Reading(work, self.identity)
        if reading.wanted:
            chosen = reading.plan(self.engine.measured.speeds, Capabilities(self.engine.kv_layout.num_layers))
            if chosen.loads:
                arrival = reading.begin(chosen, self.store, self.readers)
        self.engine.submit(work, arrival)
        token, loaded, at_s, cpu_s = -1, 0, 0.0, 0.0
        while self.engine.has_work:
            step = self.engine.step()
            for admitted in step.admitted:
                loaded = admitted.loaded_tokens
            if step.tokens and not at_s:
                token, at_s, cpu_s = step.tokens[0].events[0].token_id, time.perf_counter(), time.process_time()
            if chain is not None:
                for sealed in step.sealed:
                    self._write(work, chain, sealed.start, sealed.end)
        if arrival is not None and arrival.is_sound_throughout:
            after = self.store.stats.snapshot().kinds["get"]
            nbytes, reads = after.nbytes - before.nbytes, after.requests - before.requests
            self.engine.measured.read(nbytes, reads, arrival.took_us / 1e6)
            self.found.read_bytes += nbytes
            self.found.reads += reads
        return Ran(token, loaded, at_s, cpu_s)

    def _write(self, work: Work, chain: Chain, start: int, end: int) -> None:
        tokens = work.prompt
        if end - start != BLOCK_TOKENS or end > len(tokens):
            return
        ends = chain.at(tokens, start), chain.at(tokens, end)
        head = ChunkHead(self.identity, SCOPE, *ends, start, end, tuple(tokens[start:end]))
        data = self.engine.export_kv(work.request_id, 0, start, end).contiguous().flatten().view(torch.uint8)
        self._writer.put(Pending(work.request_id, 0, head, data.numpy().data, is_wanted=lambda: True))

    async def _keep(self, blocks: Sequence[int], name: bytes) -> None:
        """By the rule, at measured speeds."""
        new, self._stored = self._stored, []
        if not new:
            return
        counts = (await self.index.reuse()).get(("default", "fn", False), Counts())
        speeds, nbytes = self.engine.measured.speeds, sum(chunk.nbytes for chunk in new)
        token_us = (speeds.prefill_s + speeds.prefill_position_s * len(blocks) * BLOCK_TOKENS / 2) * 1e6
        prefix = Prefix(len(new) * BLOCK_TOKENS, nbytes, len({chunk.pack for chunk in new}), name)
        choice = decide(
            prefix, probability(counts, False), PRICE_MICROUSD_PER_HOUR,
            Speeds(token_us, speeds.bytes_per_s, speeds.latency_s), StorePrices(put=0.0, get=0.0),
        )  # fmt: skip
        if choice.keep:
            self.found.kept_requests += 1
            self.found.kept_bytes += nbytes
            await self.index.keep(self._keeper, self.identity.digest.hex(), new, {}, token_us)

    def close(self) -> None:
        self._writer.close()


async def replayed(path: Path, folder: Path, count: int, small: bool) -> tuple[str, Replayed]:
    model, checkpoint = checkpoint_in(folder, small)
    engine = checkpoint.engine(threads=0, prefix_cache=False, kv_bytes=256 << 20, kv_chunk_tokens=BLOCK_TOKENS)
    engine.measured.expect_store(*DIRECTORY_PRIOR)
    identity = KvIdentity(checkpoint.manifest.identity, engine.kv_layout, "", "bench")
    database = await Database.open(folder / "stoker.db")
    with ThreadPoolExecutor(READERS) as readers:
        replay = Replay(engine, identity, DirectoryStore(folder / "objects"), KvIndex(database), readers,
                        checkpoint.manifest.config.vocab_size)  # fmt: skip
        for number, blocks in enumerate(sampled(path, count)):
            await replay.take(number, blocks)
        replay.close()
    await database.close()
    return model, replay.found


def main(quick: bool) -> bool:
    path = find_trace()
    if path is None:
        report.console.print(f"left out: there is no {NAME}; name its folder by STOKER_TRACES")
        return True
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        model, found = asyncio.run(replayed(path, Path(name), QUICK_REQUESTS if quick else REQUESTS, quick))
    saved_s = found.without_store_s - found.with_store_s
    whole_s = found.without_store_s + found.others_s
    rows: list[tuple[str, Any]] = [
        ("requests", found.requests),
        ("blocks of 16 tokens", found.blocks),
        ("named by the index", f"{found.known_blocks / max(found.blocks, 1):.1%}"),
        ("loaded", f"{found.loaded_blocks / max(found.blocks, 1):.1%}"),
        ("requests with a hit", found.hits),
        ("their prefill, computed, s", found.without_store_s),
        ("their prefill with the store, s", found.with_store_s),
        ("saved, s", saved_s),
        ("saved, s of CPU time", found.without_store_cpu_s - found.with_store_cpu_s),
        ("saved of all prefill", f"{saved_s / whole_s:.1%}"),
        ("kept, MiB", found.kept_bytes / 2**20),
        ("read, MiB", found.read_bytes / 2**20),
        ("reads", found.reads),
        ("first tokens that differ", found.other_tokens),
    ]
    report.table(f"{found.requests} conversations on {model}, each on a cold replica", ["what", ""], rows)
    results = {name: getattr(found, name) for name in found.__dataclass_fields__}
    report.save("kv_replay", {"model": model, "saved_s": saved_s, "prefill_s": whole_s, **results})
    # A tiny model's prefill is as short as a read on a busy machine: what it saves says nothing.
    return report.verdict(
        "stored prefixes save prefill and change nothing",
        found.hits > 0 and (quick or saved_s > 0) and not found.other_tokens,
        f"{saved_s:.1f} s of {whole_s:.1f} s, {found.other_tokens} first tokens differ",
    )


if __name__ == "__main__":
    import sys

    raise SystemExit(not main("--quick" in sys.argv))
