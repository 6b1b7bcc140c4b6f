"""`:name` and `?` in a statement to PostgreSQL's `$1`, `$2`.

A name that occurs twice is one parameter. Limits: knows no string literals; the statements of this package hold their
values in parameters.
"""

from __future__ import annotations

import re
from typing import Final

_NAMED: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")
_PLACES: Final = re.compile(r"\?")


def numbered(sql: str) -> tuple[str, tuple[str, ...] | None]:
    """The text with numbers, and the names in their order; None: it has places (`?`) or nothing."""
    names: list[str] = []

    def by_name(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    text = _NAMED.sub(by_name, sql)
    if names:
        return text, tuple(names)
    places = 0

    def by_place(_: re.Match[str]) -> str:
        nonlocal places
        places += 1
        return f"${places}"

    return _PLACES.sub(by_place, text), None
