"""What became of one request's KV so far: what is stored of it, what waits to be, and what of it is to stay.

    Written   of one request: tokens and chains per choice, chunks, packs
    Copy      in the writer's queue, for every request that will name it

Limits: records of the loop's thread; nothing here reads or writes anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from function_runtime.held import HeldRequest
from function_runtime.kv.chunk import ChunkHead
from function_runtime.kv.forms import Form, flight_identity, identity_of, known_form
from function_runtime.kv.identity import Chain, KvIdentity
from function_runtime.kv.known import Key
from function_runtime.kv.reader import sequences
from function_runtime.kv.sealing import ChunkSeal
from function_runtime.passes import NONE, Passes
from function_runtime.protocol import KvChunk


class Written:
    """What has been stored for one request: its tokens and chains per choice, its whole chunks, the packs they lie
    in."""

    def __init__(self, held: HeldRequest, identity: KvIdentity) -> None:
        self.held = held
        self.tokens = [list(tokens) for tokens in sequences(held.work)]
        self.form: Form = known_form(held.work.prefix_form)
        """Of the prefixes it may use, and in which its own are kept; in flight it is raw."""
        flight = flight_identity(self.form, identity)
        self.chains = [Chain(flight, held.work.kv_scope) for _ in self.tokens]
        self.shared = Chain(identity_of(self.form, identity), held.work.kv_scope)
        """Names its prefix as others ask for it."""
        self.seal = ChunkSeal(held.work.kv_key)
        self.place = held.work.kv_place
        self.packs: set[str] = set()
        self.chunks: dict[int, KvChunk] = {}
        """Of choice 0, by start: the longest that is stored."""
        self.waiting: dict[int, Copy] = {}
        """Of choice 0, by start: handed to the writer, not stored yet."""
        self.told_dropped = False
        self.settled = False
        self.keeps_until = 0
        """Chunks of choice 0 that end at or before this are kept though the request is over."""
        self._seen = 0

    def catch_up(self) -> None:
        messages = self.held.messages
        for message in messages[self._seen :]:
            for event in message.events:
                self.tokens[event.choice].append(event.token_id)
        self._seen = len(messages)

    def whole_run(self, size: int) -> tuple[int, list[KvChunk]]:
        """Where the first choice's whole chunks from 0 on end, stored or about to be, and those that are stored."""
        stored: list[KvChunk] = []
        position = 0
        while True:
            chunk, copy = self.chunks.get(position), self.waiting.get(position)
            end = chunk.end if chunk is not None else copy.end if copy is not None else 0
            if end - position != size:
                return position, stored
            if chunk is not None:
                stored.append(chunk)
            position = end

    def head(self, choice: int, start: int, end: int, *, passes: Passes = NONE, shared: bool = False) -> ChunkHead:
        """What a chunk of these positions is: of a request in flight, or (`shared`) as it is kept for others."""
        tokens, chain = self.tokens[choice], self.shared if shared else self.chains[choice]
        return ChunkHead(
            identity=chain.identity,
            scope=chain.scope,
            parent=chain.at(tokens, start),
            chain=chain.at(tokens, end),
            start=start,
            end=end,
            tokens=tuple(tokens[start:end]),
            passes=passes,
        )

    def wants(self, choice: int, end: int) -> bool:
        return not self.settled or (choice == 0 and end <= self.keeps_until)


@dataclass(eq=False, slots=True)
class Copy:
    """One copy in the writer's queue, and every request that will name it: (request, choice)."""

    key: Key
    end: int
    data: memoryview
    wanted_by: list[tuple[Written, int]]

    @property
    def is_wanted(self) -> bool:
        return any(written.wants(choice, self.end) for written, choice in self.wanted_by)
