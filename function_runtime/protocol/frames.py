"""Gateway <-> replica: one TCP connection with length-prefixed msgpack frames, `Hello` first.

Every message about a request names the request and its epoch, and either side drops what carries an older epoch than
the one it knows. Versions one apart talk: both say theirs, unknown fields are ignored and unknown messages skipped. So
a field or a message that changes an answer is used only where the other side has said the version that knows it.
Limits: a frame holds at most `MAX_FRAME_BYTES`; what is further apart is refused at the greeting.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias, get_args

import msgspec

from function_runtime.protocol.request import Begun, DeviceTime, KvChunk, ReplicaTime, TokenEvent, Work

PROTOCOL_VERSION: Final = 1
"""Raised when one side has to know what the other knows; not for a field that may be ignored."""
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
HEARTBEAT_S: Final = 0.25
"""A replica sends `Progress` at least this often while it has work."""
IDLE_TOLD_S: Final = 4.0
"""And this often while it has none: gateways of a large cluster hear thousands."""
STALLED_AFTER_S: Final = 20.0
"""No `Progress` for this long while work is in flight: the replica counts as lost (its process is then killed)."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, array_like=False):
    """Base of every frame; the class name is the tag."""


# --- gateway -> replica ------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    token: str
    gateway: str
    version: int = 1
    """Said by who greets. NOTE: what is a default is not sent, so it has to stay that of the first version."""


class Submit(Message, frozen=True):
    work: Work


class Attach(Message, frozen=True):
    """Take over a request that another gateway (or an earlier life of this one) submitted: the replica answers
    `Attached`, sends every token after `after_seq` again and from now on reports to this connection;
    or it answers `Unknown`."""

    request_id: str
    epoch: int
    after_seq: int


class Cancel(Message, frozen=True):
    """Blocks are free within one step; the replica answers `Finished` with reason cancelled."""

    request_id: str
    epoch: int


class Settled(Message, frozen=True):
    """The outcome is committed: the replica may forget the request."""

    request_id: str
    epoch: int
    goes_on: bool = False
    """Only this attempt is over: the request goes on under another epoch, which needs the KV that this one stored."""


class KvKnown(Message, frozen=True):
    """Answer to `KvAsk`: the chunks the index has, in the order of their positions, without a gap from the first
    asked chain on. They are hints: a replica verifies every byte."""

    request_id: str
    epoch: int
    chunks: tuple[KvChunk, ...] = ()


class Park(Message, frozen=True):
    """Stop this request at a token boundary, store what KV it has, and answer `Parked`: it goes on elsewhere, later.
    `Settled` then lets the replica forget it; its KV stays."""

    request_id: str
    epoch: int
    reason: str = ""


GatewayMessage: TypeAlias = Hello | Submit | Attach | Cancel | Settled | KvKnown | Park


# --- replica -> gateway ------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    replica_id: str
    function: str
    revision: int
    identity: str
    """Checkpoint identity."""
    max_requests: int
    max_context_tokens: int
    running: tuple[tuple[str, int], ...] = ()
    """(request_id, epoch) of the requests this replica holds."""
    version: int = 1
    """As in `Hello`."""


class Accepted(Message, frozen=True):
    """The request is in the engine. How much of it was resumed from stored KV, and whether the arithmetic follows the
    first attempt's schedule (`exact`)."""

    request_id: str
    epoch: int
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    exact: bool = True
    load_us: int = 0
    detail: str = ""
    load_bytes: int = 0
    """Read of stored KV, of use or not."""


class Attached(Message, frozen=True):
    request_id: str
    epoch: int


class Tokens(Message, frozen=True):
    """Tokens of one engine step, all choices of one request; `first_seq` is the place of the first of them."""

    request_id: str
    epoch: int
    first_seq: int
    events: tuple[TokenEvent, ...]
    device: DeviceTime
    cached_tokens: int = 0
    """Prompt tokens whose KV was not computed by this attempt (prefix cache or stored KV)."""
    prefill_ends: tuple[int, ...] = ()
    """Sent with the first tokens of an attempt only: see `Work.prefill_ends`."""
    begun: Begun = Begun()
    """Likewise."""


class KvSealed(Message, frozen=True):
    """Chunks that are durable in the object store now. Empty `chunks` with `dropped` says that writing gave up."""

    request_id: str
    epoch: int
    chunks: tuple[KvChunk, ...] = ()
    dropped: str = ""


class KvAsk(Message, frozen=True):
    """Which stored chunks continue these chains? Asked for a prompt before its prefill."""

    request_id: str
    epoch: int
    identity: str
    """KV identity (hex)."""
    chains: tuple[str, ...]
    """Chain hashes (hex) at the ends of the prompt's whole chunks, in order."""


class KvKept(Message, frozen=True):
    """Chunks of a finished prefix that are in the store for whoever comes next with the same tokens."""

    request_id: str
    epoch: int
    identity: str
    chunks: tuple[KvChunk, ...]
    """Empty where the rule says that keeping costs more than it saves."""
    packs: dict[str, int] = {}
    """Bytes of the objects that hold them, where the replica wrote them."""
    token_us: float = 0.0
    """Measured microseconds of prefill per token: what a reuse saves."""
    reason: str = ""
    """Why they are kept, or why not."""


class KvBad(Message, frozen=True):
    """A stored chunk that is not what its record says: it is to be quarantined and named in metrics and `why`."""

    request_id: str
    epoch: int
    chunk: KvChunk
    reason: str


class Parked(Message, frozen=True):
    """No more tokens will come under this epoch, and the request is not over. The last `Tokens` and `KvSealed` precede
    it."""

    request_id: str
    epoch: int
    last_seq: int
    device: DeviceTime
    reason: str = ""


class Finished(Message, frozen=True):
    """No more tokens will come under this epoch. The last `Tokens` precede it."""

    request_id: str
    epoch: int
    last_seq: int
    cancelled: bool
    device: DeviceTime
    cached_tokens: int = 0


class Failed(Message, frozen=True):
    """The attempt failed. `retry` says whether another replica may do better; `code` is the OpenAI error code."""

    request_id: str
    epoch: int
    code: str
    message: str
    retry: bool
    device: DeviceTime


class Unknown(Message, frozen=True):
    request_id: str
    epoch: int


class Progress(Message, frozen=True):
    """Heartbeat of the engine loop itself."""

    steps: int
    running: int
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    time: ReplicaTime
    others: int = 0
    """Live requests that the replica reports to other connections than this one, or to none."""


ReplicaMessage: TypeAlias = (
    Welcome
    | Accepted
    | Attached
    | Tokens
    | KvSealed
    | KvAsk
    | KvKept
    | KvBad
    | Parked
    | Finished
    | Failed
    | Unknown
    | Progress
)


# --- framing -----------------------------------------------------------------------------------------------------

_LENGTH: Final = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_gateway_decoder = msgspec.msgpack.Decoder(GatewayMessage)
_replica_decoder = msgspec.msgpack.Decoder(ReplicaMessage)
_gateway_tags: Final = frozenset(each.__name__ for each in get_args(GatewayMessage))
_replica_tags: Final = frozenset(each.__name__ for each in get_args(ReplicaMessage))


class _Tagged(msgspec.Struct):
    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tagged)


class ProtocolError(Exception):
    """A peer sent what is not a frame of this protocol; the connection is of no further use."""


class UnknownMessage(ProtocolError):
    """A frame of this protocol with a message that another version knows: to be skipped."""

    def __init__(self, tag: str) -> None:
        super().__init__(f"no message of this version is called {tag}")
        self.tag = tag


def speaks(version: int) -> bool:
    """Whether this version and that one understand each other."""
    return abs(version - PROTOCOL_VERSION) <= 1


def encode(message: Message) -> bytes:
    """A frame: length (4 bytes, big endian) and msgpack body."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_gateway(body: bytes | memoryview) -> GatewayMessage:
    try:
        return _gateway_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise _fault(body, _gateway_tags, f"not a gateway message: {error}") from error


def decode_replica(body: bytes | memoryview) -> ReplicaMessage:
    try:
        return _replica_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise _fault(body, _replica_tags, f"not a replica message: {error}") from error


def _fault(body: bytes | memoryview, known: frozenset[str], words: str) -> ProtocolError:
    try:
        tag = _tag_decoder.decode(body).type
    except msgspec.MsgspecError:
        return ProtocolError(words)
    return ProtocolError(words) if tag in known else UnknownMessage(tag)


class FrameBuffer:
    """Cuts a byte stream into frame bodies. Feed it what arrived; it yields every complete body."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return bodies
