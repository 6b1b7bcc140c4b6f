"""Output against transformers in float32, teacher-forced: whole and chunked prefill, decode, alone and batched.

Each sequence the engine made is forced through the reference at once; every step's logits are compared. A choice counts
as wrong only where the reference itself prefers its best token by more than the tolerance.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from function_runtime.engine import step
from function_runtime.engine.sampler import Row, Sampled, sample
from tests.benchmarks import report
from tests.function_runtime.engine.support import (
    LLAMA2,
    LLAMA3,
    Checkpoint,
    make_work,
    prepare_checkpoint,
    run_many,
)
from tests.function_runtime.engine.test_reference import load_reference
from tests.support.checkpoints import make_tiny_llama
from tests.support.smollm2 import gguf as gguf_file

TOLERANCE = 1e-3


def compare(checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], tokens: int, step_tokens: int) -> dict[str, Any]:
    """Largest difference of a logit, and greedy choices that differ although the reference's margin is clear."""
    seen: dict[tuple[int, ...], Tensor] = {}

    def spy(logits: Tensor, rows: Sequence[Row]) -> list[Sampled | None]:
        for row, values in zip(rows, logits, strict=True):
            seen[(*row.prompt, *row.generated)] = values.clone()
        return sample(logits, rows)

    step.sample = spy
    try:
        works = [make_work(p, f"r{i}", max_tokens=tokens, ignore_eos=True) for i, p in enumerate(prompts)]
        transcripts = run_many(checkpoint.engine(step_tokens=step_tokens, threads=2), works)
    finally:
        step.sample = sample
    model, worst, wrong, steps = load_reference(checkpoint.source), 0.0, 0, 0
    for transcript, prompt in zip(transcripts, prompts, strict=True):
        known = [*prompt, *transcript.tokens()]
        with torch.no_grad():
            expected = model(torch.tensor([known])).logits[0]
        for index, token in enumerate(transcript.tokens()):
            position, steps = len(prompt) + index, steps + 1
            logits = seen[tuple(known[:position])]
            worst = max(worst, (logits - expected[position - 1]).abs().max().item())
            best = expected[position - 1].topk(2).values
            wrong += bool(best[0] - best[1] > TOLERANCE and token != int(expected[position - 1].argmax()))
    return {"steps": steps, "max_abs_difference": worst, "wrong_choices": wrong}


def main(quick: bool) -> bool:
    tokens, rows, results = (8, 2, []) if quick else (32, 8, [])
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        folder = Path(name)
        checkpoints = {
            "SmolLM2 (GGUF Q4_1)": prepare_checkpoint(gguf_file(), folder / "smol"),
            "tiny Llama 2": prepare_checkpoint(make_tiny_llama(folder / "two" / "m", **LLAMA2), folder / "two"),
            "tiny Llama 3": prepare_checkpoint(make_tiny_llama(folder / "three" / "m", **LLAMA3), folder / "three"),
        }
        for model, checkpoint in checkpoints.items():
            for batch in (1, rows):
                for step_tokens in (512, 48):
                    prompts = [checkpoint.prompt(117 - 7 * i, seed=i) for i in range(batch)]
                    found = compare(checkpoint, prompts, tokens, step_tokens)
                    results.append({"model": model, "at_once": batch, "step_tokens": step_tokens, **found})
    columns = ["model", "at once", "step tokens", "steps", "largest difference", "wrong greedy choices"]
    table = [[*list(r.values())[:4], f"{r['max_abs_difference']:.2e}", r["wrong_choices"]] for r in results]
    report.table("Logits against transformers, float32", columns, table)
    report.save("output", {"results": results})
    worst = max(r["max_abs_difference"] for r in results)
    holds = worst < TOLERANCE and not any(r["wrong_choices"] for r in results)
    return report.verdict("logits within 1e-3, greedy choices equal", holds, f"{worst:.2e}")


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
