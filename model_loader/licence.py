"""Which licence a checkpoint states: GGUF's own metadata, the front matter of a model card, or a wheel's METADATA.

What is stated is repeated, never interpreted. Limits: the licence's name (`other` is followed to `license_name`), not
its text; a licence file without a name says nothing.
"""

from __future__ import annotations

import email.parser
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from model_loader.confined import is_there, read_confined
from model_loader.errors import LoaderError

CARD_NAME: Final = "README.md"
_MAX_CARD_BYTES: Final = 4 * 1024 * 1024
_MAX_CHARS: Final = 200
_FRONT_MATTER: Final = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_FIELD: Final = re.compile(r"^(license|license_name):[ \t]*(.*)$", re.MULTILINE)
_ITEM: Final = re.compile(r"^license:[ \t]*\r?\n[ \t]*-[ \t]*(.+)$", re.MULTILINE)


def licence_of_gguf(metadata: Mapping[str, Any]) -> str | None:
    return _name(metadata.get("general.license")) or _name(metadata.get("general.license.name"))


def licence_of_directory(root: Path) -> str | None:
    """By its model card."""
    if not is_there(root, CARD_NAME):
        return None
    try:
        text = read_confined(root, CARD_NAME, _MAX_CARD_BYTES).decode("utf-8", "replace")
    except LoaderError:
        return None
    return licence_of_card(text)


def licence_of_card(text: str) -> str | None:
    front = _FRONT_MATTER.match(text)
    if front is None:
        return None
    stated = {match[1]: match[2] for match in _FIELD.finditer(front[1])}
    listed = _ITEM.search(front[1])
    licence = _name(stated.get("license")) or _name(listed[1] if listed else None)
    return (_name(stated.get("license_name")) or licence) if licence in (None, "other") else licence


def licence_of_wheel(metadata: bytes) -> str | None:
    """Of a `METADATA` file."""
    fields = email.parser.BytesHeaderParser().parsebytes(metadata)
    classified = [value for value in fields.get_all("Classifier", []) if value.startswith("License ::")]
    return (
        _name(fields.get("License-Expression"))
        or _name(fields.get("License"))
        or _name(classified[0].rpartition("::")[2] if classified else None)
    )


def _name(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    text = " ".join(value.strip().strip("'\"").split())
    return text[:_MAX_CHARS] if text and text.isprintable() else None
