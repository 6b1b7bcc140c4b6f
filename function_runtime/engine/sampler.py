"""From logits to tokens: a pure function of the logits, the request's sampling and (seed, position, choice).

Order: logit bias, penalties, forbidden tokens and those the grammar does not allow, temperature, min-p, top-k, top-p;
then the inverse of the cumulative distribution, in vocabulary order, at the place `uniform` gives. Ties are kept in
order of token id. Log-probabilities are those of the model, before any of this. Limits: a row whose logits are not
numbers gets None, never a token; of the allowed tokens there must be one.
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

_CANDIDATES: Final = (256, 4096)
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
    allowed: Tensor | None = None
    """One bool per token of the vocabulary; None: the grammar does not mind, or there is none."""


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
    unfiltered: list[tuple[int, Tensor]] = []
    for index, row in enumerate(rows):
        if not sound[index] or (row.sampling.temperature == 0.0 and not _adjusts(row)):
            continue
        adjusted = _adjust(logits[index], row)
        if row.sampling.temperature == 0.0:
            chosen[index] = int(adjusted.argmax())
        elif _filters(row.sampling, logits.shape[1]):
            chosen[index] = _draw_filtered(adjusted, row)
        else:
            unfiltered.append((index, adjusted))
    if unfiltered:
        places = [index for index, _ in unfiltered]
        tokens = _draw(torch.stack([values for _, values in unfiltered]), [rows[index] for index in places])
        for index, token in zip(places, tokens, strict=True):
            chosen[index] = token
    return [
        _with_logprobs(logits[i], chosen[i], row.sampling.logprobs) if sound[i] else None for i, row in enumerate(rows)
    ]


def _filters(s: Sampling, vocabulary: int) -> bool:
    return 0 < s.top_k < vocabulary or s.top_p < 1.0


def _adjusts(row: Row) -> bool:
    s = row.sampling
    return bool(s.logit_bias or row.forbidden) or row.allowed is not None or _penalises(s)


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
    if row.allowed is not None:
        logits.masked_fill_(~row.allowed.to(device), -torch.inf)
    return logits


def _scale(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Temperature and min-p, on `[rows, vocabulary]`; the best of each row is at 0."""
    device = logits.device
    temperatures = torch.tensor([row.sampling.temperature for row in rows], dtype=logits.dtype, device=device)
    # NOTE: the maximum is taken off first, so that a temperature near zero overflows towards the best token only.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperatures.unsqueeze(1))
    if any(row.sampling.min_p > 0.0 for row in rows):
        floors = [math.log(row.sampling.min_p) if row.sampling.min_p > 0.0 else -math.inf for row in rows]
        floor = torch.tensor(floors, dtype=logits.dtype, device=device).unsqueeze(1)
        scaled.masked_fill_(scaled < floor, -torch.inf)
    return scaled


def _draw(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draws from whole distributions."""
    probabilities = torch.softmax(_scale(logits, rows), dim=-1)
    return _invert(probabilities.cumsum(dim=-1, dtype=torch.float64), rows)


def _invert(cumulative: Tensor, rows: Sequence[Row]) -> list[int]:
    """The place in each row at which the cumulative distribution passes what `uniform` gives."""
    chances = [uniform(row.sampling.seed, row.position, row.choice) for row in rows]
    total = cumulative[:, -1:].contiguous()
    targets = torch.tensor(chances, dtype=torch.float64, device=cumulative.device).unsqueeze(1) * total
    # NOTE: rounding may put a target on the total itself; the first place that reaches the total is meant then.
    places = torch.searchsorted(cumulative, targets, right=True)
    return torch.minimum(places, torch.searchsorted(cumulative, total)).squeeze(1).tolist()


def _draw_filtered(logits: Tensor, row: Row) -> int:
    """Draws from the most likely tokens: `top_k` of them, of those as many as reach `top_p`."""
    s = row.sampling
    scaled = _scale(logits.unsqueeze(0), [row]).squeeze(0)
    vocabulary = scaled.shape[0]
    if 0 < s.top_k < vocabulary:
        values, ids = _best(scaled, s.top_k)
        if s.top_p < 1.0:
            kept = _nucleus(torch.softmax(values, dim=-1), s.top_p) or len(values)
            values, ids = values[:kept], ids[:kept]
    else:
        values, ids = _reaching(scaled, s.top_p)
    ids, order = ids.sort()
    cumulative = values[order].exp().cumsum(dim=-1)
    return int(ids[_invert(cumulative.unsqueeze(0), [row])[0]])


def _reaching(scaled: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest of the most likely tokens that reach `top_p` together; at least one."""
    vocabulary = scaled.shape[0]
    whole = torch.logsumexp(scaled.double(), dim=-1)
    for count in (*(c for c in _CANDIDATES if c < vocabulary), vocabulary):
        values, ids = _best(scaled, count)
        kept = _nucleus((values - whole).exp(), top_p)
        if kept:
            return values[:kept], ids[:kept]
    return values, ids


def _best(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values (float64) and ids of the `count` best tokens, best first; of equal ones those with lower ids."""
    if count == scaled.shape[0]:
        values, ids = scaled.sort(descending=True, stable=True)
        return values.double(), ids
    values, ids = scaled.topk(count)
    threshold = values[-1]
    above = int((values > threshold).sum())
    ties = (scaled == threshold).nonzero().squeeze(-1)[: count - above]
    ids = torch.cat((ids[:above].sort().values, ties))
    values, order = scaled[ids].double().sort(descending=True, stable=True)
    return values, ids[order]


def _nucleus(probabilities: Tensor, top_p: float) -> int:
    """How many of these (best first) reach `top_p` together; 0: all of them do not."""
    total = probabilities.cumsum(dim=-1)
    return int(torch.searchsorted(total, top_p)) + 1 if float(total[-1]) >= top_p else 0


def _with_logprobs(logits: Tensor, token_id: int, count: int | None) -> Sampled:
    if count is None:
        return Sampled(token_id)
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        best = logprobs.topk(min(count, logprobs.shape[0]))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Sampled(token_id, float(logprobs[token_id]), top)
