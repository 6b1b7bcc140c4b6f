"""Reads damaged headers and says what became of each: refused with one of the package's own errors, or accepted.

What is accepted is looked at again: every tensor within the file, none over another, as many bytes as its shape needs.
Anything else (another exception, more memory than a header may take, no answer) is a finding, with the seed.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import shutil
import signal
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_loader.block_types import BLOCKS
from model_loader.description import Description
from model_loader.directory_checkpoint import describe_directory
from model_loader.errors import LoaderError
from model_loader.gguf_checkpoint import describe_gguf
from model_loader.safetensors_format import INDEX_NAME, find_files, read_file, read_safetensors
from tests.support.mutations import gguf_places, mutate_gguf, mutate_index, mutate_safetensors

PEAK_BYTES = 64 * 1024 * 1024
"""The most that a header of under a megabyte may take, as the interpreter counts it."""
SPARE_BYTES = 256 * 1024 * 1024
"""How much more address space a process may take while it reads such headers."""
HANG_S = 20


@dataclass
class Outcome:
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    longest_s: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.accepted + sum(self.refused.values()) + len(self.findings)


class Fuzz:
    """`kind`: gguf | safetensors | index."""

    def __init__(self, kind: str, folder: Path, source: Path, gguf: Path) -> None:
        self.kind = kind
        folder.mkdir(parents=True)
        if kind == "gguf":
            content = gguf.read_bytes()
            end, places = gguf_places(content)
            path = folder / "m.gguf"
            self._make: Callable[[random.Random], bytes] = lambda chance: mutate_gguf(content, end, places, chance)
            self.read: Callable[[], None] = lambda: check_places(describe_gguf(path))
        else:
            shutil.copytree(source, folder, dirs_exist_ok=True)
            path = folder / "model.safetensors"
            names = [entry.name for entry in read_file(path, 0)]
            index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, path.name)}).encode()
            content = path.read_bytes() if kind == "safetensors" else index
            if kind == "index":
                path = folder / INDEX_NAME
            mutate = mutate_safetensors if kind == "safetensors" else mutate_index
            self._make = lambda chance: mutate(content, chance)

            def read() -> None:
                # What stands beside the header is read only where the header is believed: it takes most of the time.
                read_safetensors(folder, find_files(folder))
                check_places(describe_directory(folder))

            self.read = read
        path.write_bytes(content)
        self.read()
        self._path = path

    def run(self, seeds: range, outcome: Outcome, *, traced: bool = False) -> None:
        for seed in seeds:
            self._path.write_bytes(self._make(random.Random(f"{self.kind}/{seed}")))
            if traced:
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
            started = time.perf_counter()
            try:
                with _bounded():
                    self.read()
                outcome.accepted += 1
            except LoaderError as error:
                outcome.refused[type(error).__name__] += 1
                if len(str(error)) > 4000:
                    outcome.findings.append(f"{self.kind} seed {seed}: a message of {len(str(error))} characters")
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome.findings.append(f"{self.kind} seed {seed}: {type(error).__name__}: {str(error)[:300]}")
            passed_s = time.perf_counter() - started
            outcome.seconds.append(passed_s)
            outcome.longest_s = max(outcome.longest_s, passed_s)
            if traced:
                peak = tracemalloc.get_traced_memory()[1] - before
                outcome.peak_bytes = max(outcome.peak_bytes, peak)
                if peak > PEAK_BYTES:
                    outcome.findings.append(f"{self.kind} seed {seed}: {peak} bytes of memory")


def check_places(description: Description) -> None:
    """Everything the description says can be read from the files, nothing twice."""
    sizes = [path.stat().st_size for path in description.files]
    ends: dict[int, int] = {}
    for entry in sorted(description.tensors, key=lambda t: (t.file, t.offset)):
        values = 1
        for size in entry.shape:
            values *= size
        block, nbytes = BLOCKS[entry.dtype]
        assert values % block == 0 and values // block * nbytes == entry.nbytes, f"{entry}: bytes and shape differ"
        assert ends.get(entry.file, 0) <= entry.offset, f"{entry} overlaps another"
        ends[entry.file] = entry.offset + entry.nbytes
        assert ends[entry.file] <= sizes[entry.file], f"{entry} ends beyond its file of {sizes[entry.file]} bytes"


@contextmanager
def limited_memory() -> Iterator[None]:
    """Whoever asks for more than `SPARE_BYTES` gets a MemoryError; it costs nothing."""
    gc.collect()  # what is collected meanwhile would be room
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Hung(Exception):
    """No answer within `HANG_S`."""


@contextmanager
def _bounded() -> Iterator[None]:
    def hung(*_: Any) -> None:
        raise Hung(f"no answer in {HANG_S} s")

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
