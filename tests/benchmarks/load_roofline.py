"""What copying alone reaches: bytes of the page cache into memory that a replica can map.

    python -m tests.benchmarks.load_roofline ROUNDS bare|digested fresh|reused FOLDER PATH...    seconds, as JSON

The copy is the loader's own, in its own environment: two threads, 512 KiB at a time out of a mapping of the file, huge
pages where the memory is fresh. `bare`: out of a mapping that is entered beforehand, nothing verified; no loader that
copies is faster. `digested`: the mapping is entered as the bytes are needed, and they are digested behind the copy; no
loader that verifies so is faster. Limits: neither opens, plans, counts or tells anything.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from function_runtime.agent.loaders import loader_environment
from model_loader.chunks import CHUNK_BYTES
from model_loader.file_memory import address_of, copy, enter_for_reading, map_file
from model_loader.form_memory import FormMemory
from model_loader.ranges.local import MAPPED_BYTES


def only_copied(paths: Sequence[Path], rounds: int, how: str, memory: str, folder: Path) -> list[float]:
    """Seconds, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.load_roofline", str(rounds), how, memory, str(folder)]
    told = subprocess.run(
        [*command, *map(str, paths)], check=True, capture_output=True, text=True, env=loader_environment()
    )
    return [float(seconds) for seconds in json.loads(told.stdout)]


def copy_once(sources: Sequence[memoryview], target: FormMemory, threads: int, *, digests: bool) -> float:
    begins, at = [], 0
    for source in sources:
        begins.append(at)
        at += len(source)
    pieces = iter(
        [(s, begin, o) for s, begin in zip(sources, begins, strict=True) for o in range(0, len(s), CHUNK_BYTES)]
    )
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            source, begin, offset = piece
            state = xxhash.xxh3_128()
            part = source[offset : offset + CHUNK_BYTES]
            view = target.view(begin + offset, len(part))
            copy(view, part, MAPPED_BYTES, state.update if digests else lambda _: None)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begin_s = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin_s


def main() -> None:
    rounds, how, memory, folder, paths = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:]
    threads, digests = len(os.sched_getaffinity(0)), how == "digested"
    handles = [os.open(path, os.O_RDONLY) for path in paths]
    nbytes = sum(os.fstat(handle).st_size for handle in handles)
    sources: list[memoryview] = []
    seconds: list[float] = []
    kept: FormMemory | None = None
    for _ in range(rounds + (memory == "reused")):
        if kept is None or memory == "fresh":
            kept = None  # its memory is given back before other is taken
            target = folder / f"{secrets.token_hex(8)}.roofline"
            handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            target.unlink()
            os.ftruncate(handle, nbytes)
            kept = FormMemory(target, handle, nbytes)
            os.close(handle)
        if digests or not sources:
            sources = [map_file(handle, os.fstat(handle).st_size) for handle in handles]
        if not digests:
            for source in sources:
                enter_for_reading(address_of(source), len(source))
        seconds.append(copy_once(sources, kept, threads, digests=digests))
    print(json.dumps(seconds[memory == "reused" :]))


if __name__ == "__main__":
    main()
