"""What lossy forms of a stored prefix cost and save: bytes, CPU time, and how much the model's word changes.

A text is continued by teacher forcing after a prefix whose KV was stored in a form and loaded again: perplexity of what
follows, how often the likeliest token is the one that raw KV gives, and how far KV is from what computing gives (which
the shadow compares). Also one turn later, where the prefix was itself computed after a lossy one. Limits: one text
(this project's own documentation); SmolLM2 in float32, or a tiny model, whose figures say nothing about quality.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from function_runtime.engine.attention.interface import Rows
from function_runtime.engine.engine import Engine
from function_runtime.engine.shadow import LOSSY_TOLERANCES, lossy_difference
from function_runtime.kv.forms import FORMS, Form, chunk_nbytes, decode, encode
from tests.benchmarks import report
from tests.benchmarks.kv_cost import checkpoint_in

CHUNK: Final = 32
MAX_PERPLEXITY: Final = {"raw": 1.0001, "fp8": 1.02, "int4": 1.15}
"""Of what raw KV gives."""
TEXT: Final = Path(__file__).parents[2] / "docs" / "design.md"


@dataclass
class Measured:
    nll: float = 0.0
    tokens: int = 0
    agreed: int = 0
    worst_later: float = 0.0
    """Difference of KV that was computed after a lossy prefix and stored in the form again."""
    encode_us: float = 0.0
    decode_us: float = 0.0
    coded: int = 0
    """Tokens encoded and decoded."""
    shares: list[float] = field(default_factory=list)
    """Differences of the prefix's chunks, as the shadow counts them."""


class Continuation:
    """A model and blocks to compute in, without the engine around them."""

    def __init__(self, engine: Engine, tokens: list[int]) -> None:
        self._engine = engine
        self._tokens = tokens
        self._table = list(range(-(-len(tokens) // 16)))

    def compute(self, start: int, end: int) -> Tensor:
        """Logits of every position in [start, end), whose KV is in its blocks afterwards."""
        engine = self._engine
        attention = engine._runner._attention
        plan = attention.plan([], [Rows(start, end, self._table)])
        rows = torch.arange(end - start)
        with torch.inference_mode():
            logits = engine._runner._model.forward(
                torch.tensor(self._tokens[start:end]), torch.arange(start, end), attention, plan, rows, None
            )
        assert logits is not None
        return logits

    def read(self, start: int, end: int) -> Tensor:
        return self._engine._cache.read(self._table, start, end)

    def write(self, start: int, values: Tensor) -> None:
        self._engine._cache.write(self._table, start, values)

    def through(self, form: Form, start: int, end: int, measured: Measured) -> None:
        """KV of these positions stored in a form and loaded again."""
        layout = self._engine.kv_layout
        for at in range(start, end, CHUNK):
            raw = self.read(at, at + CHUNK)
            began_ns = time.thread_time_ns()
            stored = encode(form, layout, raw.flatten().view(torch.uint8).numpy().data)
            encoded_ns = time.thread_time_ns()
            loaded = decode(form, layout, CHUNK, stored)
            measured.decode_us += (time.thread_time_ns() - encoded_ns) / 1e3
            measured.encode_us += (encoded_ns - began_ns) / 1e3
            measured.coded += CHUNK
            self.write(at, torch.frombuffer(bytearray(loaded), dtype=raw.dtype).view(raw.shape))


def windows(tokens: list[int], size: int, count: int) -> Iterator[list[int]]:
    for index in range(min(count, len(tokens) // size)):
        yield tokens[index * size : (index + 1) * size]


def differences(run: Continuation, plain: Tensor, start: int, end: int) -> Iterator[float]:
    for at in range(start, end, CHUNK):
        yield lossy_difference(run.read(at, at + CHUNK), plain[:, :, at : at + CHUNK])


def measure(engine: Engine, tokens: list[int], prefix: int, results: dict[Form, Measured]) -> None:
    """Positions [0, prefix) are a system prompt, the rest is what follows it."""
    run = Continuation(engine, tokens)
    run.compute(0, prefix)
    reference = run.compute(prefix, len(tokens))
    plain = run.read(0, len(tokens))
    wanted = torch.tensor(tokens[prefix + 1 :])
    for form in FORMS:
        measured = results[form]
        run.write(0, plain)
        run.through(form, 0, prefix, measured)
        measured.shares += list(differences(run, plain, 0, prefix))
        logits = run.compute(prefix, len(tokens))
        measured.nll += float(torch.nn.functional.cross_entropy(logits[:-1], wanted, reduction="sum"))
        measured.tokens += len(wanted)
        measured.agreed += int((logits.argmax(-1) == reference.argmax(-1))[:-1].sum())
        end = len(tokens) // CHUNK * CHUNK
        run.through(form, prefix, end, measured)
        measured.worst_later = max(measured.worst_later, *differences(run, plain, prefix, end))


def main(quick: bool) -> bool:
    prefix, after, count = (256, 128, 1) if quick else (512, 256, 6)
    results: dict[Form, Measured] = {form: Measured() for form in FORMS}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        model, checkpoint = checkpoint_in(Path(name))
        engine = checkpoint.engine(kv_bytes=256 << 20, threads=0)
        tokens = list(checkpoint.tokenizer.encode(TEXT.read_text(), add_special_tokens=False))
        for window in windows(tokens, prefix + after, count):
            measure(engine, window, prefix, results)
        layout = engine.kv_layout
    raw = results["raw"]
    told: dict[str, dict[str, Any]] = {}
    for form, m in results.items():
        told[form] = {
            "bytes_per_token": chunk_nbytes(form, layout, CHUNK) / CHUNK,
            "of_float16": chunk_nbytes(form, layout, CHUNK) / (layout.nbytes_per_token * CHUNK / 2),
            "perplexity": float(torch.tensor(m.nll / m.tokens).exp()),
            "perplexity_ratio": float(torch.tensor((m.nll - raw.nll) / m.tokens).exp()),
            "same_top_1": m.agreed / m.tokens,
            "typical_difference": report.median(m.shares),
            "worst_difference": max(m.shares),
            "worst_a_turn_later": m.worst_later,
            "allowed": LOSSY_TOLERANCES.get(form, 0.0),
            "encode_us_per_token": m.encode_us / m.coded,
            "decode_us_per_token": m.decode_us / m.coded,
        }
    columns = list(told["raw"])
    rows = [[form, *found.values()] for form, found in told.items()]
    title = f"Stored prefixes of {model}: {prefix} tokens, then {after}, {raw.tokens} predicted"
    report.table(title, ["form", *columns], rows)
    report.save("kv_forms", {"model": model, "prefix": prefix, "after": after, "tokens": raw.tokens, **told})
    held = [
        report.verdict(
            f"perplexity after a {form} prefix",
            model == "a tiny model" or told[form]["perplexity_ratio"] <= most,
            f"{told[form]['perplexity_ratio']:.4f} times that of raw KV (at most {most}), "
            f"the same likeliest token in {told[form]['same_top_1']:.1%}",
        )
        for form, most in MAX_PERPLEXITY.items()
    ]
    held.append(
        report.verdict(
            "the shadow takes no sound chunk for a wrong one",
            all(max(f["worst_difference"], f["worst_a_turn_later"]) <= f["allowed"] for f in told.values()),
            ", ".join(f"{form} {max(f['worst_difference'], f['worst_a_turn_later']):.3f} of {f['allowed']:g}"
                      for form, f in told.items()),
        )
    )  # fmt: skip
    return all(held)


if __name__ == "__main__":
    import sys

    raise SystemExit(not main("--quick" in sys.argv))
