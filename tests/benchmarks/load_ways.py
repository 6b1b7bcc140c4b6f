"""What the parts of the benchmark of loading share: plain reads, one load of ours, rounds of theirs."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from function_runtime.agent.loaders import MODULE, loader_environment
from model_loader.chunks import CHUNK_BYTES
from model_loader.file_memory import make_huge
from model_loader.forms.order import FormOrder
from model_loader.manifest import Manifest
from model_loader.ranges.peer import PeerAddress
from model_loader.ranges.source import RangeSource
from model_loader.recipe import prepare
from tests.benchmarks import peers, report

PEER_TIMEOUT_S = 900.0
LOOK_S = 0.3


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
    bench: Bench, manifest: Manifest, *, recycle: Path | None = None, sources: Sequence[RangeSource] = ()
) -> tuple[float, float, Path]:
    """Seconds until loaded, seconds more until sealed, and the form. In this process; see `load_as_a_slot`."""
    out = bench.pool / f"{secrets.token_hex(8)}.prepared"
    marks: list[float] = []
    begin = time.perf_counter()
    prepare(
        manifest, "bfloat16", out, recycle=recycle, sources=sources,
        on_complete=lambda: marks.append(time.perf_counter()),
    )  # fmt: skip
    return marks[0] - begin, time.perf_counter() - marks[0], out


class Loader:
    """The process that a slot has waiting, as the agent starts it."""

    def __init__(self) -> None:
        self.origin = ""
        """Where what it loaded came from."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "bench"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=loader_environment(),
        )
        self._wait_imported()

    def _wait_imported(self) -> None:
        """Until it has used the processor and does so no more: it waits for its order."""
        path, before = Path(f"/proc/{self._process.pid}/stat"), 0
        while True:
            time.sleep(LOOK_S)
            used = sum(map(int, path.read_text().rpartition(")")[2].split()[11:13]))
            if used == before > 0:
                return
            before = used

    def load(
        self,
        manifest: Manifest,
        out: Path,
        recycle: Path | None,
        *,
        peers: tuple[PeerAddress, ...] = (),
        pool_key: str = "",
    ) -> tuple[float, float]:
        """Seconds from the order until loaded, and more until sealed and named."""
        said, told = self._process.stdin, self._process.stdout
        assert said is not None and told is not None
        order = FormOrder(
            str(manifest.path), "bfloat16", str(out), recycle=str(recycle or ""), peers=peers, pool_key=pool_key
        )
        landed_s = 0.0
        begin = time.perf_counter()
        said.write(order.to_bytes() + b"\n")
        said.close()
        for line in told:
            event = json.loads(line)
            if event["event"] == "error":
                raise RuntimeError(event["message"])
            if event.get("stage") == "landed":
                landed_s = time.perf_counter()
            self.origin = str(event.get("origin", self.origin))
        done_s = time.perf_counter()
        self._process.wait()
        return landed_s - begin, done_s - landed_s


def load_as_a_slot(bench: Bench, manifest: Manifest, recycle: Path | None = None) -> tuple[float, float, Path]:
    out = bench.pool / f"{secrets.token_hex(8)}.prepared"
    return *Loader().load(manifest, out, recycle), out


def ours(bench: Bench, manifest: Manifest, before: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"fresh": [], "reused": [], "seal": []}
    for _ in range(bench.rounds):
        loader = Loader()
        form = bench.pool / f"{secrets.token_hex(8)}.prepared"
        before()
        found["fresh"].append(loader.load(manifest, form, None)[0])
        make_huge(form)  # as its agent does once nobody waits, where small pages were quicker had
        loader, retired = Loader(), form
        form = bench.pool / f"{secrets.token_hex(8)}.prepared"
        before()
        seconds, seal_s = loader.load(manifest, form, retired)
        found["reused"].append(seconds)
        found["seal"].append(seal_s)
        form.unlink()
    return found


def theirs(
    bench: Bench, way: str, paths: Sequence[str], memory: str, env: dict[str, str] | None = None, *, rounds: int = 0
) -> list[float]:
    """`rounds`: the bench's, where it is 0. Raises LookupError where the peer is not there or cannot do it."""
    python = peers.python()
    if python is None:
        raise LookupError("no peers: see tests.benchmarks.peers")
    script = Path(__file__).with_name("load_peers.py")
    done = subprocess.run(
        [str(python), str(script), way, str(rounds or bench.rounds), memory, *paths],
        capture_output=True, text=True, check=False, timeout=PEER_TIMEOUT_S, env={**os.environ, **(env or {})},
    )  # fmt: skip
    if done.returncode != 0:
        raise LookupError(f"{way}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return [float(s) for s in json.loads(done.stdout.splitlines()[-1])["seconds"]]


def rate(nbytes: int, seconds: Sequence[float]) -> float:
    return nbytes / report.median(seconds) / 1e9
