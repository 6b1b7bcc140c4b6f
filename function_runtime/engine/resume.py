"""Where a request that was under way elsewhere can be taken up: how much of its stored KV is of use.

`usable(request, restored)` gives the prompt positions and the decode steps that need not be computed again. Prompt KV
counts up to a chunk boundary of the first attempt, generated KV up to the step that every choice still in play has
reached, and the last known token is always computed. Limits: pure; whether the bytes are right was checked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from function_runtime.engine.errors import InvalidWork
from function_runtime.engine.kv_cache import BLOCK_SIZE
from function_runtime.engine.output import Admitted
from function_runtime.engine.request import Request
from function_runtime.protocol import Work


@dataclass(frozen=True, slots=True)
class Usable:
    prompt: int
    steps: int
    """Decode steps; above 0 only where the whole prompt is covered."""


def usable(request: Request, lengths: Sequence[int]) -> Usable:
    if not lengths or lengths[0] <= 0:
        return Usable(0, 0)
    prompt = len(request.prompt)
    if lengths[0] < prompt or any(choice.finish is None and not choice.tokens for choice in request.choices):
        return Usable(_cut_back(request, min(lengths[0], prompt - 1)), 0)
    steps: int | None = None
    for choice in request.choices:
        length = lengths[choice.index] if choice.index < len(lengths) else 0
        stored = max(0, length - prompt)
        fed = len(choice.tokens) - 1
        """Generated tokens whose KV the first run had computed at least."""
        if choice.finish is not None and (stored >= fed or request.is_fast_resume):
            continue
        limit = max(0, min(stored, fed))
        steps = limit if steps is None else min(steps, limit)
    return Usable(prompt, steps or 0)


def _cut_back(request: Request, length: int) -> int:
    """The last place at or before `length` from which the recorded passes can be followed."""
    if request.follows:
        return request.schedule.cut_back(length)
    # What is taken of a pass is taken by blocks (see `Passes.block_aligned`).
    return length // BLOCK_SIZE * BLOCK_SIZE


def check_restored(request: Request, lengths: Sequence[int], starts: Sequence[int]) -> None:
    """Refuses KV that leaves a hole: positions a choice lacks before its tensors must be choice 0's prompt."""
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        reach = 0 if index == 0 else min(lengths[0], len(request.prompt))
        if start < 0 or (start > reach and start < length):
            raise InvalidWork(
                f"stored KV of choice {index} of {request.request_id} begins at {start}, after a hole from {reach}"
            )


def admitted(request: Request, stored: Usable, kind: str) -> Admitted:
    """How a request is carried on, and whether that gives the bits of its first attempt; if not, why."""
    work = request.work
    longest = max(len(choice.tokens) for choice in request.choices)
    loaded = stored.prompt + stored.steps
    resumed = bool(work.produced or work.prefill_ends)
    if not resumed:
        return Admitted(work.request_id, work.epoch, loaded, 0, exact=True, detail=_prefix_of(work) if loaded else "")
    recomputed = max(0, len(request.prompt) + longest - loaded)
    detail = _inexact(request, stored, recomputed, kind)
    return Admitted(work.request_id, work.epoch, loaded, recomputed, exact=not detail, detail=detail)


def _inexact(request: Request, stored: Usable, recomputed: int, kind: str) -> str:
    work = request.work
    first = work.begun.computed_by
    if first and first != kind:
        return f"the first attempt was computed by {first}, this one by {kind}"
    if request.is_fast_resume:
        return "fast mode: computed again in chunks of its own" if recomputed > 1 else ""
    if not work.prefill_ends:
        return "the first attempt's prefill schedule is not known"
    if stored.prompt < (known := request.schedule.loaded_until):
        return f"the {work.prefix_form} prefix of {known} positions that it began on is not to be had"
    if stored.prompt < (known := request.schedule.repeatable_from):
        return f"how the first {known} positions, taken from a prefix cache, were computed is not known"
    return ""


def _prefix_of(work: Work) -> str:
    return "a stored prefix" if work.prefix_form == "raw" else f"a stored prefix in the form {work.prefix_form}"
