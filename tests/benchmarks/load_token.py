"""Zero to the first token while the weights arrive, beside loading first and prefilling then."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

from function_runtime.engine.engine import Engine
from function_runtime.protocol import EngineOptions, Sampling, Work
from model_loader.checkpoint_files import local_source
from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.progress import Progress
from model_loader.ranges.source import RangeSource
from model_loader.recipe import prepare
from model_loader.tokenizer import Tokenizer
from tests.benchmarks import report
from tests.benchmarks.load_ways import Bench, load, size

TOKEN_SHARE = 0.65
PROMPT_TOKENS = 16
"""Products in bfloat16 are slow on CPUs without instructions for it."""


class Throttled:
    """A source that gives so many bytes a second."""

    def __init__(self, inner: RangeSource, bytes_s: float) -> None:
        self._inner = inner
        self._bytes_s = bytes_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        self.name, self.tier, self.range_bytes, self.threads = inner.name, inner.tier, inner.range_bytes, inner.threads

    def size(self, file: str) -> int:
        return self._inner.size(file)

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        count = self._inner.read_into(file, offset, view, within_s=within_s)
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + count / self._bytes_s
            wait_s = self._free_s - now_s
        time.sleep(max(0.0, wait_s))
        return count


def first_token(bench: Bench, manifest: Manifest) -> tuple[dict[str, Any], list[bool]]:
    """From nothing to the first token while the weights arrive, beside loading first and prefilling then; the source
    gives its bytes in about the time of the prefill."""
    _, _, form = load(bench, manifest)
    prefill_s = min(_token_s(manifest, PreparedFile.open(form, verify=False)) for _ in range(2))
    form.unlink()
    with local_source(manifest, bench.pool) as local:

        def throttled() -> Throttled:
            return Throttled(local, size(manifest) / prefill_s)

        begin = time.perf_counter()
        load_s, _, form = load(bench, manifest, sources=[throttled()])
        _token_s(manifest, PreparedFile.open(form, verify=False))
        in_turn_s = time.perf_counter() - begin
        forms: list[PreparedFile] = []
        mappable = threading.Event()

        def hear(progress: Progress) -> None:
            if progress.stage == "arriving":
                forms.append(PreparedFile.open_arriving(Path(progress.path)))
                mappable.set()

        out = bench.pool / f"{secrets.token_hex(8)}.prepared"
        begin = time.perf_counter()
        loading = threading.Thread(
            target=lambda: prepare(manifest, "bfloat16", out, hear, recycle=form, sources=[throttled()])
        )
        loading.start()
        mappable.wait()
        _token_s(manifest, forms[0])
        together_s = time.perf_counter() - begin
        loading.join()
    out.unlink()
    share = together_s / in_turn_s
    found = {"prefill_s": prefill_s, "load_s": load_s, "in_turn_s": in_turn_s, "together_s": together_s, "share": share}
    report.table("Zero to the first token, throttled source", ["what", "s"], list(found.items()))
    return found, [
        report.verdict(
            f"first token: at most {TOKEN_SHARE:g} of load-then-prefill", share <= TOKEN_SHARE, f"{share:.2f}"
        )
    ]


def _token_s(manifest: Manifest, form: PreparedFile) -> float:
    """Builds an engine on the form and computes one token after a prompt."""
    tokenizer = Tokenizer.load(manifest.directory)
    begin = time.perf_counter()
    options = EngineOptions(kv_bytes=256 << 20, step_tokens=PROMPT_TOKENS, prefix_cache=False, dtype="bfloat16")
    engine = Engine.load(form, manifest.config, tokenizer, manifest.eos_token_ids, options)
    prompt = tuple(10 + number % 400 for number in range(PROMPT_TOKENS))
    engine.submit(Work("r", 1, "t", "t", prompt, Sampling(seed=1, max_tokens=1, temperature=0.0), write_kv=False))
    while engine.has_work:
        if engine.step().tokens:
            break
    return time.perf_counter() - begin
