"""Requests whose stored KV is on its way: when they begin, where they take it up, and what is said of it.

    expected   nothing is computed: it is here soon, or its first layers are and there is nothing else to do
    in front   the beginning is computed meanwhile; where that meets what was read, prefill goes on behind it. A pass
               that the request has to itself is given up at a layer when all it computes has come
    gated      the pass under way waits layer by layer (see `restoring`)

A chunk that failed is computed again like any hole; what is sound behind it is taken up there. A pass that counted on
it is given up whole. Limits: one gated pass at a time, of a request that was alone when it began.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from function_runtime.engine import sealing
from function_runtime.engine.kv_cache import BLOCK_SIZE, KvCache
from function_runtime.engine.output import Admitted
from function_runtime.engine.request import Choice, Phase, Request
from function_runtime.engine.restoring import Gate, LayerWriter, Pieces, Race, ranges_of
from function_runtime.engine.resume import Usable, usable
from function_runtime.engine.scheduler import Schedule, Scheduler
from function_runtime.kv.arrival import Arrival
from function_runtime.passes import NONE, Passes, assembled
from function_runtime.protocol import Work

WAIT_S: Final = 0.02
"""How long a step without anything to compute waits for stored KV: the caller has messages to read."""


class Receiver:
    def __init__(
        self,
        cache: KvCache,
        scheduler: Scheduler,
        chunk_tokens: int,
        publish: Callable[[Request, Choice], None],
        admitted: Callable[[Request, Usable], Admitted],
        sampled: Callable[[Work, Arrival], None],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._chunk_tokens = chunk_tokens
        self._publish = publish
        self._admitted = admitted
        self._sampled = sampled
        """Told of what was used and is to be doubted all the same."""
        self._expected: list[Request] = []
        self._resolved: list[tuple[Request, Arrival]] = []
        """Nothing more is awaited, and what came of it has not been said yet."""
        self._set_back: list[Request] = []
        """Preempted, and what they had from others is no longer in memory."""
        self.gate: Gate | None = None

    def expect(self, request: Request, arrival: Arrival) -> None:
        request.incoming = arrival
        if arrival.begins_at > 0:
            self._scheduler.add(request)
        else:
            self._expected.append(request)

    def holds(self, request: Request) -> bool:
        """Its blocks are not what they will be: neither to be read nor to be given to anybody."""
        return self.gate is not None and self.gate.request is request

    def forget(self, request: Request) -> bool:
        """The request is over. True: the scheduler did not have it. Unverified blocks are the caller's to clear."""
        if self.holds(request):
            self._drop_gate()
        if request not in self._expected:
            return False
        self._expected.remove(request)
        request.forget_stored()
        request.phase = Phase.ENDED
        return True

    # --- in a step ------------------------------------------------------------------------------------------------

    def receive(self, alone: bool) -> None:
        """Takes up what has come. `alone`: there is only one request."""
        for request in list(self._scheduler.running):
            if request.incoming is not None and request.phase is Phase.PREFILL:
                request.incoming.is_alone = alone
                self._land(request, request.incoming)
            elif request.incoming is not None:
                # What is behind the prompt is of use only with all of it.
                self._conclude(request, request.incoming)
        for request in list(self._expected):
            arrival = request.incoming
            if arrival is None:
                continue
            arrival.expire()
            if arrival.resolved:
                self._begin(request, self._pieces(request, arrival, 0, promised=False))
                start = usable(request, request.restored.lengths).prompt if request.restored else 0
                if arrival.is_lossy or arrival.next_start(start) is None:
                    # Behind a hole in a lossy prefix nothing is taken up: what was computed there is no lossy one.
                    self._conclude(request, arrival)
            elif alone and arrival.layered and arrival.first_layer_is_here:
                pieces = self._pieces(request, arrival, 0, promised=True)
                if usable(request, pieces.lengths).prompt:
                    self._begin(request, pieces)
                    request.incoming = None
            else:
                arrival.is_alone = alone
                if not arrival.holds_up(0):
                    arrival.turn_back()
                    self._expected.remove(request)
                    self._scheduler.add(request)

    def admit(self, request: Request) -> None:
        """The request has its blocks: what is here is written, or a gate is set before what is not."""
        pieces, request.restored = request.restored, None
        if request.told_schedule and request.choices[0].computed < request.schedule.repeatable_from:
            self._set_back.append(request)
        if pieces is None:
            return
        writer = LayerWriter(self._cache, pieces, ranges_of(request, BLOCK_SIZE, 0))
        if pieces.arrival is not None:
            self.gate = Gate(request, pieces.arrival, writer)
            return
        writer.write_all()
        self._begun(request, pieces)
        self._publish_all(request)

    def take_gate(self, schedule: Schedule) -> Gate | Race | None:
        """The gate of the pass to be run now, or what may end it early."""
        if self.gate is not None and self.gate.request.phase is Phase.WAITING:
            # Preempted before anything was written: it is computed again.
            self._drop_gate()
        return self.gate or self._race(schedule)

    def _race(self, schedule: Schedule) -> Race | None:
        if len(schedule.chunks) != 1 or schedule.decodes or schedule.copies:
            return None
        chunk = schedule.chunks[0]
        arrival = chunk.request.incoming
        if arrival is None or arrival.steering is None or chunk.request.rehearsals:
            return None
        return Race(chunk.request, arrival, chunk.upto, self._cache.layout.num_layers)

    def pass_is_sound(self) -> None:
        """Waits until everything the pass came from has its digest; raises `ArrivalFailed`."""
        gate = self.gate
        if gate is None:
            return
        gate.settle()
        self.gate = None
        self._begun(gate.request, self._pieces(gate.request, gate.arrival, 0, promised=False))
        self._publish_all(gate.request)
        self._conclude(gate.request, gate.arrival)

    def give_up_pass(self) -> None:
        """A chunk that the pass counted on is not to be used: nothing of the pass is. What it wrote is overwritten
        before anybody else has the blocks, and the request begins again with what is sound."""
        gate, self.gate = self.gate, None
        if gate is None:
            return
        request = gate.request
        self._scheduler.clear(self._cache, request)
        self._scheduler.retreat(request)
        for choice in request.choices:
            choice.sealed = 0
        self.expect(request, gate.arrival)

    def wait(self) -> None:
        """There is nothing to compute until stored KV comes."""
        for request in (*self._expected, *self._scheduler.running):
            if request.incoming is not None:
                request.incoming.wait(WAIT_S)
                return

    def word(self) -> tuple[Admitted, ...]:
        """What became of stored KV, once it is known how much was of use."""
        said = [_recomputed(request) for request in self._set_back if request.phase is not Phase.ENDED]
        self._set_back = []
        for request, arrival in list(self._resolved):
            if request.phase is Phase.WAITING:
                continue
            self._resolved.remove((request, arrival))
            if arrival.is_sampled and request.loaded_tokens:
                self._sampled(request.work, arrival)
            if request.phase is not Phase.ENDED:
                found = self._admitted(request, Usable(request.loaded_tokens, 0))
                detail = "; ".join(filter(None, (arrival.detail, found.detail)))
                said.append(replace(found, detail=detail, load_us=arrival.took_us, load_bytes=arrival.read_bytes))
        return tuple(said)

    # --- details --------------------------------------------------------------------------------------------------

    def _pieces(self, request: Request, arrival: Arrival, position: int, *, promised: bool) -> Pieces:
        return Pieces.arriving(arrival, self._cache.layout, request, position, promised=promised)

    def _begin(self, request: Request, pieces: Pieces) -> None:
        stored = usable(request, pieces.lengths)
        request.restored = pieces if stored.prompt else None
        for choice in request.choices:
            sealing.begin(request, choice, self._chunk_tokens, stored.prompt + stored.steps)
        self._expected.remove(request)
        self._scheduler.add(request)

    def _land(self, request: Request, arrival: Arrival) -> None:
        arrival.expire()
        if request.rehearsals:
            return
        first = request.choices[0]
        computed = first.computed
        if computed and arrival.steering is not None and arrival.steering.only_from_start:
            self._conclude(request, arrival)
            return
        pieces = self._pieces(request, arrival, computed, promised=False)
        stored = usable(request, pieces.lengths)
        if stored.prompt > computed:
            prompt = self._passes(request, pieces, 0, first.passes, stored.prompt)
            self._scheduler.land(request, stored, prompt)
            LayerWriter(self._cache, pieces, ranges_of(request, BLOCK_SIZE, computed)).write_all()
            self._remember(request, pieces, prompt)
            self._publish_all(request)
            for choice in request.choices:
                sealing.begin(request, choice, self._chunk_tokens, choice.computed)
        arrival.is_at(first.computed)
        if request.phase is Phase.DECODE or (arrival.resolved and arrival.next_start(first.computed) is None):
            self._conclude(request, arrival)

    def _passes(self, request: Request, pieces: Pieces, choice: int, before: Passes, end: int) -> Passes:
        """How stored positions up to `end` were computed: by the schedule that is followed, or as the chunks say."""
        return request.passes_of(end) if request.follows else assembled(before, pieces.passes(choice), end)

    def _begun(self, request: Request, pieces: Pieces) -> None:
        """Stored KV is a request's beginning; where no schedule is followed, it is its schedule's as well."""
        first = request.choices[0]
        prompt = self._passes(request, pieces, 0, NONE, min(first.computed, len(request.prompt)))
        if not request.follows:
            request.begin_on(prompt)
        self._remember(request, pieces, prompt)

    def _remember(self, request: Request, pieces: Pieces, prompt: Passes) -> None:
        for choice in request.choices:
            choice.passes = self._passes(request, pieces, choice.index, prompt, choice.computed)

    def _publish_all(self, request: Request) -> None:
        for choice in request.choices:
            if choice.blocks:
                self._publish(request, choice)

    def _conclude(self, request: Request, arrival: Arrival) -> None:
        request.incoming = None
        arrival.abandon()
        self._resolved.append((request, arrival))

    def _drop_gate(self) -> None:
        if self.gate is not None:
            self.gate.arrival.abandon()
            self.gate = None


def _recomputed(request: Request) -> Admitted:
    """It goes on, with a beginning that is not the one its tokens so far were made with."""
    taken = request.schedule.repeatable_from
    detail = f"preempted: the first {taken} positions were not its own and are no longer in memory"
    return Admitted(request.request_id, request.work.epoch, 0, taken, exact=False, detail=detail)
