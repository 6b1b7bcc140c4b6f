"""Quantities of resources: `500m`, `2Gi`, `1e3`. Grammar: `apimachinery/pkg/api/resource/quantity.go`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

_SUFFIXES = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1)}
_SUFFIXES |= {letter: Decimal(10) ** (3 * power) for power, letter in enumerate("kMGTPE", 1)}
_SUFFIXES |= {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_FORM = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")


def parse_quantity(value: Any) -> Decimal:
    match = _FORM.fullmatch(str(value))
    if match is None:
        raise ValueError("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")
    if match[2]:
        return Decimal(match[1] + match[2])
    return Decimal(match[1]) * _SUFFIXES[match[3] or ""]


def shown_quantity(value: Decimal) -> str:
    """A plain number, in thousandths where it is no whole one."""
    if value == value.to_integral_value():
        return str(int(value))
    return f"{int(value * 1000)}m"


def pod_requests(spec: Mapping[str, Any], field: str = "requests") -> dict[str, Decimal]:
    """What a pod asks of its node: sums over containers, at least what any init container asks, plus overhead.

    A limit without a request counts as the request (`core/v1/defaults.go`, SetDefaults_Pod); sidecars (restartable init
    containers) count with the containers. Upstream: `component-helpers/resource/helpers.go`, PodRequests.
    """
    total: dict[str, Decimal] = {}
    first: dict[str, Decimal] = {}
    for each in spec.get("containers") or []:
        _add(total, _asked(each, field).items())
    for each in spec.get("initContainers") or []:
        asked = _asked(each, field)
        if each.get("restartPolicy") == "Always":
            _add(total, asked.items())
        else:
            first = {name: max(first.get(name, Decimal(0)), asked.get(name, Decimal(0))) for name in {*first, *asked}}
    total = {name: max(total.get(name, Decimal(0)), first.get(name, Decimal(0))) for name in {*total, *first}}
    _add(total, ((name, parse_quantity(each)) for name, each in (spec.get("overhead") or {}).items()))
    return total


def _asked(container: Mapping[str, Any], field: str) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    asked = dict(resources.get(field) or {})
    if field == "requests":
        asked = {**(resources.get("limits") or {}), **asked}
    return {name: parse_quantity(each) for name, each in asked.items()}


def _add(total: dict[str, Decimal], more: Iterable[tuple[str, Decimal]]) -> None:
    for name, each in more:
        total[name] = total.get(name, Decimal(0)) + each
