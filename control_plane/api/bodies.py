"""Reading what clients send to the APIs: bodies into typed values, query strings into numbers and lists.

Every fault is an `InvalidRequest` that names its field. Limits: small bodies only; the gateway has its own parsers.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web
from multidict import MultiMapping

from control_plane.errors import InvalidRequest, TooLarge

T = TypeVar("T")

BODY_BYTES: Final = 1024 * 1024
_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_WHOLE: Final = re.compile(r"-?[0-9]+")
_FIELD: Final = re.compile(r"field `(?P<name>[^`]+)`")


async def read_body(request: web.Request) -> bytes:
    if request.content_length is not None and request.content_length > BODY_BYTES:
        raise TooLarge(f"a body of {request.content_length} bytes exceeds {BODY_BYTES}")
    body = await request.read()
    if len(body) > BODY_BYTES:
        raise TooLarge(f"a body of {len(body)} bytes exceeds {BODY_BYTES}")
    return body


def decode(body: bytes, kind: type[T]) -> T:
    """JSON into a struct; an empty body is an empty object."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        found = _AT.match(str(error))
        what, path = (found["what"], found["path"]) if found else (str(error), None)
        if not path and (named := _FIELD.search(what)):
            path = named["name"]
        raise InvalidRequest(f"{path}: {what}" if path else what, param=path or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"not JSON: {error}", code="invalid_json") from None


def values_of(query: MultiMapping[str], name: str) -> tuple[str, ...] | None:
    """A list parameter, in any of the ways clients write one: repeated, `name[]`, or separated by commas."""
    given = [*query.getall(name, ()), *query.getall(f"{name}[]", ())]
    if not given:
        return None
    return tuple(dict.fromkeys(part for value in given for part in value.split(",") if part))


def whole_number(query: MultiMapping[str], name: str, default: int | None, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        if default is None:
            raise InvalidRequest(f"{name} is required", param=name)
        return default
    if not _WHOLE.fullmatch(text):
        raise InvalidRequest(f"{name}: {text[:40]!r} is no whole number", param=name)
    number = int(text) if len(text) <= 20 else high + 1
    if not low <= number <= high:
        raise InvalidRequest(f"{name} must lie between {low} and {high}, not {text[:20]}", param=name)
    return number


def one_of(query: MultiMapping[str], name: str, default: str, allowed: Any) -> str:
    value = query.get(name, default)
    if value not in allowed:
        raise InvalidRequest(f"{name} must be one of {', '.join(allowed)}, not {value[:40]!r}", param=name)
    return value
