"""A request as a replica holds it: everything said about it so far, until the gateway says `Settled`.

Tokens are kept as the messages they were sent in, so that an `Attach` after any place gets the rest and only the rest,
outcome last. Limits: outcomes nobody settles are forgotten after `FORGET_AFTER_S`, or beyond `KEEP_ENDED` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from function_runtime.protocol import (
    Accepted,
    DeviceTime,
    Failed,
    Finished,
    KvSealed,
    Parked,
    ReplicaMessage,
    Tokens,
    Work,
)

if TYPE_CHECKING:
    from function_runtime.engine_like import RequestTokensLike
    from function_runtime.gateway_link import GatewayLink

FORGET_AFTER_S: Final = 900.0
KEEP_ENDED: Final = 4096


class HeldRequest:
    __slots__ = (
        "accepted", "cached_tokens", "decode_us", "ended_ns", "in_engine", "kv", "link", "messages", "next_seq",
        "outcome", "parking", "prefill_us", "work",
    )  # fmt: skip

    def __init__(self, work: Work, link: GatewayLink | None) -> None:
        self.work = work
        self.link = link
        self.accepted: Accepted | None = None
        self.messages: list[Tokens] = []
        self.next_seq = len(work.produced) + 1
        self.prefill_us = 0
        self.decode_us = 0
        self.cached_tokens = 0
        self.kv: list[KvSealed] = []
        self.outcome: Finished | Failed | Parked | None = None
        self.parking = ""
        """Why it is being put away: out of the engine, its KV is being stored."""
        self.in_engine = False
        self.ended_ns = 0

    @property
    def id(self) -> str:
        return self.work.request_id

    @property
    def epoch(self) -> int:
        return self.work.epoch

    @property
    def live(self) -> bool:
        return self.outcome is None

    @property
    def device(self) -> DeviceTime:
        return DeviceTime(prefill_us=self.prefill_us, decode_us=self.decode_us)

    def is_of_another(self, link: GatewayLink) -> bool:
        """Whether another gateway that is connected works on it: one that was taken over must not end what goes on."""
        return self.link is not None and self.link is not link

    def tell(self, message: ReplicaMessage) -> None:
        if self.link is not None:
            self.link.send(message)

    def admit(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self.in_engine = True
        self.tell(accepted)

    def produce(self, step: RequestTokensLike) -> None:
        self.cached_tokens = step.cached_tokens
        message = Tokens(
            request_id=self.id,
            epoch=self.epoch,
            first_seq=step.first_seq,
            events=step.events,
            device=self.device,
            cached_tokens=step.cached_tokens,
            prefill_ends=step.prefill_ends,
            begun=step.begun,
        )
        self.messages.append(message)
        self.next_seq = step.first_seq + len(step.events)
        self.tell(message)

    def seal(self, message: KvSealed) -> None:
        self.kv.append(message)
        self.tell(message)

    def end(self, outcome: Finished | Failed | Parked, now_ns: int) -> None:
        self.outcome = outcome
        self.in_engine = False
        self.ended_ns = now_ns
        self.tell(outcome)

    def finish(self, now_ns: int, *, cancelled: bool) -> None:
        self.end(
            Finished(
                request_id=self.id,
                epoch=self.epoch,
                last_seq=self.next_seq - 1,
                cancelled=cancelled,
                device=self.device,
                cached_tokens=self.cached_tokens,
            ),
            now_ns,
        )

    def fail(self, now_ns: int, code: str, message: str, *, retry: bool) -> None:
        self.end(
            Failed(
                request_id=self.id,
                epoch=self.epoch,
                code=code,
                message=message,
                retry=retry,
                device=self.device,
            ),
            now_ns,
        )

    def park(self, now_ns: int) -> None:
        self.end(
            Parked(
                request_id=self.id,
                epoch=self.epoch,
                last_seq=self.next_seq - 1,
                device=self.device,
                reason=self.parking,
            ),
            now_ns,
        )

    @property
    def goes_on(self) -> bool:
        """It has ended here and goes on elsewhere: its stored KV is needed there."""
        return isinstance(self.outcome, Parked) or (isinstance(self.outcome, Failed) and self.outcome.retry)

    def replay(self, after_seq: int) -> Iterator[ReplicaMessage]:
        """What a reader that has everything up to `after_seq` lacks."""
        if self.accepted is not None:
            yield self.accepted
        for message in self.messages:
            skip = after_seq + 1 - message.first_seq
            if skip <= 0:
                yield message
            elif skip < len(message.events):
                yield Tokens(
                    request_id=message.request_id,
                    epoch=message.epoch,
                    first_seq=after_seq + 1,
                    events=message.events[skip:],
                    device=message.device,
                    cached_tokens=message.cached_tokens,
                    prefill_ends=message.prefill_ends,
                    begun=message.begun,
                )
        yield from self.kv
        if self.outcome is not None:
            yield self.outcome


class HeldRequests:
    """All of a replica's requests, by id; the newest epoch of each."""

    def __init__(self) -> None:
        self._by_id: dict[str, HeldRequest] = {}

    def get(self, request_id: str) -> HeldRequest | None:
        return self._by_id.get(request_id)

    def add(self, held: HeldRequest) -> None:
        self._by_id[held.id] = held

    def forget(self, request_id: str) -> HeldRequest | None:
        return self._by_id.pop(request_id, None)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(list(self._by_id.values()))

    @property
    def live(self) -> list[HeldRequest]:
        return [held for held in self._by_id.values() if held.live]

    @property
    def any_live(self) -> bool:
        return any(held.live for held in self._by_id.values())

    def live_of_others(self, link: GatewayLink) -> int:
        return sum(held.live and held.link is not link for held in self._by_id.values())

    @property
    def unsettled(self) -> int:
        return len(self._by_id)

    def listing(self) -> tuple[tuple[str, int], ...]:
        return tuple((held.id, held.epoch) for held in self._by_id.values())

    def detach(self, link: GatewayLink) -> None:
        for held in self._by_id.values():
            if held.link is link:
                held.link = None

    def expired(self, now_ns: int) -> list[HeldRequest]:
        ended = sorted((h for h in self._by_id.values() if not h.live), key=lambda h: h.ended_ns)
        surplus = max(0, len(ended) - KEEP_ENDED)
        old_ns = now_ns - int(FORGET_AFTER_S * 1e9)
        return [held for index, held in enumerate(ended) if index < surplus or held.ended_ns < old_ns]
