"""Bodies in protobuf, as typed Go clients (helm's storage, `kubectl create`) send them since client-go 0.35, read
into JSON.

Model: after a magic of four bytes an envelope (`runtime.Unknown`) names the kind and holds the message; which number is
which field is in `protobuf_fields.json` (see `protobuf_table`). Upstream:
`apimachinery/pkg/runtime/serializer/protobuf/protobuf.go`.

Limits: reading only; every client that writes protobuf takes JSON for an answer. Custom resources have no protobuf
form.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tests.kubernetes.apiserver.errors import bad_request

Object = dict[str, Any]
MAGIC = b"k8s\x00"
_META_KINDS = {"DeleteOptions", "PatchOptions", "CreateOptions", "UpdateOptions"}
_NO_ZERO = {"string": "", "int": 0, "bool": False, "bytes": ""}


@cache
def _fields() -> dict[str, dict[str, list[Any]]]:
    table: dict[str, dict[str, list[Any]]] = msgspec.json.decode(
        Path(__file__).with_name("protobuf_fields.json").read_bytes()
    )
    return table


def read_protobuf(raw: bytes) -> Object:
    if not raw.startswith(MAGIC):
        raise bad_request("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")
    envelope = dict(_parts(raw[len(MAGIC) :]))
    type_meta = {number: bytes(value).decode() for number, value in _parts(envelope.get(1, b""))}
    version, kind = type_meta.get(1, ""), type_meta.get(2, "")
    group, _, short = version.rpartition("/")
    package = f"{group.split('.')[0] or 'core'}.{short}"
    message = f"meta.v1.{kind}" if kind in _META_KINDS else f"{package}.{kind}"
    if message not in _fields():
        raise bad_request(f"no kind {kind!r} is registered for version {version!r} in protobuf")
    return {"apiVersion": version, "kind": kind, **_message(message, envelope.get(2, b""))}


def _parts(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an integer, or bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, wire = tag >> 3, tag & 7
        match wire:
            case 0:
                value, at = _varint(raw, at)
                yield number, value
            case 1:
                yield number, struct.unpack_from("<d", raw, at)[0]
                at += 8
            case 2:
                size, at = _varint(raw, at)
                yield number, raw[at : at + size]
                at += size
            case 5:
                yield number, struct.unpack_from("<f", raw, at)[0]
                at += 4
            case _:
                raise bad_request(f"illegal wire type {wire} in protobuf")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _message(message: str, raw: bytes) -> Object:
    fields = _fields().get(message, {})
    made: Object = {}
    for number, value in _parts(raw):
        known = fields.get(str(number))
        if known is None:
            continue
        name, kind, repeated, pointer = known
        if repeated == "map":
            entry = dict(_parts(value))
            key = bytes(entry.get(1, b"")).decode()
            made.setdefault(name, {})[key] = _value(kind, entry.get(2, b""))
        elif repeated == "list":
            made.setdefault(name, []).append(_value(kind, value))
        else:
            read = _value(kind, value)
            if not name:
                made.update(read)
            elif pointer or not _is_zero(kind, read):
                made[name] = read
    return made


def _is_zero(kind: str, value: Any) -> bool:
    """What `omitempty` leaves out of JSON, which protobuf writes where there is no pointer."""
    return value is None or value == {} or (kind in _NO_ZERO and value == _NO_ZERO[kind])


def _value(kind: str, value: Any) -> Any:
    match kind:
        case "string":
            return bytes(value).decode()
        case "bytes":
            return base64.b64encode(value).decode()
        case "int":
            return value - 2**64 if value >= 2**63 else value
        case "bool":
            return bool(value)
        case "double":
            return value
        case "quantity":
            return bytes(dict(_parts(value)).get(1, b"")).decode() or "0"
        case "intstr":
            parts = dict(_parts(value))
            return bytes(parts.get(3, b"")).decode() if parts.get(1) else _value("int", parts.get(2, 0))
        case "raw":
            inner = dict(_parts(value)).get(1, b"")
            return msgspec.json.decode(inner) if inner else {}
        case "strings":
            return [bytes(each).decode() for _, each in _parts(value)]
        case "time" | "micro":
            parts = dict(_parts(value))
            if not parts.get(1):
                return None
            at = datetime.fromtimestamp(_value("int", parts[1]), UTC)
            if kind == "time":
                return at.strftime("%Y-%m-%dT%H:%M:%SZ")
            return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{parts.get(2, 0) // 1000:06d}Z"
    return _message(kind, value)
