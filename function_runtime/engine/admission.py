"""From the work asked for to a request the scheduler can take: checks, and what the log says is known already.

Limits: says whether this engine can serve it at all; when it is served is the scheduler's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from function_runtime.engine.errors import ContextExceeded, InvalidWork
from function_runtime.engine.kv_cache import BLOCK_SIZE
from function_runtime.engine.prefix import Chain
from function_runtime.engine.request import Choice, Request
from function_runtime.engine.scheduler import blocks_for
from function_runtime.protocol import Sampling, Work
from model_loader.tokenizer import Detokenizer, Tokenizer

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Bounds:
    vocab_size: int
    max_context: int
    total_blocks: int


def needed_blocks(prompt: int, limit: int, n: int) -> int:
    """Of a request alone. NOTE: one block more than it needs by itself, so that alone it always fits and preemption
    ends."""
    return prompt // BLOCK_SIZE + n * (blocks_for(prompt + limit) - prompt // BLOCK_SIZE) + 2


def admit(work: Work, arrival: int, bounds: Bounds, tokenizer: Tokenizer) -> Request:
    prompt = len(work.prompt)
    _check_prompt(work, bounds)
    _check_sampling(work.sampling, bounds)
    limit = min(work.sampling.max_tokens, bounds.max_context - prompt)
    n = work.sampling.n
    needed = needed_blocks(prompt, limit, n)
    if needed > bounds.total_blocks:
        raise ContextExceeded(
            f"{prompt} prompt tokens and {n} x {limit} generated tokens need {needed} KV blocks, this replica has "
            f"{bounds.total_blocks}: ask for fewer tokens or raise kv_bytes"
        )
    stop = work.sampling.stop
    choices = [Choice(i, Detokenizer(tokenizer, stop), Chain(work.kv_scope, BLOCK_SIZE)) for i in range(n)]
    _replay(work, choices, bounds)
    if work.prefill_ends and (work.prefill_ends[-1] > prompt or sorted(work.prefill_ends) != list(work.prefill_ends)):
        raise InvalidWork(f"prefill_ends of {work.request_id} do not lie in the prompt of {prompt} tokens")
    return Request(work, arrival, limit, choices)


def _replay(work: Work, choices: list[Choice], bounds: Bounds) -> None:
    """Brings tokens, endings and text of every choice to where the log ends."""
    for event in work.produced:
        if not (0 <= event.choice < len(choices) and 0 <= event.token_id < bounds.vocab_size):
            raise InvalidWork(f"the log of {work.request_id} holds choice {event.choice}, token {event.token_id}")
        choice = choices[event.choice]
        if choice.finish is not None:
            raise InvalidWork(f"the log of {work.request_id} goes on after the end of choice {event.choice}")
        choice.tokens.append(event.token_id)
        choice.finish = event.finish
        if event.finish is None:
            choice.detokenizer.push(event.token_id)


def _check_prompt(work: Work, bounds: Bounds) -> None:
    if not work.prompt:
        raise InvalidWork("the prompt holds no tokens")
    if not all(0 <= token < bounds.vocab_size for token in work.prompt):
        raise InvalidWork(f"the prompt holds token ids outside the vocabulary of {bounds.vocab_size}")
    if len(work.prompt) >= bounds.max_context:
        raise ContextExceeded(
            f"the prompt holds {len(work.prompt)} tokens, the context {bounds.max_context} (at least one of them "
            "for the answer): shorten the prompt"
        )


def _check_sampling(s: Sampling, bounds: Bounds) -> None:
    numbers = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    checks = {
        "seed": 0 <= s.seed < 2**63,
        "max_tokens": s.max_tokens >= 1,
        "min_tokens": s.min_tokens >= 0,
        "n": 1 <= s.n <= MAX_CHOICES,
        "temperature": s.temperature >= 0.0,
        "top_k": s.top_k >= 0,
        "top_p": 0.0 < s.top_p <= 1.0,
        "min_p": 0.0 <= s.min_p <= 1.0,
        "repetition_penalty": s.repetition_penalty > 0.0,
        "logprobs": s.logprobs is None or 0 <= s.logprobs <= bounds.vocab_size,
        "stop": all(s.stop),
        "stop_token_ids": all(0 <= token < bounds.vocab_size for token in s.stop_token_ids),
        "logit_bias": all(0 <= t < bounds.vocab_size and math.isfinite(b) for t, b in s.logit_bias.items()),
    }
    for name, sound in checks.items():
        if not sound or not all(map(math.isfinite, numbers)):
            raise InvalidWork(f"sampling parameter {name} is out of range" if not sound else "a parameter is no number")
