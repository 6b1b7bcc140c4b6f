"""KV on its way from the store: chunks that reader threads fill and verify, layer by layer, and the engine waits for.

    ARRIVING -> SOUND    every layer has its checksum and the whole has its digest
             -> FAILED   it does not, could not be read, or was not there in time

A layer may be *looked at* once the header (every field compared) and the layer's own CRC32C agree; what was computed
from it may *leave* the engine only when its chunk is SOUND. The bytes lie in buffers of the read, never in blocks:
a read that ends late fills memory nobody looks at. Limits: the clock is `time.monotonic`.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from function_runtime.kv.steering import Steering
from function_runtime.passes import Passes
from function_runtime.protocol import KvChunk

_NEVER: Final = float("inf")
_LINK_LOOK_S: Final = 0.1
"""How often it is looked whether the weights are here, where they have the link first."""
_LOOK_S: Final = 0.05
"""How often whoever waits for a layer looks whether that is still worth it."""


class ChunkState(enum.Enum):
    ARRIVING = "arriving"
    SOUND = "sound"
    FAILED = "failed"


class ArrivalFailed(Exception):
    """A chunk that was counted on is not to be used."""


class ArrivingChunk:
    """Positions [start, end) of a choice; `data` is `[layers, 2, tokens, kv_heads, head_dim]`, filled meanwhile."""

    __slots__ = ("data", "deadline_s", "layers", "passes", "reason", "record", "state")

    def __init__(self, record: KvChunk, layers: int, data: memoryview, deadline_s: float = _NEVER) -> None:
        self.record = record
        self.data = data
        self.deadline_s = deadline_s
        self.layers = bytearray(layers)
        """1 for each layer that has its checksum."""
        self.state = ChunkState.ARRIVING
        self.passes: Passes | None = None
        """How everything before `end` was computed: its header says, from format version 2 on."""
        self.reason = ""

    @property
    def choice(self) -> int:
        return self.record.choice

    @property
    def start(self) -> int:
        return self.record.start

    @property
    def end(self) -> int:
        return self.record.end


class Arrival:
    """All of a request's KV that is on its way. Readers call the first part, the engine's thread the second."""

    def __init__(self, chunks: Iterable[ArrivingChunk], *, layered: bool = False, reason: str = "") -> None:
        self.chunks = list(chunks)
        self.layered = layered
        """Layers come in order: a pass can begin with the first."""
        self.reason = reason
        """Why this is read and the rest computed."""
        self.abandoned = False
        self.is_sampled = False
        """What is used of it is computed again, later, and compared."""
        self.on_failure: Callable[[ArrivingChunk], ArrivingChunk | None] | None = None
        """Asked, when a chunk failed, for another that begins where it did."""
        self.on_change: Callable[[], None] | None = None
        self.while_waiting: Callable[[], None] | None = None
        """Called several times a second by a pass that waits for layers."""
        self.steering: Steering | None = None
        """None: it is waited for, whatever it takes."""
        self.pump: Callable[[], None] | None = None
        """Asks for more, if there is more worth reading."""
        self.is_alone = False
        """Nothing else is computed with it."""
        self.resolved_count = 0
        self.read_bytes = self.reads = 0
        """What was read for it, of use or not."""
        self._begin_s = time.monotonic()
        self._end_s = 0.0
        self._changed = threading.Condition()

    # --- by readers -----------------------------------------------------------------------------------------------

    def has_layers(self, chunk: ArrivingChunk, first: int, last: int) -> None:
        """Layers [first, last) have their checksums."""
        with self._changed:
            chunk.layers[first:last] = b"\x01" * (last - first)
            self._changed.notify_all()

    def is_sound(self, chunk: ArrivingChunk) -> None:
        self._resolve(chunk, ChunkState.SOUND, "")

    def has_failed(self, chunk: ArrivingChunk, reason: str) -> None:
        self._resolve(chunk, ChunkState.FAILED, reason)

    def _resolve(self, chunk: ArrivingChunk, state: ChunkState, reason: str) -> None:
        with self._changed:
            if chunk.state is not ChunkState.ARRIVING:
                return
            chunk.reason = reason
            if state is ChunkState.SOUND:
                chunk.layers[:] = b"\x01" * len(chunk.layers)
            elif self.on_failure is not None and not self.abandoned:
                # NOTE: before the state is set, or all would seem to be resolved for a moment.
                other = self.on_failure(chunk)
                if other is not None:
                    self.chunks = [*self.chunks, other]
            chunk.state = state
            self.resolved_count += 1
            if self.resolved:
                self._end_s = time.monotonic()
                self._let_go()
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    # --- by the engine --------------------------------------------------------------------------------------------

    @property
    def resolved(self) -> bool:
        """Nothing more will come."""
        return all(chunk.state is not ChunkState.ARRIVING for chunk in self.chunks)

    @property
    def is_sound_throughout(self) -> bool:
        return all(chunk.state is ChunkState.SOUND for chunk in self.chunks)

    @property
    def begins_at(self) -> int:
        return min((c.start for c in self.chunks if c.choice == 0), default=0)

    @property
    def first_layer_is_here(self) -> bool:
        return all(chunk.layers[0] for chunk in self.chunks if chunk.state is not ChunkState.FAILED)

    @property
    def took_us(self) -> int:
        return int(((self._end_s or time.monotonic()) - self._begin_s) * 1e6)

    @property
    def detail(self) -> str:
        misses = [
            f"[{c.start}, {c.end}) of choice {c.choice}: {c.reason}"
            for c in self.chunks
            if c.state is ChunkState.FAILED and c.reason
        ]
        return "; ".join(filter(None, (self.reason, *misses)))

    def reach(self, choice: int, position: int, *, promised: bool = False) -> int:
        """The end of the gapless run of sound chunks (`promised`: also of those that may still become so) that holds
        `position`; `position` itself if there is none."""
        states = (ChunkState.SOUND, ChunkState.ARRIVING) if promised else (ChunkState.SOUND,)
        own = [(c.start, c.end) for c in self.chunks if c.choice == choice and c.end > position and c.state in states]
        for start, end in sorted(own):
            if start > position:
                break
            position = max(position, end)
        return position

    @property
    def is_lossy(self) -> bool:
        """Taken from token 0 on without a gap, or not at all."""
        return any(chunk.record.form != "raw" for chunk in self.chunks)

    def next_start(self, position: int) -> int | None:
        """Where the next chunk of the first choice begins that may be of use, after `position`."""
        starts = [
            c.start for c in self.chunks if not c.choice and c.start > position and c.state is not ChunkState.FAILED
        ]
        return min(starts, default=None)

    def is_at(self, position: int) -> None:
        """Computing has got there."""
        if self.steering is not None:
            self.steering.is_at(position)
            self.ask()

    def holds_up(self, position: int) -> bool:
        """Whether the position's KV is on its way and had better be waited for."""
        if self.reach(0, position, promised=True) <= self.reach(0, position):
            return False
        return self.steering is None or self.steering.waits(position, self.is_alone)

    def ask(self) -> None:
        """For more, if there is a reason by now that there was not before."""
        pump = self.pump
        if pump is not None:
            pump()

    def wait_and_ask(self) -> None:
        """For a while, by whoever follows it."""
        leaves_link = self.steering is not None and self.steering.leaves_link
        self.wait(_LINK_LOOK_S if leaves_link else 1.0)
        self.ask()

    def turn_back(self) -> None:
        """The front is computed meanwhile."""
        self.layered = False
        if self.steering is not None:
            self.steering.turn_back()

    def pass_end(self, position: int, end: int) -> int:
        """Where a pass from `position` had better end, so that stored KV is taken up where it begins."""
        starts = [c.start for c in self.chunks if not c.choice and position < c.start and _is_hope(c)]
        if self.steering is None:
            return min([*starts, end])
        if self.is_lossy:
            return end
        return self.steering.meeting(position, starts, end)

    def lengths(self, choices: int, prompt: int, position: int, *, promised: bool = False) -> tuple[int, ...]:
        """Where what can be used of each choice ends, the first choice's counted from `position`."""
        first = self.reach(0, position, promised=promised)
        others = [self.reach(choice, prompt, promised=promised) for choice in range(1, choices)]
        return (first if first > position else 0, *(end if end > prompt else 0 for end in others))

    def expire(self) -> None:
        """Whatever should have been here by now has failed."""
        now_s = time.monotonic()
        for chunk in [c for c in self.chunks if c.state is ChunkState.ARRIVING and c.deadline_s <= now_s]:
            self.has_failed(chunk, "not read in time")

    def wait(self, within_s: float) -> None:
        """Until something changed, a deadline passed, or the time is over."""
        with self._changed:
            if not self.resolved:
                self._changed.wait(max(0.0, min(within_s, self._next_deadline_s() - time.monotonic())))
        self.expire()

    def wait_for_layer(self, layer: int) -> None:
        self._wait_until(lambda: all(chunk.layers[layer] for chunk in self.chunks))

    def wait_for_all(self) -> None:
        self._wait_until(lambda: self.is_sound_throughout)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                failed = next((c for c in self.chunks if c.state is ChunkState.FAILED), None)
                if failed is not None:
                    raise ArrivalFailed(f"[{failed.start}, {failed.end}) of choice {failed.choice}: {failed.reason}")
                if is_so():
                    return
                if self.steering is not None and self.steering.is_hopeless(self.begins_at):
                    raise ArrivalFailed("computing is faster")
                self._changed.wait(max(0.0, min(_LOOK_S, self._next_deadline_s() - time.monotonic())))
            self.expire()
            if self.while_waiting is not None:
                self.while_waiting()

    def _next_deadline_s(self) -> float:
        return min((c.deadline_s for c in self.chunks if c.state is ChunkState.ARRIVING), default=_NEVER)

    def abandon(self) -> None:
        """Nobody will look at what is still on its way."""
        with self._changed:
            self.abandoned = True
            self._let_go()
            self._changed.notify_all()

    def _let_go(self) -> None:
        """Those who read for it know it, and it them: what was read must not wait for the cycle to be found."""
        self.pump = self.on_failure = None


def _is_hope(chunk: ArrivingChunk) -> bool:
    return chunk.state is not ChunkState.FAILED
