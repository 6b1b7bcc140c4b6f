"""What the next step computes: decode rows of everything under way, then prefill chunks within a token budget.

Requests are served in order of arrival. When blocks run out the youngest running request is preempted: it gives up its
blocks and computes its known tokens again later, by the same schedule. Limits: decides and allocates, computes nothing;
a prompt is admitted only when its blocks are there, one at a time, without overtaking.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Final

from function_runtime.engine.blocks import BlockPool
from function_runtime.engine.kv_cache import BLOCK_SIZE, KvCache
from function_runtime.engine.request import Choice, Phase, Request
from function_runtime.engine.resume import Usable, usable
from function_runtime.passes import NONE, Passes

MIN_CHUNK_TOKENS: Final = 64
"""Prefill advances by this much even where decode rows use the budget up; smaller remainders of a budget wait."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A pass over [start, end) of which [start, upto) counts: more rows only give it the shape it had before."""

    request: Request
    choice: Choice
    start: int
    upto: int
    end: int
    is_step: bool = False
    """One position, computed as a decode step does."""

    @property
    def of_prompt(self) -> bool:
        return self.upto <= len(self.request.prompt)

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Schedule:
    decodes: list[tuple[Request, list[Choice]]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy before the step, (source, destination)."""
    admitted: list[Request] = field(default_factory=list)
    """Requests whose blocks are there; restored KV is to be written into them before the step."""


class Scheduler:
    def __init__(self, pool: BlockPool, max_requests: int, step_tokens: int, prefix_cache: bool) -> None:
        self.pool = pool
        self.max_requests = max_requests
        self.step_tokens = step_tokens
        self.prefix_cache = prefix_cache
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """Both in order of arrival."""
        self.preemptions = 0

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Takes a request out, whatever it is doing; its blocks are free at once."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.free(request)
        request.forget_stored()
        request.phase = Phase.ENDED

    def free(self, request: Request) -> None:
        for choice in request.choices:
            self.free_choice(choice)

    def free_choice(self, choice: Choice) -> None:
        self.pool.release(choice.blocks)
        choice.blocks = []

    def schedule(self) -> Schedule:
        plan = Schedule()
        budget = self.step_tokens
        for request in list(self.running):
            if request.phase is Phase.DECODE:
                participants = request.participants()
                if any(request.lags(choice) for choice in participants):
                    budget -= self._catch_up(request, participants, budget, plan)
                elif self._grow(request, participants, plan):
                    plan.decodes.append((request, participants))
                    budget -= len(participants)
        budget = max(budget, min(self.step_tokens, MIN_CHUNK_TOKENS))
        for request in list(self.running):
            if request.phase is Phase.PREFILL and not _is_held_up(request):
                budget -= self._chunk(request, budget, plan)
        while self.waiting and len(self.running) < self.max_requests and budget > 0:
            request = self.waiting[0]
            if not self._admit(request):
                break
            self.waiting.pop(0)
            insort(self.running, request, key=_arrival)
            plan.admitted.append(request)
            if request.phase is Phase.PREFILL and not _is_held_up(request):
                budget -= self._chunk(request, budget, plan)
        return plan

    def _catch_up(self, request: Request, participants: list[Choice], budget: int, plan: Schedule) -> int:
        """Known tokens after the prompt in chunks, every choice's by itself; gives the tokens they take."""
        taken = 0
        for choice in participants:
            start = choice.computed
            end = min(len(request.prompt) + len(choice.tokens) - 1, start + max(budget - taken, MIN_CHUNK_TOKENS))
            if end <= start or (taken and taken >= budget):
                continue
            shared = self._needs_block(choice) and start // BLOCK_SIZE < len(choice.blocks)
            if not self._make_room(request, blocks_for(end) - len(choice.blocks) + shared):
                return taken
            if shared:
                self._own_block(choice, plan)
            self._extend(choice, blocks_for(end))
            plan.chunks.append(Chunk(request, choice, start, end, end))
            taken += end - start
        return taken

    def _grow(self, request: Request, participants: list[Choice], plan: Schedule) -> bool:
        """Gives every participant a block of its own for its next position; False: `request` itself was preempted."""
        needing = [choice for choice in participants if self._needs_block(choice)]
        if not self._make_room(request, len(needing)):
            return False
        for choice in needing:
            index = choice.computed // BLOCK_SIZE
            if index == len(choice.blocks):
                choice.blocks.append(self.pool.allocate(choice.blocks[-1] if choice.blocks else None))
            elif self.pool.shared(choice.blocks[index]):
                self._own_block(choice, plan)
        return True

    def _make_room(self, request: Request, blocks: int) -> bool:
        while blocks > self.pool.available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _own_block(self, choice: Choice, plan: Schedule) -> None:
        """A block of its own for the choice's next position, instead of one it shares."""
        index = choice.computed // BLOCK_SIZE
        source = choice.blocks[index]
        choice.blocks[index] = self.pool.allocate(choice.blocks[index - 1] if index else None)
        self.pool.release((source,))
        plan.copies.append((source, choice.blocks[index]))

    def _needs_block(self, choice: Choice) -> bool:
        index = choice.computed // BLOCK_SIZE
        return index == len(choice.blocks) or self.pool.shared(choice.blocks[index])

    def _preempt(self, request: Request) -> None:
        # NOTE: only requests that this step has not planned yet are preempted, because decode rows are planned oldest
        # first and the youngest is taken.
        self.free(request)
        request.rewind()
        self.running.remove(request)
        self.add(request)
        self.preemptions += 1

    def _chunk(self, request: Request, budget: int, plan: Schedule) -> int:
        """Plans the request's next prefill chunk if it fits; gives the tokens it takes. A recorded chunk that is larger
        than the budget goes as a step's only one, or it would wait for ever."""
        start = request.choices[0].computed
        remaining = len(request.prompt) - start
        if budget < min(remaining, MIN_CHUNK_TOKENS, self.step_tokens):
            return 0
        upto, end, is_step = request.next_chunk(budget)
        if end - start > budget and plan.chunks:
            return 0
        plan.chunks.append(Chunk(request, request.choices[0], start, upto, end, is_step))
        return end - start

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request its prompt's blocks (and those of restored steps) if they are there."""
        stored = usable(request, request.restored.lengths) if request.restored else Usable(0, 0)
        found, passes = ([], Passes.unknown(stored.prompt)) if stored.prompt else self._cached_blocks(request)
        prompt = len(request.prompt)
        complete = stored.prompt == prompt
        participants = request.participants_after(stored.steps)
        # NOTE: room for what is known already is asked for, because a preempted request that came back without it
        # would be the next to be preempted again.
        longest = max(len(choice.tokens) for choice in request.choices)
        own = blocks_for(prompt + longest) - prompt // BLOCK_SIZE if longest else 0
        need = blocks_for(prompt) - len(found) + own * len(participants)
        if need >= self.pool.available - self.pool.idle_among(found):
            return False
        if not stored.prompt:
            request.restored = None
        first = request.choices[0]
        for block in found:
            self.pool.hold(block)
        first.blocks = list(found)
        self._extend(first, blocks_for(prompt))
        first.published = len(found)
        first.computed = start = stored.prompt or len(found) * BLOCK_SIZE
        request.loaded_tokens = stored.prompt + stored.steps
        first.passes = passes
        if not request.schedule.parts:
            request.begin_on(passes)
        if start < request.schedule.taken_until:
            request.rehearsals = request.schedule.sources()
        if not request.told_schedule:
            # What a preempted request finds of its own is not what was spared it.
            request.cached_tokens = start if stored.prompt else min(start, request.taken)
        request.phase = Phase.PREFILL
        if complete:
            self._take_up(request, participants, stored.steps)
        return True

    def retreat(self, request: Request) -> None:
        """What a running request was given is not to be used: it is taken out, to begin as if it had just come."""
        self.free(request)
        request.rewind()
        if not request.told_schedule:
            request.begin_schedule()
        self.running.remove(request)

    def clear(self, cache: KvCache, request: Request) -> None:
        """Overwrites the blocks that nobody else holds."""
        blocks = {block for choice in request.choices for block in choice.blocks}
        cache.clear([b for b in blocks if sum(b in c.blocks for c in request.choices) == self.pool.holders(b)])

    def land(self, request: Request, stored: Usable, passes: Passes) -> None:
        """Prefill has met stored KV, of which the prompt's part is of these passes: it goes on where that ends."""
        first, prompt = request.choices[0], len(request.prompt)
        request.loaded_tokens += stored.prompt - first.computed
        if not request.told_schedule:
            request.cached_tokens += stored.prompt - first.computed
        first.computed, first.passes = stored.prompt, passes
        if stored.prompt > request.schedule.end:
            request.begin_on(passes)
        if stored.prompt < prompt:
            return
        steps = stored.steps
        need = len(request.participants_after(steps)) * (blocks_for(prompt + steps) - prompt // BLOCK_SIZE)
        if need > self.pool.available:
            steps = 0
        request.loaded_tokens += steps
        self._take_up(request, request.participants_after(steps), steps)

    def _take_up(self, request: Request, participants: list[Choice], steps: int) -> None:
        """The prompt is restored, and `steps` decode steps of every participant."""
        first = request.choices[0]
        self.fork(request, participants)
        if first not in participants:
            self.free_choice(first)
        prompt = len(request.prompt)
        for choice in participants if steps else ():
            if prompt % BLOCK_SIZE and self.pool.shared(choice.blocks[-1]):
                self.pool.release((choice.blocks.pop(),))
            self._extend(choice, blocks_for(prompt + steps))
        for choice in request.choices:
            choice.computed = prompt + steps

    def fork(self, request: Request, participants: list[Choice]) -> None:
        """Prefill is complete: every participant goes on from the first choice's blocks."""
        first = request.choices[0]
        request.phase = Phase.DECODE
        for choice in request.choices:
            choice.computed, choice.passes = first.computed, first.passes
            if choice is first or choice not in participants:
                continue
            for block in first.blocks:
                self.pool.hold(block)
            choice.blocks = list(first.blocks)
            choice.published = first.published
            choice.chain = first.chain.fork()

    def _extend(self, choice: Choice, blocks: int) -> None:
        while len(choice.blocks) < blocks:
            choice.blocks.append(self.pool.allocate(choice.blocks[-1] if choice.blocks else None))

    def _cached_blocks(self, request: Request) -> tuple[list[int], Passes]:
        """Published blocks the prompt may begin with, and how they were computed. The last position is always computed;
        a request with a recorded schedule takes only what was computed by it, up to where it can be followed from."""
        wanted = (len(request.prompt) - 1) // BLOCK_SIZE
        if not self.prefix_cache or not wanted:
            return [], NONE
        chain = request.choices[0].chain
        chain.extend(request.prompt, wanted)
        schedule = request.schedule
        if not schedule.parts:
            return self.pool.find(chain.hashes[:wanted], BLOCK_SIZE)
        blocks = min(wanted, schedule.end // BLOCK_SIZE)
        found = self.pool.follow(chain.hashes[:blocks], BLOCK_SIZE, schedule)
        length = schedule.cut_back(len(found) * BLOCK_SIZE)
        while length % BLOCK_SIZE:
            length = schedule.cut_back(length // BLOCK_SIZE * BLOCK_SIZE)
        return found[: length // BLOCK_SIZE], schedule.upto(length) if length else NONE


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _is_held_up(request: Request) -> bool:
    """The next position's KV is on its way, and waiting for it is better than computing it again."""
    if request.incoming is None or request.rehearsals:
        return False
    return request.incoming.holds_up(request.choices[0].computed)


def _arrival(request: Request) -> int:
    return request.arrival
