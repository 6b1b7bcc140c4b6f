"""From logits to tokens: a pure function of the logits, the request's sampling and (seed, position, choice).

Order: logit bias, forbidden tokens, penalties, temperature, min-p, top-k, top-p; then the inverse of the cumulative
distribution, in vocabulary order, at the place `uniform` gives. Ties are kept in order of token id. Log-probabilities
are those of the model, before any of this. Limits: a row whose logits are not numbers gets None, never a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from function_runtime.engine.uniform import uniform
from function_runtime.protocol import Sampling

_CANDIDATES: Final = 256
"""Most likely tokens looked at first for top-p; the whole vocabulary is sorted only where they do not suffice."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is known about the token to be chosen."""

    sampling: Sampling
    choice: int
    position: int
    """Its place in the sequence, prompt included."""
    prompt: Sequence[int]
    generated: Sequence[int]
    forbidden: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled | None]:
    """One token per row of `logits` (float32, `[rows, vocabulary]`)."""
    best, greedy = logits.max(dim=-1)
    chosen: list[int] = greedy.tolist()
    sound: list[bool] = best.isfinite().tolist()
    for index, row in enumerate(rows):
        if not sound[index]:
            continue
        adjusted = _adjust(logits[index], row)
        if row.sampling.temperature > 0.0:
            chosen[index] = _draw(adjusted, row)
        elif _adjusts(row):
            chosen[index] = int(adjusted.argmax())
    return [
        _with_logprobs(logits[i], chosen[i], row.sampling.logprobs) if sound[i] else None for i, row in enumerate(rows)
    ]


def _adjusts(row: Row) -> bool:
    s = row.sampling
    return bool(s.logit_bias or row.forbidden) or _penalises(s)


def _penalises(s: Sampling) -> bool:
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def _adjust(logits: Tensor, row: Row) -> Tensor:
    """Bias, forbidden tokens and penalties, on a copy where there are any."""
    if not _adjusts(row):
        return logits
    s = row.sampling
    logits = logits.clone()
    device = logits.device
    if s.logit_bias:
        ids = torch.tensor(list(s.logit_bias), dtype=torch.int64, device=device)
        logits[ids] += torch.tensor(list(s.logit_bias.values()), dtype=logits.dtype, device=device)
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.generated}), dtype=torch.int64, device=device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if row.generated and (s.presence_penalty != 0.0 or s.frequency_penalty != 0.0):
        counts = Counter(row.generated)
        ids = torch.tensor(list(counts), dtype=torch.int64, device=device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=device)
        logits[ids] -= s.frequency_penalty * times + s.presence_penalty
    if row.forbidden:
        logits[torch.tensor(list(row.forbidden), dtype=torch.int64, device=device)] = -torch.inf
    return logits


def _draw(logits: Tensor, row: Row) -> int:
    s = row.sampling
    # NOTE: the maximum is taken off first, so that a temperature near zero overflows towards the best token only.
    scaled = (logits - logits.max()) / s.temperature
    if s.min_p > 0.0:
        scaled = scaled.masked_fill(scaled < math.log(s.min_p), -torch.inf)
    vocabulary = scaled.shape[0]
    if 0 < s.top_k < vocabulary:
        scaled = _keep(scaled, s.top_k)
    probabilities = torch.softmax(scaled, dim=-1)
    if s.top_p < 1.0:
        probabilities = torch.softmax(_keep(scaled, _nucleus(probabilities, s.top_p)), dim=-1)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    target = uniform(s.seed, row.position, row.choice) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    # NOTE: rounding may put the target on the total itself; the last token with any probability is meant then.
    return index if index < vocabulary else int(probabilities.nonzero()[-1])


def _keep(values: Tensor, count: int) -> Tensor:
    """Everything but the `count` largest set to minus infinity; of equal ones those with lower ids stay."""
    threshold = values.topk(count).values[-1]
    above = values > threshold
    ties = (values == threshold).nonzero().squeeze(-1)
    keep = above
    keep[ties[: count - int(above.sum())]] = True
    return values.masked_fill(~keep, -torch.inf)


def _nucleus(probabilities: Tensor, top_p: float) -> int:
    """How many of the most likely tokens reach `top_p` together; at least one."""
    size = probabilities.shape[0]
    for count in (min(_CANDIDATES, size), size):
        total = probabilities.topk(count).values.cumsum(dim=-1, dtype=torch.float64)
        if float(total[-1]) >= top_p:
            return int(torch.searchsorted(total, top_p)) + 1
    return size


def _with_logprobs(logits: Tensor, token_id: int, count: int | None) -> Sampled:
    if count is None:
        return Sampled(token_id)
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        best = logprobs.topk(min(count, logprobs.shape[0]))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Sampled(token_id, float(logprobs[token_id]), top)
