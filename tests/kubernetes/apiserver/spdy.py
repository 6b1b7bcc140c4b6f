"""SPDY/3.1, as far as port-forwarding speaks it: streams with headers, data, and their ends.

kubectl tunnels it through a websocket (KEP-4006). Frames: the SPDY/3.1 draft, section 2.6; the pairs of streams of a
connection: `kubelet/pkg/cri/streaming/portforward/httpstream.go`.

Limits: no flow control (the Go library at the other end keeps none either), no priorities, no server push.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

_VERSION = 3
SYN_STREAM, SYN_REPLY, RST_STREAM, SETTINGS, PING, GOAWAY, HEADERS, WINDOW_UPDATE = 1, 2, 3, 4, 6, 7, 8, 9
FLAG_FIN = 1
_FRAME = 8

# What headers are compressed against (SPDY/3.1 draft, 2.6.10.1): words with their lengths, then plain text.
_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie "
    "keep-alive origin"
)
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritative "
    "Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 "
    "Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec "
    "00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,"
    "application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8"
    "charset=iso-8859-1,utf-,*,enq=0."
)


def _dictionary() -> bytes:
    words = [each.replace("_", " ").encode() for each in _WORDS.split()]
    return b"".join(struct.pack(">I", len(each)) + each for each in words) + _TEXT.encode()


_DICTIONARY = _dictionary()


@dataclass(frozen=True, slots=True)
class Frame:
    """A control frame has a kind; a data frame has none."""

    kind: int | None
    flags: int
    stream: int
    data: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Codec:
    """One connection's frames, both ways: headers share a compression state each way."""

    def __init__(self) -> None:
        self._buffer = b""
        self._inflate = zlib.decompressobj(zdict=_DICTIONARY)
        self._deflate = zlib.compressobj(zdict=_DICTIONARY)

    def read(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        while len(self._buffer) >= _FRAME:
            first, second = struct.unpack_from(">II", self._buffer)
            size = second & 0xFFFFFF
            if len(self._buffer) < _FRAME + size:
                return
            payload = self._buffer[_FRAME : _FRAME + size]
            self._buffer = self._buffer[_FRAME + size :]
            yield self._frame(first, second >> 24, payload)

    def _frame(self, first: int, flags: int, payload: bytes) -> Frame:
        if not first & 0x80000000:
            return Frame(None, flags, first, payload)
        kind = first & 0xFFFF
        stream = struct.unpack_from(">I", payload)[0] & 0x7FFFFFFF if len(payload) >= 4 else 0
        if kind == SYN_STREAM:
            return Frame(kind, flags, stream, headers=self._headers(payload[10:]))
        if kind in (SYN_REPLY, HEADERS):
            return Frame(kind, flags, stream, headers=self._headers(payload[4:]))
        return Frame(kind, flags, stream, payload)

    def _headers(self, block: bytes) -> dict[str, str]:
        plain = self._inflate.decompress(block)
        (count,) = struct.unpack_from(">I", plain)
        at, found = 4, {}
        for _ in range(count):
            texts = []
            for _ in range(2):
                (size,) = struct.unpack_from(">I", plain, at)
                texts.append(plain[at + 4 : at + 4 + size].decode())
                at += 4 + size
            found[texts[0].lower()] = texts[1]
        return found

    def reply(self, stream: int) -> bytes:
        """Accepts a stream, with no headers to say."""
        block = self._deflate.compress(struct.pack(">I", 0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return control(SYN_REPLY, 0, struct.pack(">I", stream) + block)


def control(kind: int, flags: int, payload: bytes) -> bytes:
    return struct.pack(">HHI", 0x8000 | _VERSION, kind, flags << 24 | len(payload)) + payload


def data(stream: int, content: bytes, last: bool = False) -> bytes:
    return struct.pack(">II", stream, (FLAG_FIN if last else 0) << 24 | len(content)) + content
