"""Who a request belongs to in a trace: W3C `traceparent` read, and the ids of a request's own spans.

The ids of a request's spans follow from its own id, so that whichever gateway tells of one (the one that accepted it,
or one that adopted it) gives it the same, and a span can be linked to that somebody else told. What cannot be derived
lies with the request in the journal (`TraceSeed`). Limits: `tracestate` is not carried on.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

import msgspec

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class TraceSeed(msgspec.Struct, frozen=True, array_like=True):
    """What a request that is traced was given; with its id it makes everything else."""

    trace_id: str
    """32 hex digits."""
    parent: str
    """Span of whoever called, 16 hex digits; empty: the trace begins here."""
    began_us: int
    """When its call came in."""


@dataclass(frozen=True, slots=True)
class Caller:
    trace_id: str
    parent: str
    sampled: bool


def parse_traceparent(header: str) -> Caller | None:
    """None for what is none, which then counts as not given."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None:
        return None
    version, trace_id, parent, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent, 16):
        return None
    return Caller(trace_id, parent, bool(int(flags, 16) & _SAMPLED))


def span_id(owner: str, name: str) -> int:
    """The same wherever it is asked for; never 0, which means none."""
    return int.from_bytes(hashlib.blake2b(f"{owner}\0{name}".encode(), digest_size=8).digest()) or 1


def trace_id(owner: str) -> int:
    """Of a trace that begins with nobody's request."""
    return int.from_bytes(hashlib.blake2b(owner.encode(), digest_size=16).digest()) or 1
