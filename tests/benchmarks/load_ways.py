"""What the parts of the benchmark of loading share: plain reads, one load of ours, rounds of theirs."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from model_loader.chunks import CHUNK_BYTES
from model_loader.manifest import Manifest
from model_loader.ranges.source import RangeSource
from model_loader.recipe import prepare
from model_loader.retired import Retired
from tests.benchmarks import peers, report

PEER_TIMEOUT_S = 900.0


class Bench:
    """Files, a folder in shared memory for forms, and the figures found."""

    def __init__(self, folder: Path, pool: Path, rounds: int) -> None:
        self.folder = folder
        self.pool = pool
        self.rounds = rounds
        self.threads = len(os.sched_getaffinity(0))


def shards(manifest: Manifest) -> list[Path]:
    return [Path(file.path) for file in manifest.files]


def size(manifest: Manifest) -> int:
    return sum(path.stat().st_size for path in shards(manifest))


def warm(paths: Sequence[Path]) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop(paths: Sequence[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def plain_read(paths: Sequence[Path], threads: int, flags: int = 0) -> float:
    """Seconds of `threads` that pread 4 MiB at a time, each into one buffer of its own."""
    handles = [os.open(path, os.O_RDONLY | flags) for path in paths]
    places = iter([(h, at) for h in handles for at in range(0, os.fstat(h).st_size, CHUNK_BYTES)])
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            os.preadv(place[0], [buffer], place[1])

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - begin
    for handle in handles:
        os.close(handle)
    return took


def load(
    bench: Bench, manifest: Manifest, *, recycle: Path | Retired | None = None, sources: Sequence[RangeSource] = ()
) -> tuple[float, float, Path]:
    """Seconds until loaded, seconds more until sealed, and the form."""
    out = bench.pool / f"{secrets.token_hex(8)}.prepared"
    marks: list[float] = []
    begin = time.perf_counter()
    prepare(
        manifest, "bfloat16", out, recycle=recycle, sources=sources,
        on_complete=lambda: marks.append(time.perf_counter()),
    )  # fmt: skip
    return marks[0] - begin, time.perf_counter() - marks[0], out


def ours(bench: Bench, manifest: Manifest, before: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"fresh": [], "reused": [], "seal": []}
    for _ in range(bench.rounds):
        before()
        seconds, seal_s, form = load(bench, manifest)
        found["fresh"].append(seconds)
        retired = Retired(form)
        retired.populate()  # as whoever waits for the next load would have done
        before()
        seconds, seal_s, form = load(bench, manifest, recycle=retired)
        found["reused"].append(seconds)
        found["seal"].append(seal_s)
        form.unlink()
    return found


def theirs(bench: Bench, way: str, paths: Sequence[str], memory: str, env: dict[str, str] | None = None) -> list[float]:
    """Raises LookupError where the peer is not there or cannot do it."""
    python = peers.python()
    if python is None:
        raise LookupError("no peers: see tests.benchmarks.peers")
    script = Path(__file__).with_name("load_peers.py")
    done = subprocess.run(
        [str(python), str(script), way, str(bench.rounds), memory, *paths],
        capture_output=True, text=True, check=False, timeout=PEER_TIMEOUT_S, env={**os.environ, **(env or {})},
    )  # fmt: skip
    if done.returncode != 0:
        raise LookupError(f"{way}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return [float(s) for s in json.loads(done.stdout.splitlines()[-1])["seconds"]]


def rate(nbytes: int, seconds: Sequence[float]) -> float:
    return nbytes / report.median(seconds) / 1e9
