"""Chunks read from object stores: a directory against plain read and checksum, S3 against boto3, obstore, s3transfer.

Ways take turns, round after round, over the same bytes, each filling memory that the reader hands on. A way's figure is
its best round: what else runs on the machine only ever slows. The directory's chunks are read as a resume reads them
(into a buffer, digest, header, every layer's checksum); "plain" is `pread` into the same buffer and one SHA-256, the
digest that the format demands. S3 is SeaweedFS on this machine, so that its own work on these cores is in every figure
alike; objects are read whole, by as many at once as a replica reads.
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
from pathlib import Path
from typing import Any

from function_runtime.engine_like import KvLayout
from function_runtime.kv.checksum import crc32c
from function_runtime.kv.chunk import ChunkHead, encode_chunk, open_chunk
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.pack import build_pack
from model_loader.objects import DirectoryStore, ObjectStore, open_store
from tests.benchmarks import report
from tests.support.seaweed import ADMIN, BUCKET, NotInstalled, Seaweed, boto

MIB = 1024 * 1024
READERS = 4
DIRECTORY_AIM, S3_AIM = 0.80, 0.90
LAYOUT = KvLayout(num_layers=16, kv_heads=4, head_dim=64, dtype="bfloat16", block_size=16)
CHUNK_TOKENS, CHUNKS_A_PACK = 256, 4
"""16 KiB a token, 4 MiB a chunk, 16 MiB a pack."""

Way = Callable[[], int]
"""Reads everything once and gives the bytes."""


class Chunks:
    """Packs of chunks in a store, with what a reader knows of them."""

    def __init__(self, store: ObjectStore, packs: int) -> None:
        identity = KvIdentity(checkpoint="c" * 64, layout=LAYOUT, rope="{}", engine_format="bench")
        self.known: list[tuple[str, int, int, str, ChunkHead]] = []
        self.packs: list[tuple[str, int]] = []
        for number in range(packs):
            tokens = tuple(range(number, number + CHUNK_TOKENS * CHUNKS_A_PACK))
            chain = Chain(identity, "bench")
            encoded = []
            for start in range(0, len(tokens), CHUNK_TOKENS):
                end = start + CHUNK_TOKENS
                ends = chain.at(tokens, start), chain.at(tokens, end)
                head = ChunkHead(identity, "bench", *ends, start, end, tokens[start:end])
                chunk = encode_chunk(head, memoryview(random.Random(number + start).randbytes(head.data_bytes)))
                encoded.append((head, chunk))
            pack = build_pack([(head.chain, chunk) for head, chunk in encoded])
            self.packs.append((pack.key, store.put(pack.key, *pack.parts, durable=False)))
            for (head, _), entry in zip(encoded, pack.entries, strict=True):
                self.known.append((pack.key, entry.offset, entry.nbytes, entry.digest, head))
        random.Random(5).shuffle(self.known)


def in_turns(ways: dict[str, Way], rounds: int) -> dict[str, dict[str, float]]:
    """GB/s of each over the rounds, and what it took of this process's CPU."""
    for way in ways.values():
        way()
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            begin_s, cpu_s = time.perf_counter(), time.process_time()
            nbytes = ways[name]()
            speeds[name].append(nbytes / (time.perf_counter() - begin_s) / 1e9)
            cpus[name].append((time.process_time() - cpu_s) / nbytes * 1e9)
    return {
        name: {
            "best_gb_s": max(speeds[name]),
            "median_gb_s": statistics.median(speeds[name]),
            "cpu_s_per_gb": min(cpus[name]),
        }
        for name in ways
    }


def directory(folder: Path, pool: concurrent.futures.Executor, packs: int, rounds: int) -> dict[str, Any]:
    store = DirectoryStore(folder)
    chunks = Chunks(store, packs)
    buffers = [memoryview(bytearray(known[2])) for known in chunks.known]

    def as_a_resume(index: int) -> int:
        pack, offset, nbytes, digest, head = chunks.known[index]
        store.get_into(pack, offset, buffers[index])
        open_chunk(buffers[index], digest, head)
        return nbytes

    def plain(index: int) -> int:
        pack, offset, nbytes, digest, _ = chunks.known[index]
        handle = os.open(folder / pack, os.O_RDONLY)
        try:
            count = os.preadv(handle, [buffers[index]], offset)
        finally:
            os.close(handle)
        if count != nbytes or hashlib.sha256(buffers[index]).hexdigest() != digest:
            raise RuntimeError("the plain read read something else")
        return nbytes

    def every(one: Callable[[int], int]) -> Way:
        return lambda: sum(pool.map(one, range(len(buffers))))

    def checked(index: int) -> int:
        """With both checksums that the format holds of these bytes."""
        nbytes = plain(index)
        layer_bytes = LAYOUT.nbytes_per_token * CHUNK_TOKENS // LAYOUT.num_layers
        first = nbytes - layer_bytes * LAYOUT.num_layers
        for at in range(first, nbytes, layer_bytes):
            crc32c(buffers[index][at : at + layer_bytes])
        return nbytes

    ways = {"plain read and SHA-256": plain, "plain read, SHA-256 and CRC32C": checked}
    return in_turns({**{n: every(w) for n, w in ways.items()}, "chunks from the directory": every(as_a_resume)}, rounds)


def s3_ways(server: Seaweed, store: ObjectStore, packs: Sequence[tuple[str, int]],
            pool: concurrent.futures.Executor, prefix: str) -> dict[str, Way]:  # fmt: skip
    from boto3.s3.transfer import TransferConfig

    plain, transferring = boto(server.endpoint, max_pool_connections=32), boto(server.endpoint, max_pool_connections=32)
    buffers = {key: memoryview(bytearray(nbytes)) for key, nbytes in packs}

    def ours(key: str) -> int:
        store.get_into(key, 0, buffers[key])
        return len(buffers[key])

    def boto3(key: str) -> int:
        return len(plain.get_object(Bucket=BUCKET, Key=f"{prefix}/{key}")["Body"].read())

    def s3transfer(config: TransferConfig) -> Callable[[str], int]:
        def one(key: str) -> int:
            sink = io.BytesIO()
            transferring.download_fileobj(BUCKET, f"{prefix}/{key}", sink, Config=config)
            return sink.tell()

        return one

    def every(one: Callable[[str], int]) -> Way:
        return lambda: sum(pool.map(one, [key for key, _ in packs]))

    ways = {
        "stoker": every(ours),
        "boto3 get_object": every(boto3),
        "s3transfer, defaults": every(s3transfer(TransferConfig())),
        "s3transfer, one request": every(s3transfer(TransferConfig(use_threads=False, multipart_threshold=1 << 30))),
    }
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        return ways
    rust = S3Store(BUCKET, endpoint=server.endpoint, access_key_id=ADMIN.access_key, region="us-east-1",
                   secret_access_key=ADMIN.secret_key, virtual_hosted_style_request=False,
                   client_options={"allow_http": True})  # fmt: skip

    def obstore_get(key: str) -> int:
        return len(obstore.get(rust, f"{prefix}/{key}").bytes())

    def obstore_range(key: str) -> int:
        return len(obstore.get_range(rust, f"{prefix}/{key}", start=0, length=len(buffers[key])))

    return {**ways, "obstore get": every(obstore_get), "obstore get_range": every(obstore_range)}


def s3(folder: Path, pool: concurrent.futures.Executor, packs: int, rounds: int) -> dict[str, Any]:
    os.environ.update(ADMIN.environ())
    with Seaweed(folder) as server:
        store = open_store(server.uri("bench"))
        chunks = Chunks(store, packs)
        found = in_turns(s3_ways(server, store, chunks.packs, pool, "bench"), rounds)
        store.close()
        return found


def main(quick: bool) -> bool:
    packs, rounds = (4, 5) if quick else (16, 15)
    results: dict[str, Any] = {"chunk_bytes": LAYOUT.nbytes_per_token * CHUNK_TOKENS, "packs": packs, "rounds": rounds}
    with (
        tempfile.TemporaryDirectory(prefix="stoker-bench-") as name,
        concurrent.futures.ThreadPoolExecutor(READERS) as pool,
    ):
        results["directory"] = directory(Path(name) / "objects", pool, packs, rounds)
        try:
            results["s3"] = s3(Path(name) / "seaweed", pool, packs, rounds)
        except (NotInstalled, ImportError) as error:
            results["s3"], results["s3_skipped"] = {}, str(error)
    for title in ("directory", "s3"):
        rows = [[way, *speed.values()] for way, speed in results[title].items()]
        report.table(f"Reads, {title}", ["way", "best GB/s", "median GB/s", "least CPU s/GB"], rows)
    by_directory = results["directory"]
    plain, ours = (by_directory[way]["best_gb_s"] for way in ("plain read and SHA-256", "chunks from the directory"))
    results["directory_share"] = ours / plain
    verdicts = [
        report.verdict(
            f"directory: at least {DIRECTORY_AIM:.0%} of a plain read and checksum", ours / plain >= DIRECTORY_AIM,
            f"{ours / plain:.0%}",
        )
    ]  # fmt: skip
    if results["s3"]:
        peers = {way: speed["best_gb_s"] for way, speed in results["s3"].items() if way != "stoker"}
        best = max(peers, key=lambda way: peers[way])
        share = results["s3"]["stoker"]["best_gb_s"] / peers[best]
        results |= {"s3_share": share, "s3_best_peer": best}
        verdicts.append(
            report.verdict(
                f"S3: at least {S3_AIM:.0%} of the best of boto3, obstore and s3transfer", share >= S3_AIM,
                f"{share:.0%} of {best}",
            )
        )  # fmt: skip
    else:
        report.console.print(f"S3 is left out: {results['s3_skipped']}")
    report.save("store_reads", results)
    return all(verdicts)


if __name__ == "__main__":
    import sys

    raise SystemExit(not main("--quick" in sys.argv))
