"""Label and field selectors, as lists, watches and deletions of collections take them.

Grammar of labels: `apimachinery/pkg/labels/selector.go`; of fields: `apimachinery/pkg/fields/selector.go`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.kubernetes.apiserver.errors import bad_request
from tests.kubernetes.apiserver.resources import ResourceType

_REQUIREMENT = re.compile(
    r"\s*(?:(?P<absent>!\s*[^\s,!=()]+)|(?P<key>[^\s,!=()<>]+)\s*"
    r"(?:(?P<op>==|=|!=|>|<)\s*(?P<value>[^\s,()]*)|(?P<set>in|notin)\s*\((?P<values>[^)]*)\))?)\s*(?:,|$)"
)

Labels = Mapping[str, str]


def parse_labels(text: str) -> Callable[[Labels], bool]:
    tests: list[Callable[[Labels], bool]] = []
    at = 0
    while at < len(text):
        match = _REQUIREMENT.match(text, at)
        if match is None or match.end() == at:
            raise bad_request(f"unable to parse requirement: {text!r}")
        at = match.end()
        tests.append(_label_test(match))
    return lambda labels: all(test(labels) for test in tests)


def _label_test(match: re.Match[str]) -> Callable[[Labels], bool]:
    absent, key, op, value = match["absent"], match["key"], match["op"], match["value"]
    if absent:
        name = absent[1:].strip()
        return lambda labels: name not in labels
    if match["set"]:
        values = {each.strip() for each in match["values"].split(",")}
        if match["set"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    match op:
        case None:
            return lambda labels: key in labels
        case "=" | "==":
            return lambda labels: labels.get(key) == value
        case "!=":
            return lambda labels: labels.get(key) != value
        case _:
            return lambda labels: _compared(labels.get(key), op, value)


def _compared(have: str | None, op: str, value: str) -> bool:
    try:
        return have is not None and (int(have) > int(value) if op == ">" else int(have) < int(value))
    except ValueError:
        return False


def matches(selector: Mapping[str, Any] | None, labels: Labels) -> bool:
    """A LabelSelector (`matchLabels`, `matchExpressions`); none selects nothing, an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for rule in selector.get("matchExpressions") or []:
        have, values = labels.get(rule["key"]), rule.get("values") or []
        holds = {
            "In": have in values,
            "NotIn": have not in values,
            "Exists": rule["key"] in labels,
            "DoesNotExist": rule["key"] not in labels,
            "Gt": bool(values) and _compared(have, ">", values[0]),
            "Lt": bool(values) and _compared(have, "<", values[0]),
        }
        if not holds[rule["operator"]]:
            return False
    return True


def parse_fields(text: str, resource: ResourceType) -> Callable[[dict[str, Any]], bool]:
    known = ("metadata.name", "metadata.namespace", *resource.selectable)
    tests: list[tuple[str, bool, str]] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = re.fullmatch(r"([^!=]+)(==|=|!=)(.*)", part)
        if match is None:
            raise bad_request(f"invalid field selector: {part!r}")
        path, op, value = match[1].strip(), match[2], match[3].strip()
        if path not in known:
            raise bad_request(
                f'Unable to find "{resource.group_version}, Resource={resource.plural}" that match label selector "", '
                f'field selector "{text}": field label not supported: {path}'
            )
        tests.append((path, op != "!=", value))
    return lambda value: all((_at(value, path) == wanted) is equal for path, equal, wanted in tests)


def _at(value: dict[str, Any], path: str) -> str:
    if path == "source":
        return str((value.get("source") or {}).get("component", ""))
    found: Any = value
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if found is None:
        return "false" if path == "spec.unschedulable" else ""
    return str(found).lower() if isinstance(found, bool) else str(found)


def chosen(resource: ResourceType, labels: str, fields: str) -> Callable[[dict[str, Any]], bool]:
    """Both selectors of one call."""
    by_label = parse_labels(labels) if labels else None
    by_field = parse_fields(fields, resource) if fields else None

    def holds(value: dict[str, Any]) -> bool:
        if by_label is not None and not by_label(value["metadata"].get("labels") or {}):
            return False
        return by_field is None or by_field(value)

    return holds
