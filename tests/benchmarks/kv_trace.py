"""An hour of real conversations (Mooncake's trace) through the index alone: hits, bytes kept, requests to the store.

Every request asks for its prefix, then its new blocks are kept or not by the very rule a replica uses, with the speeds
of a given machine; the clock is the trace's. An infinite cache that keeps everything would serve 36.6 % of the blocks.
The trace is `mooncake_conversation.jsonl.gz` in the folder `STOKER_TRACES` names, or in `../shared/traces` beside the
checkout. Limits: a block of the trace is 512 tokens, here one chunk; answers are not in it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from control_plane.database import Database
from control_plane.journal import Journal
from control_plane.kv_collection import KvCollection
from control_plane.kv_desk import probability
from control_plane.kv_index import Counts, Keeper, KvIndex
from control_plane.settings import KvSettings
from function_runtime.kv.keeping import Prefix, Speeds, StorePrices, decide
from function_runtime.protocol import KvChunk
from tests.benchmarks import report

NAME = "mooncake_conversation.jsonl.gz"
BLOCK = 512
INFINITE_SHARE = 0.366
PACK_BYTES = 64 * 2**20
COLLECT_S = 600.0


@dataclass(frozen=True)
class Machine:
    name: str
    token_bytes: int
    speeds: Speeds
    price_microusd_per_hour: int
    prices: StorePrices
    keeps_all: bool = False


H200_8B = Speeds(token_us=32, read_bytes_per_s=12e9, read_latency_s=0.02)
H200_70B = Speeds(token_us=83, read_bytes_per_s=12e9, read_latency_s=0.02)
MACHINES = (
    Machine("everything is kept", 131_072, H200_8B, 3_000_000, StorePrices(), keeps_all=True),
    Machine("8B on an H200 ($3/h), S3 at 100 Gb/s", 131_072, H200_8B, 3_000_000, StorePrices()),
    Machine("70B on four ($12/h), S3 at 100 Gb/s", 327_680, H200_70B, 12_000_000, StorePrices()),
    Machine("SmolLM2 on two cores ($0.10/h), a directory", 46_080, Speeds(1500, 1e9, 0.002), 100_000,
            StorePrices(put=0, get=0)),
)  # fmt: skip


def find_trace() -> Path | None:
    named = os.environ.get("STOKER_TRACES")
    here = Path(__file__).resolve().parents[2]
    places = [Path(named)] if named else [here.parent / "shared" / "traces"]
    return next((place / NAME for place in places if (place / NAME).is_file()), None)


def requests(path: Path, limit: int) -> Iterator[tuple[float, list[int]]]:
    """(seconds, ids of its whole blocks) of each request."""
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            if number >= limit:
                return
            record = json.loads(line)
            yield record["timestamp"] / 1000, record["hash_ids"]


def chunk_of(block: int, parent: str, at: int, pack: str, nbytes: int) -> KvChunk:
    return KvChunk(0, at * BLOCK, (at + 1) * BLOCK, pack, 0, nbytes, "0" * 64, f"{block + 1:064x}", parent)


async def run(machine: Machine, path: Path, limit: int, folder: Path) -> dict[str, Any]:
    clock_us = [10**15]
    nbytes = machine.token_bytes * BLOCK
    keeper = Keeper("default", "fn", "scope", "", machine.price_microusd_per_hour)
    database = await Database.open(folder / "stoker.db")
    storage = 0.0 if machine.keeps_all else machine.prices.gib_month
    settings = KvSettings(quota_bytes=0, storage_microusd_per_gib_month=storage)
    index = KvIndex(database)
    journal = Journal(database, "gw-bench")
    collection = KvCollection(database, journal, settings, (folder / "objects").as_uri(), lambda: clock_us[0])
    found = {"requests": 0, "blocks": 0, "hits": 0, "kept_blocks": 0, "kept_requests": 0}
    saved_s, held_byte_s, held, gets = 0.0, 0.0, 0, 0
    reuse, collected_s, last_s, begin_s = Counts(), 0.0, 0.0, time.perf_counter()
    with mock.patch.object(database.clock, "now_us", lambda: clock_us[0]):
        for at_s, blocks in requests(path, limit):
            clock_us[0] = 10**15 + round(at_s * 1e6)
            held_byte_s += held * (at_s - last_s)
            last_s = at_s
            chains = [f"{block + 1:064x}" for block in blocks]
            known = len(await index.known("1" * 64, "scope", chains))
            found["requests"] += 1
            found["blocks"] += len(blocks)
            found["hits"] += known
            if known:
                speeds = machine.speeds
                reading_s = speeds.read_latency_s + known * nbytes / speeds.read_bytes_per_s
                saved_s += max(0.0, known * BLOCK * speeds.token_us / 1e6 - reading_s)
                gets += -(-known * nbytes // PACK_BYTES)
            if found["requests"] % 50 == 1:
                reuse = (await index.reuse()).get(("default", "fn", False), Counts())
            new = blocks[known:]
            if new and keeps(machine, new, nbytes, reuse, chains[-1]):
                found["kept_requests"] += 1
                found["kept_blocks"] += len(new)
                held += len(new) * nbytes
                await index.keep(keeper, "1" * 64, packed(blocks, known, nbytes, found["requests"]), {},
                                 machine.speeds.token_us)  # fmt: skip
            if not machine.keeps_all and at_s - collected_s >= COLLECT_S:
                collected_s = at_s
                await collection.collect(orphans=False)
                held = sum(row["nbytes"] for row in await index.totals("default") if row["state"] == "live")
    took_s = time.perf_counter() - begin_s
    await database.close()
    puts = -(-found["kept_blocks"] * nbytes // PACK_BYTES)
    storing = held_byte_s / 2**30 * machine.prices.gib_month / (30 * 86400)
    worth = saved_s * machine.price_microusd_per_hour / 3600
    return {
        **found,
        "hit_share": found["hits"] / found["blocks"],
        "kept_gib": found["kept_blocks"] * nbytes / 2**30,
        "puts": puts,
        "gets": gets,
        "prefill_saved_s": saved_s,
        "saved_usd": worth / 1e6,
        "storing_usd": storing / 1e6,
        "gets_usd": gets * machine.prices.get / 1e6,
        "puts_usd": puts * machine.prices.put / 1e6,
        "index_ms_per_request": took_s / found["requests"] * 1e3,
    }


def keeps(machine: Machine, new: list[int], nbytes: int, reuse: Counts, name: str) -> bool:
    if machine.keeps_all:
        return True
    packs = max(1, len(new) * nbytes // PACK_BYTES)
    digest = bytes.fromhex(name[-8:]) + bytes(28)
    prefix = Prefix(len(new) * BLOCK, len(new) * nbytes, packs, digest)
    return decide(
        prefix, probability(reuse, False), machine.price_microusd_per_hour, machine.speeds, machine.prices
    ).keep


def packed(blocks: list[int], known: int, nbytes: int, number: int) -> tuple[KvChunk, ...]:
    """The new chunks of a request, as many to a pack as fit."""
    per_pack = max(1, PACK_BYTES // nbytes)
    parents = ["", *(f"{block + 1:064x}" for block in blocks)]
    return tuple(
        chunk_of(blocks[at], parents[at], at, f"kv/packs/{number}-{(at - known) // per_pack}", nbytes)
        for at in range(known, len(blocks))
    )


def main(quick: bool) -> bool:
    path = find_trace()
    if path is None:
        report.console.print(f"left out: there is no {NAME}; name its folder by STOKER_TRACES")
        return True
    limit = 1500 if quick else 10**9
    results: dict[str, Any] = {}
    for machine in MACHINES:
        with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
            results[machine.name] = asyncio.run(run(machine, path, limit, Path(name)))
    names = ("hit_share", "kept_gib", "puts", "gets", "prefill_saved_s", "saved_usd", "storing_usd", "gets_usd",
             "puts_usd", "index_ms_per_request")  # fmt: skip
    rows = [[name, *(found[column] for column in names)] for name, found in results.items()]
    report.table(f"{results[MACHINES[0].name]['requests']} conversations of one hour", ["what", *names], rows)
    report.save("kv_trace", results)
    share = results[MACHINES[0].name]["hit_share"]
    held = [
        quick or report.verdict("an infinite cache's 36.6 %", abs(share - INFINITE_SHARE) < 0.001, f"{share:.1%}"),
        *(
            report.verdict(
                f"{name}: keeping by the rule saves more than it costs",
                found["saved_usd"] >= found["storing_usd"] + found["gets_usd"],
                f"${found['saved_usd']:.3f} saved, ${found['storing_usd'] + found['gets_usd']:.3f} paid (and "
                f"${found['puts_usd']:.3f} for packs that KV in flight had written already), "
                f"hits {found['hit_share'] / share:.0%} of the infinite cache's",
            )
            for name, found in list(results.items())[1:]
        ),
    ]
    return all(held)


if __name__ == "__main__":
    import sys

    raise SystemExit(not main("--quick" in sys.argv))
