"""Chunks read from object stores: a directory against plain read and checksum, S3 against boto3, obstore, s3transfer.

Chunks are read as a replica reads them: `Fetch` over one request's records into memory it may use, header and digest
checked, until the arrival is sound throughout. Ways take turns, request by request and round by round, over the same
bytes and with as many threads; each fills memory that it used before, where it can. "Plain" is `pread` and one SHA-256,
the digest that the format demands. Of S3, SeaweedFS on this machine, so that its own work on these cores is in every
figure alike, two things are compared: bytes that nobody checks (`get_into`, the store's part) and chunks that are, with
peers whose bytes are hashed as well. Limits: whatever else runs on the machine slows both sides; shares are of medians.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import io
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from function_runtime.engine_like import KvLayout
from function_runtime.kv.chunk import ChunkHead, encode_chunk
from function_runtime.kv.fetch import Fetch, Wanted
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.pack import build_pack
from function_runtime.kv.speeds import READERS
from function_runtime.protocol import KvChunk
from model_loader.objects import DirectoryStore, ObjectStore, open_store
from tests.benchmarks import report
from tests.support.seaweed import ADMIN, BUCKET, NotInstalled, Seaweed, boto

DIRECTORY_AIM, S3_AIM = 0.80, 0.90
LAYOUT = KvLayout(num_layers=16, kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16)
CHUNK_TOKENS, CHUNKS_A_PACK, PACKS_A_REQUEST = 256, 4, 4
"""16 KiB a token, 4 MiB a chunk, 16 MiB a pack, 64 MiB a request."""
WITHIN_S = 60.0
CHECKED = " + SHA-256"

FETCH, PLAIN = "chunks", "plain read + SHA-256"
STORE = "stoker's store"


@dataclass
class Request:
    """What is stored of one request."""

    wanted: list[Wanted] = field(default_factory=list)
    packs: list[tuple[str, int, str]] = field(default_factory=list)
    """(key, bytes, SHA-256 of them) of each pack."""

    @property
    def chunk_bytes(self) -> int:
        return sum(w.chunk.nbytes for w in self.wanted)

    @property
    def pack_bytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.packs)


Way = Callable[[Request], int]
"""Reads a request's bytes and gives their number."""


def stored(store: ObjectStore, number: int) -> Request:
    identity = KvIdentity(checkpoint="c" * 64, layout=LAYOUT, rope="{}", engine_format="bench")
    tokens = tuple(random.Random(number).choices(range(32_000), k=CHUNK_TOKENS * CHUNKS_A_PACK * PACKS_A_REQUEST))
    chain = Chain(identity, "bench")
    request = Request()
    for pack_start in range(0, len(tokens), CHUNK_TOKENS * CHUNKS_A_PACK):
        encoded = []
        for start in range(pack_start, pack_start + CHUNK_TOKENS * CHUNKS_A_PACK, CHUNK_TOKENS):
            end = start + CHUNK_TOKENS
            ends = chain.at(tokens, start), chain.at(tokens, end)
            head = ChunkHead(identity, "bench", *ends, start, end, tokens[start:end])
            encoded.append((head, encode_chunk(head, memoryview(os.urandom(head.data_bytes)))))
        pack = build_pack([(head.chain, chunk) for head, chunk in encoded])
        nbytes = store.put(pack.key, *pack.parts, durable=False)
        request.packs.append((pack.key, nbytes, hashlib.sha256(b"".join(pack.parts)).hexdigest()))
        for (head, _), entry in zip(encoded, pack.entries, strict=True):
            record = KvChunk(0, head.start, head.end, pack.key, entry.offset, entry.nbytes, entry.digest,
                             head.chain.hex(), head.parent.hex())  # fmt: skip
            request.wanted.append(Wanted(record, head))
    return request


def fetching(store: ObjectStore, pool: concurrent.futures.Executor) -> Way:
    def never(chunk: KvChunk, reason: str) -> None:
        raise RuntimeError(f"{chunk.pack}: {reason}")

    def way(request: Request) -> int:
        arrival = Fetch(store, pool, never).begin(request.wanted, [WITHIN_S] * len(request.wanted))
        while not arrival.resolved:
            arrival.wait(1.0)
        if not arrival.is_sound_throughout:
            raise RuntimeError(arrival.detail)
        return request.chunk_bytes

    return way


def in_turns(ways: dict[str, Way], requests: Sequence[Request], rounds: int) -> dict[str, dict[str, float]]:
    """GB/s of each over the rounds, and what it took of this process's CPU."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds + 1):
        for request in requests:
            for name in order[number % len(order) :] + order[: number % len(order)]:
                begin_s, cpu_s = time.perf_counter(), time.process_time()
                nbytes = ways[name](request)
                took_s, used_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
                if number:  # the first round opens connections and touches memory
                    speeds[name].append(nbytes / took_s / 1e9)
                    cpus[name].append(used_s / nbytes * 1e9)
    return {
        name: {
            "median_gb_s": statistics.median(speeds[name]),
            "best_gb_s": max(speeds[name]),
            "cpu_s_per_gb": statistics.median(cpus[name]),
        }
        for name in ways
    }


def directory(folder: Path, pool: concurrent.futures.Executor, count: int, rounds: int) -> dict[str, Any]:
    store = DirectoryStore(folder)
    requests = [stored(store, number) for number in range(count)]
    buffers = [memoryview(bytearray(wanted.chunk.nbytes)) for wanted in requests[0].wanted]

    def plain(wanted: Wanted, buffer: memoryview) -> int:
        record = wanted.chunk
        handle = os.open(folder / record.pack, os.O_RDONLY)
        try:
            count = os.preadv(handle, [buffer], record.offset)
        finally:
            os.close(handle)
        if count != record.nbytes or hashlib.sha256(buffer).hexdigest() != record.digest:
            raise RuntimeError("the plain read read something else")
        return count

    ways: dict[str, Way] = {
        PLAIN: lambda request: sum(pool.map(plain, request.wanted, buffers)),
        FETCH: fetching(store, pool),
    }
    return in_turns(ways, requests, rounds)


def s3_ways(server: Seaweed, store: ObjectStore, pool: concurrent.futures.Executor, prefix: str,
            pack_bytes: Sequence[int]) -> dict[str, Way]:  # fmt: skip
    """Each read of whole objects twice: as it is, and with what it read hashed."""
    from boto3.s3.transfer import TransferConfig

    plain, transferring = boto(server.endpoint, max_pool_connections=32), boto(server.endpoint, max_pool_connections=32)
    buffers = [memoryview(bytearray(nbytes)) for nbytes in pack_bytes]

    def ours(key: str, buffer: memoryview) -> memoryview:
        store.get_into(key, 0, buffer)
        return buffer

    def boto3(key: str, buffer: memoryview) -> bytes:
        return bytes(plain.get_object(Bucket=BUCKET, Key=f"{prefix}/{key}")["Body"].read())

    def s3transfer(config: TransferConfig) -> Callable[[str, memoryview], memoryview]:
        def one(key: str, buffer: memoryview) -> memoryview:
            sink = io.BytesIO()
            transferring.download_fileobj(BUCKET, f"{prefix}/{key}", sink, Config=config)
            return sink.getbuffer()

        return one

    def every(one: Callable[[str, memoryview], Any], checked: bool) -> Way:
        def read(pack: tuple[str, int, str], buffer: memoryview) -> int:
            key, nbytes, digest = pack
            found = one(key, buffer)
            if len(found) != nbytes or (checked and hashlib.sha256(found).hexdigest() != digest):
                raise RuntimeError(f"{key} was read as something else")
            return nbytes

        return lambda request: sum(pool.map(read, request.packs, buffers))

    kinds: dict[str, Callable[[str, memoryview], Any]] = {
        STORE: ours,
        "boto3 get_object": boto3,
        "s3transfer, defaults": s3transfer(TransferConfig()),
        "s3transfer, one request": s3transfer(TransferConfig(use_threads=False, multipart_threshold=1 << 30)),
    }
    try:
        import obstore
        from obstore.store import S3Store

        rust = S3Store(BUCKET, endpoint=server.endpoint, access_key_id=ADMIN.access_key, region="us-east-1",
                       secret_access_key=ADMIN.secret_key, virtual_hosted_style_request=False,
                       client_options={"allow_http": True})  # fmt: skip
        kinds["obstore get"] = lambda key, buffer: memoryview(obstore.get(rust, f"{prefix}/{key}").bytes())
        kinds["obstore get_range"] = lambda key, buffer: memoryview(
            obstore.get_range(rust, f"{prefix}/{key}", start=0, length=len(buffer))
        )
    except ImportError:
        report.console.print("obstore is not installed and left out")
    return {
        FETCH: fetching(store, pool),
        **{name: every(one, False) for name, one in kinds.items()},
        **{name + CHECKED: every(one, True) for name, one in kinds.items() if name != STORE},
    }


def s3(folder: Path, pool: concurrent.futures.Executor, count: int, rounds: int) -> dict[str, Any]:
    os.environ.update(ADMIN.environ())
    with Seaweed(folder) as server:
        store = open_store(server.uri("bench"))
        requests = [stored(store, number) for number in range(count)]
        sizes = [nbytes for _, nbytes, _ in requests[0].packs]
        found = in_turns(s3_ways(server, store, pool, "bench", sizes), requests, rounds)
        store.close()
        return found


def compared(results: dict[str, Any], ours: str, peers: Sequence[str], aim: float, what: str) -> tuple[float, bool]:
    best = max(peers, key=lambda way: float(results[way]["median_gb_s"]))
    share = results[ours]["median_gb_s"] / results[best]["median_gb_s"]
    return share, report.verdict(f"{what}: at least {aim:.0%}", share >= aim, f"{share:.1%} of {best}")


def main(quick: bool) -> bool:
    count, rounds = (1, 9) if quick else (4, 15)
    results: dict[str, Any] = {"request_bytes": 0, "requests": count, "rounds": rounds, "readers": READERS}
    with (
        tempfile.TemporaryDirectory(prefix="stoker-bench-") as name,
        concurrent.futures.ThreadPoolExecutor(READERS) as pool,
    ):
        results["directory"] = directory(Path(name) / "objects", pool, count, rounds)
        try:
            results["s3"] = s3(Path(name) / "seaweed", pool, count, rounds)
        except (NotInstalled, ImportError) as error:
            results["s3"], results["s3_skipped"] = {}, str(error)
    for title in ("directory", "s3"):
        rows = [[way, *speed.values()] for way, speed in results[title].items()]
        report.table(f"Reads, {title}", ["way", "median GB/s", "best GB/s", "CPU s/GB"], rows)
    share, held = compared(results["directory"], FETCH, [PLAIN], DIRECTORY_AIM, "chunks from a directory")
    results["directory_share"], verdicts = share, [held]
    if results["s3"]:
        bare = [way for way in results["s3"] if way not in (FETCH, STORE) and not way.endswith(CHECKED)]
        for key, ours, peers, what in (
            ("s3_share", STORE, bare, "bytes from S3"),
            ("s3_checked_share", FETCH, [way + CHECKED for way in bare], "chunks from S3, checked"),
        ):
            results[key], held = compared(results["s3"], ours, peers, S3_AIM, what)
            verdicts.append(held)
        results["s3_chunks_beside_unchecked"], _ = compared(
            results["s3"], FETCH, bare, 0.0, "chunks from S3, checked, beside bytes nobody checks"
        )
    else:
        report.console.print(f"S3 is left out: {results['s3_skipped']}")
    report.save("store_reads", results)
    return all(verdicts)


if __name__ == "__main__":
    import sys

    raise SystemExit(not main("--quick" in sys.argv))
