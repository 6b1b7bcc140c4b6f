"""CEL rules of custom resources (`x-kubernetes-validations`), evaluated by the reference C++ implementation.

Model: a rule sits at a node of the schema and is evaluated for every value there with `self`, and with `oldSelf` where
it is a transition rule; list items that are no map have no old self. Upstream:
`apiextensions-apiserver/pkg/apiserver/schema/cel/validation.go`; the libraries: `apiserver/pkg/cel/library`.

Limits: `self` is dynamically typed, so that what upstream's compiler refuses when the CRD is applied (a misspelt
field) fails here at the first evaluation, and as loudly; costs are not estimated; of the Kubernetes libraries
`lists`, `regex`, `urls`, `quantity` and `ip` are there with the functions below.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from tests.kubernetes.apiserver import schemas
from tests.kubernetes.apiserver.errors import FieldFault
from tests.kubernetes.apiserver.schemas import Schema
from tests.kubernetes.quantities import parse_quantity

_ABSENT = object()
# Quantities travel through CEL as their value in nanos, as text: equal ones are equal, and nothing is rounded.
_NANO = Decimal(10) ** 9


def _quantity(text: str) -> str:
    return str(int(parse_quantity(text) * _NANO))


def _is_quantity(text: str) -> bool:
    try:
        parse_quantity(text)
    except ValueError:
        return False
    return True


def _plain(value: Any) -> Any:
    if hasattr(value, "plain_value"):
        return value.plain_value()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _is_url(text: str) -> bool:
    parts = urlsplit(text)
    return bool(parts.scheme and parts.netloc) or text.startswith("/")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _find(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    return found[0] if found else ""


@cache
def _environment() -> Any:
    # Eight shared objects of C++: loaded when the first rule is compiled.
    from cel_expr_python import cel
    from cel_expr_python.ext import ext_bindings, ext_math, ext_optional, ext_strings

    kind = cel.Type
    anything, text, whole, yes = kind.DYN, kind.STRING, kind.INT, kind.BOOL
    many = kind.List(anything)

    def declared(name: str, returns: Any, takes: list[Any], member: bool, call: Any) -> Any:
        return cel.FunctionDecl(name, [cel.Overload(f"k8s_{name}", returns, takes, member, call)])

    functions = [
        declared("isSorted", yes, [many], True, lambda each: (plain := _plain(each)) == sorted(plain)),
        declared("sum", anything, [many], True, lambda each: sum(_plain(each))),
        declared("min", anything, [many], True, lambda each: min(_plain(each))),
        declared("max", anything, [many], True, lambda each: max(_plain(each))),
        declared("find", text, [text, text], True, _find),
        declared("findAll", many, [text, text], True, lambda value, pattern: re.findall(pattern, value)),
        declared("isURL", yes, [text], False, _is_url),
        declared("isIP", yes, [text], False, _is_ip),
        declared("isQuantity", yes, [text], False, _is_quantity),
        declared("quantity", text, [text], False, _quantity),
        declared("isGreaterThan", yes, [text, text], True, lambda a, b: int(a) > int(b)),
        declared("isLessThan", yes, [text, text], True, lambda a, b: int(a) < int(b)),
        declared("compareTo", whole, [text, text], True, lambda a, b: (int(a) > int(b)) - (int(a) < int(b))),
        declared("add", text, [text, text], True, lambda a, b: str(int(a) + int(b))),
        declared("sub", text, [text, text], True, lambda a, b: str(int(a) - int(b))),
        declared("asInteger", whole, [text], True, lambda a: int(a) // 10**9),
        declared("isInteger", yes, [text], True, lambda a: int(a) % 10**9 == 0),
    ]
    return cel.NewEnv(
        variables={"self": anything, "oldSelf": anything},
        functions=functions,
        extensions=[
            ext_strings.ExtStrings(),
            ext_optional.ExtOptional(),
            ext_bindings.ExtBindings(),
            ext_math.ExtMath(),
        ],
    )


@cache
def compiled(expression: str) -> Any:
    """The compiled rule; raises ValueError with the compiler's words."""
    try:
        return _environment().compile(expression)
    except Exception as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Place:
    schema: Schema
    value: Any
    old: Any
    path: str


def rule_errors(schema: Schema, path: str = "") -> list[FieldFault]:
    """Rules of a CRD that do not compile."""
    found: list[FieldFault] = []
    for at, rule in enumerate(schema.get("x-kubernetes-validations") or []):
        where = f"{path}.x-kubernetes-validations[{at}].rule"
        if rule.get("optionalOldSelf"):
            found.append(FieldFault(where, "optionalOldSelf is not imitated by the tests' server", value=True))
        for name in ("rule", "messageExpression"):
            if rule.get(name):
                try:
                    compiled(rule[name])
                except ValueError as error:
                    found.append(FieldFault(where, f"compilation failed: {error}", value=rule[name]))
    for name, part in (schema.get("properties") or {}).items():
        found += rule_errors(part, f"{path}.properties[{name}]")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found += rule_errors(schema[name], f"{path}.{name}")
    return found


def evaluate(schema: Schema, value: dict[str, Any], old: dict[str, Any] | None) -> list[FieldFault]:
    found: list[FieldFault] = []
    for place in _places(_Place(schema, value, _ABSENT if old is None else old, "")):
        for rule in place.schema["x-kubernetes-validations"]:
            fault = _fault(rule, place)
            if fault is not None:
                found.append(fault)
    return found


def has_rules(schema: Schema) -> bool:
    if schema.get("x-kubernetes-validations"):
        return True
    below = [*(schema.get("properties") or {}).values()]
    below += [schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)]
    return any(has_rules(each) for each in below)


def _places(place: _Place) -> Iterator[_Place]:
    schema, value, old, path = place.schema, place.value, place.old, place.path
    if schema.get("x-kubernetes-validations") and value is not None:
        yield place
    if isinstance(value, dict):
        for name, each in value.items():
            part = schemas.property_of(schema, name)
            if part:
                before = old.get(name, _ABSENT) if isinstance(old, dict) else _ABSENT
                yield from _places(_Place(part, each, before, f"{path}.{name}".lstrip(".")))
    elif isinstance(value, list) and schema.get("items"):
        keys = schemas.list_keys(schema)
        known = {}
        if keys and isinstance(old, list):
            known = {schemas.key_of(each, keys): each for each in old if isinstance(each, dict)}
        for at, each in enumerate(value):
            before = known.get(schemas.key_of(each, keys), _ABSENT) if keys and isinstance(each, dict) else _ABSENT
            yield from _places(_Place(schema["items"], each, before, f"{path}[{at}]"))


def _fault(rule: dict[str, Any], place: _Place) -> FieldFault | None:
    text = rule["rule"]
    data: dict[str, Any] = {"self": place.value, "oldSelf": None}
    if re.search(r"\boldSelf\b", text):
        if place.old is _ABSENT:
            return None
        data["oldSelf"] = place.old
    try:
        result = compiled(text).eval(data=data)
        outcome = result.plain_value()
    except Exception as error:
        return FieldFault(place.path or "<nil>", f"rule evaluation failed: {text}: {error}", value=place.value)
    if outcome is True:
        return None
    path = place.path + (rule.get("fieldPath") or "")
    if outcome is not False:
        return FieldFault(path or "<nil>", f"rule evaluation failed: {text}: {outcome}", value=place.value)
    message = rule.get("message") or f"failed rule: {text}"
    if rule.get("messageExpression"):
        said = compiled(rule["messageExpression"]).eval(data=data).plain_value()
        message = said if isinstance(said, str) and said.strip() else message
    kind = rule.get("reason") or "FieldValueInvalid"
    return FieldFault((path or "<nil>").lstrip("."), message, kind, place.value)
