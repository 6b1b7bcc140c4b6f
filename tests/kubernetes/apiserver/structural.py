"""An object against its schema: types and bounds, unknown fields dropped, defaults filled in.

One walk serves built-in kinds and custom resources; they differ in what an object without properties may hold and in
nulls. Upstream: `apiextensions-apiserver/pkg/apiserver/schema/{pruning,defaulting,listtype}`, and for messages
`apiserver/validation`; built-in kinds drop unknown fields because Go decoding does.

Limits: formats beyond those listed are not looked at, as upstream does with unknown ones.
"""

from __future__ import annotations

import base64
import binascii
import copy
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.kubernetes.apiserver import schemas
from tests.kubernetes.apiserver.errors import FieldFault
from tests.kubernetes.apiserver.schemas import Schema, resolved

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_INT_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
_DURATION = re.compile(r"[-+]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+|0")
# Members of the object itself that no CRD schema has to name.
_ROOT = ("apiVersion", "kind", "metadata")
_ENVELOPE = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


@dataclass(slots=True)
class Walk:
    """What one walk found, and by which rules it walks."""

    custom: bool
    defaulting: bool = True
    faults: list[FieldFault] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def fault(self, path: str, message: str, kind: str = "FieldValueInvalid", value: Any = None) -> None:
        self.faults.append(FieldFault(path or "<nil>", message, kind, value))


def checked_builtin(schema: Schema, value: dict[str, Any]) -> tuple[dict[str, Any], Walk]:
    walk = Walk(custom=False)
    return _object(walk, schema, value, ""), walk


def checked_custom(schema: Schema, value: dict[str, Any], defaulting: bool = True) -> tuple[dict[str, Any], Walk]:
    """Prunes, fills defaults in and validates."""
    walk = Walk(custom=True, defaulting=defaulting)
    envelope = {name: value[name] for name in _ROOT if name in value}
    metadata = envelope.get("metadata")
    if isinstance(metadata, dict):
        inner = Walk(custom=False)
        envelope["metadata"] = _object(inner, schemas.of_definition(_ENVELOPE), metadata, "metadata")
        walk.faults += inner.faults
        walk.unknown += inner.unknown
    rest = {name: each for name, each in value.items() if name not in _ROOT}
    properties = {name: each for name, each in (schema.get("properties") or {}).items() if name not in _ROOT}
    body = _object(walk, {**schema, "properties": properties, "x-kubernetes-root": True}, rest, "")
    return {**envelope, **body}, walk


def _value(walk: Walk, schema: Schema, value: Any, path: str) -> Any:
    outer, schema = schema, resolved(schema)
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            walk.fault(
                path,
                f'{path} in body must be of type integer or string: "{_name(value)}"',
                "FieldValueTypeInvalid",
                value,
            )
        else:
            _bounds(walk, schema, value, path)
        return value
    if value is None and walk.custom and schema.get("nullable"):
        return None
    allowed = schemas.types(schema)
    if allowed and not any(_is(value, each) for each in allowed if each != "null"):
        walk.fault(
            path,
            f'{path or "body"} in body must be of type {allowed[0]}: "{_name(value)}"',
            "FieldValueTypeInvalid",
            value,
        )
        return value
    for choice in ("oneOf", "anyOf"):
        if choice in schema:
            _choices(walk, schema, choice, value, path)
    for part in schema.get("allOf") or []:
        _nested(walk, part, value, path)
    if "not" in schema and not _faults(walk, schema["not"], value):
        walk.fault(path, f"{path} must not validate the schema (not)", value=value)
    if isinstance(value, dict):
        value = _object(walk, schema, value, path)
    elif isinstance(value, list):
        value = _list(walk, {**schema, **{k: v for k, v in outer.items() if k != "$ref"}}, value, path)
    _bounds(walk, schema, value, path)
    return value


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind])


def _name(value: Any) -> str:
    if value is None:
        return "null"
    return next(kind for kind in _KINDS if _is(value, kind))


def _nested(walk: Walk, schema: Schema, value: Any, path: str) -> None:
    """Value validation of a junctor: neither prunes nor defaults."""
    inner = Walk(walk.custom)
    _bounds(inner, schema, value, path)
    if isinstance(value, dict):
        for name in schema.get("required") or []:
            if name not in value:
                inner.fault(f"{path}.{name}".lstrip("."), "", "FieldValueRequired")
        for name, part in (schema.get("properties") or {}).items():
            if name in value:
                _nested(inner, part, value[name], f"{path}.{name}".lstrip("."))
    for part in schema.get("allOf") or []:
        _nested(inner, part, value, path)
    for choice in ("oneOf", "anyOf"):
        if choice in schema:
            _choices(inner, schema, choice, value, path)
    if "not" in schema and not _faults(inner, schema["not"], value):
        inner.fault(path, f"{path} must not validate the schema (not)", value=value)
    walk.faults += inner.faults


def _faults(walk: Walk, schema: Schema, value: Any) -> list[FieldFault]:
    inner = Walk(walk.custom)
    allowed = schemas.types(resolved(schema))
    if allowed and not any(_is(value, each) for each in allowed if each != "null"):
        inner.fault("", "type")
    _nested(inner, resolved(schema), value, "")
    return inner.faults


def _choices(walk: Walk, schema: Schema, choice: str, value: Any, path: str) -> None:
    valid = sum(not _faults(walk, each, value) for each in schema[choice])
    if valid == 0:
        walk.fault(path, f"{path} in body must validate at least one schema ({choice})", value=value)
    elif choice == "oneOf" and valid > 1 and walk.custom:
        walk.fault(
            path,
            f"{path} in body must validate one and only one schema (oneOf). Found {valid} valid alternatives",
            value=value,
        )


def _object(walk: Walk, schema: Schema, value: dict[str, Any], path: str) -> dict[str, Any]:
    properties: dict[str, Schema] = schema.get("properties") or {}
    more = schema.get("additionalProperties")
    embedded = bool(schema.get("x-kubernetes-embedded-resource"))
    open_ended = bool(schema.get("x-kubernetes-preserve-unknown-fields")) or more is True
    if not walk.custom:
        open_ended = open_ended or (not properties and more is None)
    made: dict[str, Any] = {}
    for name, each in value.items():
        below = f"{path}.{name}" if path else name
        part = properties.get(name)
        if part is None and isinstance(more, dict):
            part, below = more, f"{path}.{name}" if not walk.custom else f"{path}[{name}]"
        if part is None:
            if open_ended or (embedded and name in _ROOT):
                made[name] = each
            else:
                walk.unknown.append(below)
            continue
        if each is None and not resolved(part).get("nullable"):
            # Go decodes null as absent; of custom resources a null with a default is pruned before defaulting
            # (`defaulting.PruneNonNullableNullsWithoutDefaults` keeps those without).
            if walk.custom and "default" not in resolved(part):
                walk.fault(below, f'{below} in body must be of type {_first(part)}: "null"', "FieldValueTypeInvalid")
            continue
        made[name] = _value(walk, part, each, below)
    if walk.custom and walk.defaulting:
        for name, part in properties.items():
            if name not in made and "default" in part:
                below = f"{path}.{name}" if path else name
                made[name] = _value(walk, part, copy.deepcopy(part["default"]), below)
    for name in schema.get("required") or []:
        if name not in made and not (schema.get("x-kubernetes-root") and name in _ROOT):
            walk.fault(f"{path}.{name}" if path else name, "", "FieldValueRequired")
    return made


def _first(schema: Schema) -> str:
    found = schemas.types(resolved(schema))
    return found[0] if found else "object"


def _list(walk: Walk, schema: Schema, value: list[Any], path: str) -> list[Any]:
    items = schema.get("items") or {}
    made = [
        _value(walk, items, each, f"{path}[{at}]") for at, each in enumerate(value) if walk.custom or each is not None
    ]
    keys = schemas.list_keys(schema)
    seen: set[str] = set()
    if keys is not None or (schemas.is_set(schema) and walk.custom):
        for at, each in enumerate(made):
            if keys is not None and isinstance(each, dict):
                # The schemas leave the key of TopologySpreadConstraints and the like to validation of the kind.
                mark = repr(schemas.key_of(each, keys))
                shown: Any = {key: each.get(key) for key in keys}
            else:
                mark, shown = repr(each), each
            if mark in seen and walk.custom:
                walk.fault(f"{path}[{at}]", "", "FieldValueDuplicate", shown)
            seen.add(mark)
    return made


def _bounds(walk: Walk, schema: Schema, value: Any, path: str) -> None:
    if "enum" in schema and value not in schema["enum"]:
        shown = ", ".join(f'"{each}"' for each in schema["enum"])
        walk.fault(path, f"supported values: {shown}", "FieldValueNotSupported", value)
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        _number(walk, schema, value, path)
    elif isinstance(value, str):
        _string(walk, schema, value, path)
    elif isinstance(value, list):
        _size(walk, schema, len(value), path, "minItems", "maxItems", "items")
        if schema.get("uniqueItems") and len({repr(each) for each in value}) != len(value):
            walk.fault(path, f"{path} in body shouldn't contain duplicates", value=value)
    elif isinstance(value, dict):
        _size(walk, schema, len(value), path, "minProperties", "maxProperties", "properties")


def _number(walk: Walk, schema: Schema, value: float, path: str) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and (value < low or (schema.get("exclusiveMinimum") is True and value == low)):
        walk.fault(
            path,
            f"{path} in body should be greater than {'' if schema.get('exclusiveMinimum') else 'or equal to '}{low}",
            value=value,
        )
    if high is not None and (value > high or (schema.get("exclusiveMaximum") is True and value == high)):
        walk.fault(
            path,
            f"{path} in body should be less than {'' if schema.get('exclusiveMaximum') else 'or equal to '}{high}",
            value=value,
        )
    step = schema.get("multipleOf")
    if step and value % step:
        walk.fault(path, f"{path} in body should be a multiple of {step}", value=value)
    span = _INT_RANGES.get(schema.get("format", ""))
    if span and not span[0] <= value <= span[1]:
        walk.fault(path, f"{path} in body must be an {schema['format']}", value=value)


def _string(walk: Walk, schema: Schema, value: str, path: str) -> None:
    _size(walk, schema, len(value), path, "minLength", "maxLength", "chars long")
    pattern = schema.get("pattern")
    if pattern and not re.search(pattern, value):
        walk.fault(path, f"{path} in body should match '{pattern}'", value=value)
    format_ = schema.get("format")
    if format_ and not _formatted(format_, value):
        walk.fault(path, f"{path} in body must be of type {format_}: {value!r}", value=value)


def _formatted(format_: str, value: str) -> bool:
    match format_:
        case "date-time":
            try:
                datetime.fromisoformat(value)
            except ValueError:
                return False
        case "byte":
            try:
                base64.b64decode(value, validate=True)
            except binascii.Error:
                return False
        case "duration":
            return bool(_DURATION.fullmatch(value))
        case "uuid":
            return bool(re.fullmatch(r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}", value))
        case "uri":
            return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|/", value))
    return True


def _size(walk: Walk, schema: Schema, size: int, path: str, low: str, high: str, unit: str) -> None:
    if low in schema and size < schema[low]:
        walk.fault(path, f"{path} in body should have at least {schema[low]} {unit}", value=size)
    if high in schema and size > schema[high]:
        walk.fault(path, f"may not be more than {schema[high]} {unit}", "FieldValueTooLong", size)
