"""A request inside the engine: its choices, what is known of each, and what has been computed.

A choice's tokens are *known* when they are in its list, whether sampled here, taken from the log of an earlier
attempt, or kept over a preemption; positions are *computed* when their KV is in its blocks. A step computes the next
position and samples only where the token after it is not known yet: fresh run, resume and recomputation are one
mechanism, and all choices of a request move in lock-step as in the first run. Limits: no tensors but restored KV on
its way in.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from function_runtime.engine.kv_cache import BLOCK_SIZE
from function_runtime.engine.prefix import Chain
from function_runtime.passes import ALONE, NONE, Passes, recorded, with_steps
from function_runtime.protocol import Begun, FinishReason, Work
from model_loader.tokenizer import Detokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from function_runtime.engine.grammar import Guide
    from function_runtime.engine.restoring import Pieces
    from function_runtime.kv.arrival import Arrival


class Phase(enum.Enum):
    """`WAITING -> PREFILL -> DECODE -> ENDED`; preemption takes `PREFILL` and `DECODE` back to `WAITING`."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Choice:
    __slots__ = (
        "allowed", "blocks", "chain", "computed", "detokenizer", "finish", "guide", "index", "passes", "published",
        "sealed", "tokens",
    )  # fmt: skip

    def __init__(self, index: int, detokenizer: Detokenizer, chain: Chain) -> None:
        self.index = index
        self.tokens: list[int] = []
        """Generated and known."""
        self.blocks: list[int] = []
        self.computed = 0
        """Positions (prompt first) whose KV is in the blocks."""
        self.passes: Passes = NONE
        """How the computed positions were."""
        self.finish: FinishReason | None = None
        self.detokenizer = detokenizer
        self.chain = chain
        self.published = 0
        """Complete blocks that were offered to the prefix cache."""
        self.sealed = 0
        """KV up to here needs no further writing behind."""
        self.guide: Guide | None = None
        """Its place in the request's grammar, where there is one."""
        self.allowed: Tensor | None = None
        """What the next token may be, by the guide and what else bears on it."""


class Request:
    __slots__ = (
        "arrival", "cached_tokens", "choices", "incoming", "limit", "loaded_tokens", "phase", "prompt", "rehearsals",
        "rehearsed", "restored",
        "schedule", "seq", "taken", "told_schedule", "work",
    )  # fmt: skip

    def __init__(self, work: Work, arrival: int, limit: int, choices: list[Choice]) -> None:
        self.work = work
        self.arrival = arrival
        self.prompt: list[int] = list(work.prompt)
        self.limit = limit
        """Generated tokens per choice at most: what was asked for, or what the context holds."""
        self.choices = choices
        self.phase = Phase.WAITING
        self.seq = len(work.produced)
        """Place of the last token in the log."""
        self.schedule: Passes = NONE
        """Prefill so far, that of whoever computed what was cached first. Given by an earlier attempt or kept over a
        preemption, it is followed to its end; then prefill is free, and recorded."""
        self.taken = 0
        """Where the part of the schedule ends that others ran."""
        self.told_schedule = False
        self.rehearsals: list[tuple[int, Passes]] = []
        """Sources of the schedule that are to be computed before it, from position 0 on, the first of them now; blocks
        hold theirs meanwhile."""
        self.rehearsed: dict[tuple[int, Passes], Tensor] = {}
        """What was taken of those that are through: KV from a position on."""
        self.begin_schedule()
        self.cached_tokens = 0
        """Prompt positions that this attempt did not compute."""
        self.restored: Pieces | None = None
        self.incoming: Arrival | None = None
        """Stored KV behind the part of the prompt that is computed meanwhile."""
        self.loaded_tokens = 0
        """Positions whose KV came from the store."""

    def begin_schedule(self) -> None:
        """That of the first attempt; a resume in the fast mode makes one of its own."""
        ends = () if self.is_fast_resume else self.work.prefill_ends
        self.schedule = recorded(ends, self.work.begun.passes).block_aligned(BLOCK_SIZE)
        self.taken = ends[0] if ends else 0

    def begin_on(self, passes: Passes) -> None:
        """What others computed is where a first attempt begins, or goes on."""
        self.schedule = passes
        self.taken = passes.end

    def told(self, kind: str) -> tuple[tuple[int, ...], Begun]:
        """The schedule as the journal keeps it: where it was begun and the ends of its own passes; those of others
        before, and what computed."""
        ends = [upto for upto, _ in self.schedule.parts if upto > self.taken]
        return (self.taken, *ends), Begun(self.schedule.upto(self.taken).numbers, kind)

    @property
    def followed(self) -> Passes:
        """What prefill follows now."""
        return self.rehearsals[0][1] if self.rehearsals else self.schedule

    @property
    def follows(self) -> bool:
        """It has a schedule to follow: that of an attempt before."""
        return bool(self.work.prefill_ends) and not self.is_fast_resume

    def passes_of(self, length: int) -> Passes:
        """How the first `length` positions of a choice are computed where the schedule is followed."""
        if self.schedule.end < min(length, len(self.prompt)):
            return self.schedule.with_unknown(length)
        lengths = [(len(choice.tokens), choice.finish is not None) for choice in self.choices]
        return with_steps(self.schedule, lengths, length)

    @property
    def is_fast_resume(self) -> bool:
        return self.work.fast and bool(self.work.produced)

    @property
    def request_id(self) -> str:
        return self.work.request_id

    @property
    def ended(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def lags(self, choice: Choice) -> bool:
        """Known tokens are to be computed that were generated one by one: in the fast mode by chunks of prefill."""
        return self.is_fast_resume and choice.computed - len(self.prompt) < len(choice.tokens) - 1

    def takes_part(self, choice: Choice) -> bool:
        """Whether the next decode step computes a position of `choice`: it lives, or is replayed to its end."""
        if choice.finish is not None and self.is_fast_resume:
            return False
        return choice.finish is None or max(0, choice.computed - len(self.prompt)) < len(choice.tokens) - 1

    def participants(self) -> list[Choice]:
        return [choice for choice in self.choices if self.takes_part(choice)]

    def participants_after(self, steps: int) -> list[Choice]:
        """Those that go on after `steps` restored decode steps."""
        return [c for c in self.choices if c.finish is None or (not self.is_fast_resume and steps < len(c.tokens) - 1)]

    def known(self, choice: Choice) -> list[int]:
        """Every known token of a choice, the prompt's included."""
        return self.prompt + choice.tokens

    def next_chunk(self, budget: int) -> tuple[int, int, bool]:
        """The prefill that comes next: (what of it counts, where its rows end, whether it is one decode row). A
        recorded pass is not cut, whatever the budget. A chunk of no record ends where stored KV begins."""
        computed = self.choices[0].computed
        part = self.followed.part_at(computed)
        end = len(self.prompt)
        if part is not None:
            _, end, how = part
            if isinstance(how, Passes):
                raise RuntimeError(f"what was taken up to {end} was not laid down for {self.request_id}")
            if how > 0:
                return end, how, False
            if how == ALONE:
                return computed + 1, computed + 1, True
        end = min(end, computed + budget)
        if self.incoming is not None:
            end = self.incoming.pass_end(computed, end)
        return end, end, False

    def chunk_done(self, upto: int, end: int) -> None:
        if upto > self.schedule.end:
            self.schedule = self.schedule.with_pass(upto, end)

    def forget_stored(self) -> None:
        """Stored KV that is still on its way will not be looked at."""
        self.restored = None
        if self.incoming is not None:
            self.incoming.abandon()
            self.incoming = None

    def rewind(self) -> None:
        """Nothing is computed any more; what is known stays, and so does the schedule it was made with."""
        self.phase = Phase.WAITING
        self.forget_stored()
        self.rehearsals, self.rehearsed = [], {}
        for choice in self.choices:
            choice.blocks = []
            choice.computed = 0
            choice.passes = NONE
            choice.published = 0
