"""One function of a simulation: its queue, its replicas, and what a policy may see of it (`policy.View`).

The hot path. A request that meets a ready replica with room is taken in one call without any event: when its first
token comes is known as soon as it is taken, and when it ends is worked out when somebody looks. Limits: requests are
taken in order of arrival; a later one never passes the head of the queue.
"""

from __future__ import annotations

from array import array
from collections import deque
from heapq import heappop, heappush
from typing import Final

from autoscaler.simulator.replica import SimReplica
from autoscaler.simulator.workload import SimFunction

NEVER: Final = float("inf")


class FunctionState:
    """Attributes are public to the engine; policies see it as a `View`."""

    def __init__(self, index: int, function: SimFunction, begin_s: float, waits: array[float], first: int) -> None:
        self.index = index
        self.function = function
        service = function.service
        self._per_prompt_token_s = 1.0 / service.prefill_tokens_per_s
        self._base_s = service.step_base_s
        self._per_request_s = service.step_per_request_s
        self._per_token_s = service.step_per_context_token_s
        self._max_requests = service.max_requests
        self._kv_tokens = service.kv_tokens
        self._waits = waits
        self._first = first
        """Number of the first request whose wait is kept."""
        self.open: list[SimReplica] = []
        """Ready, and taking requests."""
        self.closed: list[SimReplica] = []
        """Draining: they end what they have."""
        self.solo: SimReplica | None = None
        """The only replica there is, where nothing waits and nothing drains: the fast path."""
        self.starting_replicas: list[SimReplica] = []
        self.queue: deque[tuple[float, int, int, int]] = deque()
        self.running = 0
        self.arrivals = 0
        self.refused = 0
        self.last_arrival_s = -NEVER
        self.last_end_s = begin_s
        self.gaps_s: array[float] = array("d")
        self.gap_starts_s: array[float] = array("d")
        self.arrival_times_s: array[float] = array("d")
        self.starts_s: array[float] = array("d")
        self.first_token_s_sum = 0.0
        self.prompt_tokens_sum = 0
        self.output_tokens_sum = 0
        self._arrived_sum_s = 0.0
        self._ended_sum_s = 0.0
        self._peak = 0
        # What is scored; set to zero when that time begins.
        self.scored_from = 0
        self.scored_requests = 0
        self.scored_refused = 0
        self.waited_s = 0.0
        self.cold_requests = 0
        self.busy_s = 0.0
        self.busy_from_s = begin_s
        self.busy_until_s = NEVER
        # The engine's.
        self.busy_above = 1 << 60
        self.idle_after_s = 0.0
        self.idle_armed = False
        self.idle_version = 0
        self.timer_s: float | None = None
        self.timer_version = 0
        self.short_of_room = False
        self.stopped_s: float | None = None

    # --- what a policy sees ---

    @property
    def ready(self) -> int:
        return len(self.open)

    @property
    def starting(self) -> int:
        return len(self.starting_replicas)

    @property
    def draining(self) -> int:
        return len(self.closed)

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def idle_since_s(self) -> float | None:
        return None if self.running or self.queue else self.last_end_s

    @property
    def waiting_since_s(self) -> float | None:
        return self.queue[0][0] if self.queue else None

    def area_s(self, now_s: float) -> float:
        return self._ended_sum_s - self._arrived_sum_s + (self.running + len(self.queue)) * now_s

    def take_peak(self) -> int:
        peak, self._peak = self._peak, self.running + len(self.queue)
        return peak

    def running_by_replica(self) -> list[int]:
        return [len(replica.heap) for replica in self.open]

    def waiting_tokens(self) -> tuple[int, int]:
        """Of prompts and outputs that wait."""
        return sum(each[1] for each in self.queue), sum(each[2] for each in self.queue)

    # --- requests ---

    def arrive(self, now_s: float, prompt_tokens: int, output_tokens: int, number: int) -> bool:
        """A request comes. True: it found a place, and nobody needs to be asked."""
        self.arrivals += 1
        self.arrival_times_s.append(now_s)
        self.last_arrival_s = now_s
        self._arrived_sum_s += now_s
        self.scored_requests += 1
        self.prompt_tokens_sum += prompt_tokens
        self.output_tokens_sum += output_tokens
        replica = self.solo
        if replica is None:
            self.advance(now_s)
            replica = self._choose(prompt_tokens + output_tokens)
            if not self.running and not self.queue:
                self.gaps_s.append(now_s - self.last_end_s)
                self.gap_starts_s.append(self.last_end_s)
            if replica is None:
                if not self.open:
                    self.cold_requests += 1
                self.solo = None
                self.queue.append((now_s, prompt_tokens, output_tokens, number))
                demand = self.running + len(self.queue)
                if demand > self._peak:
                    self._peak = demand
                return False
            heap = replica.heap
            if heap:
                self._carry(replica, now_s)
        else:
            heap = replica.heap
            if heap:
                self._carry(replica, now_s)
            if not heap:
                self.gaps_s.append(now_s - self.last_end_s)
                self.gap_starts_s.append(self.last_end_s)
            elif len(heap) >= self._max_requests or (
                self._kv_tokens and replica.context + prompt_tokens + output_tokens > self._kv_tokens
            ):
                self.solo = None
                self.queue.append((now_s, prompt_tokens, output_tokens, number))
                demand = self.running + len(self.queue)
                if demand > self._peak:
                    self._peak = demand
                return False
        # Taken at once: `_admit`, written out.
        if heap:
            begin_s = replica.frozen_s
            if begin_s < now_s:
                begin_s = now_s
        else:
            begin_s = now_s
            replica.steps = 0.0
            replica.at_s = now_s
            replica.context = 0
            replica.busy_since_s = now_s
        begin_s += prompt_tokens * self._per_prompt_token_s
        replica.frozen_s = begin_s
        tokens = prompt_tokens + (output_tokens >> 1)
        replica.context += tokens
        heappush(heap, (replica.steps + (output_tokens or 1), tokens))
        step_s = self._base_s + self._per_request_s * len(heap) + self._per_token_s * replica.context
        replica.step_s = step_s
        replica.next_s = begin_s + (heap[0][0] - replica.steps) * step_s
        waited_s = begin_s + step_s - now_s
        self.waited_s += waited_s
        self.first_token_s_sum += waited_s
        if number >= self._first:
            self._waits[number - self._first] = waited_s
        running = self.running + 1
        self.running = running
        if running > self._peak:
            self._peak = running
        return running <= self.busy_above

    def refuse_last(self) -> None:
        """The request that came last is sent away."""
        arrived_s = self.queue.pop()[0]
        self.refused += 1
        self.scored_refused += 1
        self._arrived_sum_s -= arrived_s
        self.settle()

    def advance(self, now_s: float) -> None:
        """Everything up to `now_s` has happened."""
        queue = self.queue
        while queue:
            first: SimReplica | None = None
            first_s = now_s
            for replica in self.open:
                if replica.next_s <= first_s:
                    first, first_s = replica, replica.next_s
            if first is None:
                break
            self._carry(first, first_s)
            self._fill(first, first_s)
        for replica in self.open:
            if replica.next_s <= now_s:
                self._carry(replica, now_s)
        for replica in self.closed:
            if replica.next_s <= now_s:
                self._carry(replica, now_s)

    def opened(self, replica: SimReplica, now_s: float) -> None:
        """A replica became ready."""
        self.starting_replicas.remove(replica)
        replica.is_ready = True
        self.starts_s.append(now_s - replica.begun_s)
        replica.ready_s = replica.at_s = replica.frozen_s = now_s
        self.open.append(replica)
        self._fill(replica, now_s)
        self.settle()

    def settle(self) -> None:
        """Whether the fast path applies."""
        self.solo = self.open[0] if len(self.open) == 1 and not self.closed and not self.queue else None

    def busy_until_at_least_s(self) -> float:
        """When the last running request ends if none is added."""
        return max((self.drained_s(each) for each in (*self.open, *self.closed) if each.heap), default=-NEVER)

    def drained_s(self, replica: SimReplica) -> float:
        """When a replica that takes nothing more has ended what it has."""
        return replica.last_end_s(self._base_s, self._per_request_s, self._per_token_s)

    def _choose(self, tokens: int) -> SimReplica | None:
        """Fewest in flight, as `placement.place_request` chooses among replicas that are alike; None: none has room,
        or others wait already."""
        if self.queue:
            return None
        best: SimReplica | None = None
        fewest = self._max_requests
        for replica in self.open:
            running = len(replica.heap)
            if running < fewest and not (self._kv_tokens and running and replica.context + tokens > self._kv_tokens):
                best, fewest = replica, running
        return best

    def _fill(self, replica: SimReplica, now_s: float) -> None:
        """Takes from the queue what the replica has places for."""
        queue, heap = self.queue, replica.heap
        while queue and len(heap) < self._max_requests:
            arrived_s, prompt_tokens, output_tokens, number = queue[0]
            if heap and self._kv_tokens and replica.context + prompt_tokens + output_tokens > self._kv_tokens:
                return
            queue.popleft()
            self._admit(replica, now_s, arrived_s, prompt_tokens, output_tokens, number)
        if not queue:
            self.settle()

    def _admit(
        self,
        replica: SimReplica,
        now_s: float,
        arrived_s: float,
        prompt_tokens: int,
        output_tokens: int,
        number: int,
    ) -> None:
        heap = replica.heap
        if heap:
            begin_s = max(replica.frozen_s, now_s)
        else:
            begin_s = now_s
            replica.steps, replica.at_s, replica.context, replica.busy_since_s = 0.0, now_s, 0, now_s
        begin_s += prompt_tokens * self._per_prompt_token_s
        replica.frozen_s = begin_s
        tokens = prompt_tokens + (output_tokens >> 1)
        replica.context += tokens
        heappush(heap, (replica.steps + (output_tokens or 1), tokens))
        replica.step_s = self._base_s + self._per_request_s * len(heap) + self._per_token_s * replica.context
        replica.next_s = begin_s + (heap[0][0] - replica.steps) * replica.step_s
        waited_s = begin_s + replica.step_s - arrived_s
        self.first_token_s_sum += waited_s
        if number >= self.scored_from:
            self.waited_s += waited_s
        if number >= self._first:
            self._waits[number - self._first] = waited_s
        self.running += 1

    def _carry(self, replica: SimReplica, now_s: float) -> None:
        """Carries a replica that runs something forward to `now_s`."""
        heap = replica.heap
        at_s = replica.at_s
        if replica.frozen_s > at_s:
            at_s = replica.frozen_s
        steps, step_s = replica.steps, replica.step_s
        while True:
            target, tokens = heap[0]
            end_s = at_s + (target - steps) * step_s
            if end_s > now_s:
                replica.next_s = end_s
                if now_s > at_s:
                    steps += (now_s - at_s) / step_s
                    at_s = now_s
                break
            heappop(heap)
            steps, at_s = target, end_s
            replica.context -= tokens
            self._ended_sum_s += end_s
            self.running -= 1
            if not heap:
                replica.next_s = NEVER
                if end_s > self.last_end_s:
                    self.last_end_s = end_s
                begin_s = replica.busy_since_s
                if begin_s < self.busy_from_s:
                    begin_s = self.busy_from_s
                if end_s > self.busy_until_s:
                    end_s = self.busy_until_s
                if end_s > begin_s:
                    self.busy_s += end_s - begin_s
                break
            step_s = self._base_s + self._per_request_s * len(heap) + self._per_token_s * replica.context
        replica.steps, replica.step_s, replica.at_s = steps, step_s, at_s
