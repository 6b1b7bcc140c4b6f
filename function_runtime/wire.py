"""What an agent and its workers say to each other: length-prefixed msgpack over a socket pair of their own.

The agent's end closing tells a worker to end at once; the worker's end closing tells the agent that it is gone. Times
are CLOCK_MONOTONIC nanoseconds, one clock for every process of the machine. Limits: trusted peers, small messages.
"""

from __future__ import annotations

import socket
import struct
from typing import Final, TypeAlias

import msgspec

from function_runtime.protocol import ReplicaSpec, ReplicaTime, Stage, StoreTotals

_LENGTH: Final = struct.Struct(">I")


class Word(msgspec.Struct, frozen=True, tag=True):
    """Base of every message."""


# --- agent -> worker ---------------------------------------------------------------------------------------------


class Specialise(Word, frozen=True):
    """Become this replica. `Prepared` follows as soon as the checkpoint lies in the pool."""

    spec: ReplicaSpec
    token: str
    log_path: str
    held_since_ns: int
    artifacts_dir: str = ""
    """Where the slot keeps compiled kernels."""
    listen_host: str = "127.0.0.1"
    listen_ports: tuple[int, int] = (0, 0)
    """First and last of those it may take; (0, 0): any."""


class Prepared(Word, frozen=True):
    """The checkpoint's prepared form; an empty path for engines that have no weights."""

    path: str
    arriving: str = ""
    """The name under which it can be mapped while it is incomplete; it has `path` once it is not."""


class MapAhead(Word, frozen=True):
    """To a waiting worker: the prepared forms in the pool that it should have mapped, and no others."""

    paths: tuple[str, ...]


class Ping(Word, frozen=True):
    """The agent lives; a worker that hears nothing for `lease_s` ends itself."""

    lease_s: float


class Drain(Word, frozen=True):
    grace_s: float
    reason: str


class StoreToken(Word, frozen=True):
    """A newer one for the object store; only told to a replica that serves."""

    token: str


class ResizeKv(Word, frozen=True):
    """Its share of the device's memory for KV has become another; only told to a replica that serves."""

    kv_bytes: int


AgentWord: TypeAlias = MapAhead | Specialise | Prepared | Ping | Drain | StoreToken | ResizeKv


# --- worker -> agent ---------------------------------------------------------------------------------------------


class Born(Word, frozen=True):
    pid: int


class Warm(Word, frozen=True):
    """A waiting worker has done all it can do ahead."""


class Taken(Word, frozen=True):
    """The worker runs and has the spec."""


class Ready(Word, frozen=True):
    port: int
    stages: tuple[Stage, ...]
    kv_bytes: int
    max_context_tokens: int


class LoadFailed(Word, frozen=True):
    code: str
    message: str
    retry: bool


class Report(Word, frozen=True):
    """Progress of the loop itself."""

    time: ReplicaTime
    running: int
    waiting: int
    store: StoreTotals = StoreTotals()
    kv_bytes: int = 0
    """Memory for KV, in use or not."""


class Farewell(Word, frozen=True):
    """The last word of an orderly end."""

    time: ReplicaTime
    stages: tuple[Stage, ...]
    store: StoreTotals = StoreTotals()


WorkerWord: TypeAlias = Born | Warm | Taken | Ready | LoadFailed | Report | Farewell

_encoder = msgspec.msgpack.Encoder()
agent_words: Final = msgspec.msgpack.Decoder(AgentWord)
worker_words: Final = msgspec.msgpack.Decoder(WorkerWord)


def pack(word: Word) -> bytes:
    body = _encoder.encode(word)
    return _LENGTH.pack(len(body)) + body


# --- agent <-> template: one datagram a message, a descriptor beside a fork request -------------------------------


class Fork(Word, frozen=True):
    """Fork a worker that owns the socket sent with this message; one that will `wait` warms itself up first."""

    wait: bool


class Imported(Word, frozen=True):
    """The template has imported everything and can fork."""

    import_us: int


class Forked(Word, frozen=True):
    """The worker exists; it introduces itself over its own socket."""


TemplateWord: TypeAlias = Imported | Forked
fork_words: Final = msgspec.msgpack.Decoder(Fork)
template_words: Final = msgspec.msgpack.Decoder(TemplateWord)


def datagram(word: Word) -> bytes:
    return _encoder.encode(word)


def template_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
