"""What the environment has to hold before the service can start: variables, and where each should come from.

A chart that names secrets lets its pod start without them and lists here what they were to bring (STOKER_REQUIRED, as
JSON: `{"VARIABLE": "where it comes from"}`); what is missing is then told by the service itself, by the secret's name.
Limits: a process never sees its environment change: whoever started it has to start it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

REQUIRED: Final = "STOKER_REQUIRED"


class BadRequirements(ValueError):
    """STOKER_REQUIRED is not what it should be."""


def is_attended(environ: Mapping[str, str]) -> bool:
    """Whether something looks at this service's health and starts it again: then it waits for what it needs, alive and
    not ready, where it would otherwise end at once and say why."""
    return bool(environ.get(REQUIRED))


def missing(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What is not there, in words."""
    text = environ.get(REQUIRED)
    if not text:
        return ()
    try:
        required = json.loads(text)
    except ValueError as error:
        raise BadRequirements(f"{REQUIRED} is no JSON: {error}") from error
    if not isinstance(required, dict):
        raise BadRequirements(f"{REQUIRED} is no JSON object")
    return tuple(
        f"{name} is empty: {where} is not there"
        for name, where in required.items()
        if not environ.get(name, "").strip()
    )
