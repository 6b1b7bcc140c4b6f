"""Which KV may be written behind now: whole chunks as they are completed, the tail when prefill or a choice ends.

The prompt is choice 0's; other choices begin with the chunk that holds the prompt's end. Limits: says ranges only;
their bytes are copied by whoever drives the engine, before the next step.
"""

from __future__ import annotations

from function_runtime.engine.output import SealedRange
from function_runtime.engine.request import Choice, Request


def begin(request: Request, choice: Choice, chunk_tokens: int, stored: int) -> None:
    """Nothing before `stored` (restored KV) is written again; of a shared prompt only the chunk at its end is."""
    shared = 0 if choice.index == 0 else len(request.prompt)
    choice.sealed = max(choice.sealed, max(stored, shared) // chunk_tokens * chunk_tokens)


def complete(request: Request, choice: Choice, chunk_tokens: int) -> list[SealedRange]:
    """Chunks that were completed since the last call."""
    ranges: list[SealedRange] = []
    while choice.computed - choice.sealed >= chunk_tokens:
        end = choice.sealed + chunk_tokens
        ranges.append(_range(request, choice, choice.sealed, end, partial=False))
        choice.sealed = end
    return ranges


def tail(request: Request, choice: Choice) -> list[SealedRange]:
    """What is computed beyond the last complete chunk."""
    if choice.computed <= choice.sealed:
        return []
    return [_range(request, choice, choice.sealed, choice.computed, partial=True)]


def _range(request: Request, choice: Choice, start: int, end: int, *, partial: bool) -> SealedRange:
    passes = choice.passes.upto(end)
    return SealedRange(request.request_id, request.work.epoch, choice.index, start, end, partial, passes)
