"""JSON that somebody else wrote: bounded before it is parsed, names unique, one kind of error.

Parsed values take up to about 100 bytes each, so that a text of brackets would grow twentyfold; the signs that begin
one are counted first. Limits: signs inside strings count too, so that bounds are generous.
"""

from __future__ import annotations

import json
from typing import Any, Final

from model_loader.errors import FormatError, shown

_SIGNS: Final = (b",", b":", b"[", b"{")


def parse_json(raw: bytes, what: str, *, max_values: int) -> dict[str, Any]:
    """The object `raw` spells. Raises `FormatError` naming `what`."""
    values = sum(raw.count(sign) for sign in _SIGNS)
    if values > max_values:
        raise FormatError(f"{what} holds up to {values} values; at most {max_values} are read")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise FormatError(f"{what} holds a name twice: {shown(twice)}")
        return result

    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError as error:
        raise FormatError(f"{what} is nested too deeply") from error
    except ValueError as error:
        raise FormatError(f"{what} is no JSON: {shown(str(error))}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{what} is no JSON object but {shown(document)}")
    return document
