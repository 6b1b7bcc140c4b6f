"""What writing KV behind costs a running stream: CPU time of copying, hashing and storing against the engine's own.

The engine and its writer in this process, one stream and eight at once, everything counted in CPU time of threads, so
that what else the machine does hardly matters (it does a little: threads that wait for each other spin). Counted are
the whole request, its prompt's KV included, and by itself what follows once every stream has its first token.
Limits: a directory store on this machine; SmolLM2 in float32 (the most KV per token of its dtypes), a tiny model where
SmolLM2 cannot be fetched.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from function_runtime.engine.output import StepOutput
from function_runtime.kv.chunk import ChunkHead
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.writer import KvWriter, Pending
from function_runtime.protocol import KvChunk
from model_loader.objects import DirectoryStore
from tests.benchmarks import report
from tests.function_runtime.engine.support import Checkpoint, make_work, prepare_checkpoint
from tests.support.checkpoints import make_tiny_llama
from tests.support.smollm2 import NotFetched, gguf

LIMIT = 0.03


def checkpoint_in(folder: Path, small: bool = False) -> tuple[str, Checkpoint]:
    try:
        if not small:
            return "SmolLM2-135M", prepare_checkpoint(gguf(), folder)
    except (NotFetched, OSError) as error:
        report.console.print(f"SmolLM2 is left out: {error}")
    return "a tiny model", prepare_checkpoint(make_tiny_llama(folder / "tiny", layers=4, hidden=256), folder)


@dataclass(slots=True)
class Spent:
    """Counted so far, microseconds of CPU time."""

    whole_us: float = 0.0
    copying_us: float = 0.0
    storing_us: float = 0.0
    tokens: int = 0
    nbytes: int = 0

    def since(self, before: Spent) -> dict[str, float]:
        tokens = self.tokens - before.tokens
        copying, storing = self.copying_us - before.copying_us, self.storing_us - before.storing_us
        engine = self.whole_us - before.whole_us - copying - storing
        return {
            "tokens": tokens,
            "stored_bytes_per_token": (self.nbytes - before.nbytes) / tokens,
            "engine_us_per_token": engine / tokens,
            "copying_us_per_token": copying / tokens,
            "storing_us_per_token": storing / tokens,
            "share": (copying + storing) / engine,
        }


def measure(checkpoint: Checkpoint, store: DirectoryStore, tokens: int, at_once: int) -> dict[str, dict[str, float]]:
    engine = checkpoint.engine(kv_bytes=512 << 20, threads=0)
    identity = KvIdentity("c" * 64, engine.kv_layout, "", "bench")
    stored: list[KvChunk] = []
    writer = KvWriter(lambda: store, lambda told, dropped: stored.extend(c for _, chunks in told for c in chunks))
    works = [
        make_work(checkpoint.prompt(256, seed), f"r{seed}", max_tokens=tokens, ignore_eos=True)
        for seed in range(at_once)
    ]
    chains = {work.request_id: Chain(identity, work.kv_scope) for work in works}
    known = {work.request_id: list(work.prompt) for work in works}
    for work in works:
        engine.submit(work)
    copying_ns = produced = 0
    begin_ns = time.process_time_ns()

    def spent() -> Spent:
        writer.flush(60)
        whole_us = (time.process_time_ns() - begin_ns) / 1e3
        return Spent(whole_us, copying_ns / 1e3, writer.counts.cpu_us, produced, writer.counts.nbytes)

    streaming: Spent | None = None
    while engine.has_work:
        if streaming is None and all(len(known[work.request_id]) > len(work.prompt) for work in works):
            streaming = spent()
        step: StepOutput = engine.step()
        for made in step.tokens:
            known[made.request_id] += [event.token_id for event in made.events]
            produced += len(made.events)
        copy_ns = time.thread_time_ns()
        for sealed in step.sealed:
            name = sealed.request_id
            chain, all_tokens = chains[name], known[name]
            head = ChunkHead(
                identity, "tenant", chain.at(all_tokens, sealed.start), chain.at(all_tokens, sealed.end),
                sealed.start, sealed.end, tuple(all_tokens[sealed.start : sealed.end]),
            )  # fmt: skip
            data = engine.export_kv(name, sealed.choice, sealed.start, sealed.end)
            raw = data.contiguous().flatten().view(torch.uint8).numpy().data
            writer.put(Pending(name, sealed.choice, head, raw, is_wanted=lambda: True))
        copying_ns += time.thread_time_ns() - copy_ns
    end = spent()
    writer.close()
    if streaming is None or not stored:
        raise RuntimeError("nothing was measured")
    return {"with its prompt": end.since(Spent()), "streaming": end.since(streaming)}


def main(quick: bool) -> bool:
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        folder = Path(name)
        model, checkpoint = checkpoint_in(folder)
        for at_once in (1, 8):
            store = DirectoryStore(folder / f"objects-{at_once}")
            found = measure(checkpoint, store, 40 if quick else 256, at_once)
            results |= {f"{at_once} at once, {part}": figures for part, figures in found.items()}
    columns = list(next(iter(results.values())))
    rows = [[name, *found.values()] for name, found in results.items()]
    report.table(f"Write-behind on {model}, float32, 256-token prompts, CPU time", ["what", *columns], rows)
    report.save("kv_cost", {"model": model, **results})
    worst = max(results, key=lambda what: results[what]["share"])
    share = results[worst]["share"]
    return report.verdict(
        "write-behind costs at most 3 % of the engine's CPU time", share <= LIMIT, f"{share:.2%} ({worst})"
    )


if __name__ == "__main__":
    import sys

    raise SystemExit(not main("--quick" in sys.argv))
