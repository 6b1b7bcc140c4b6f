"""Schemas of built-in kinds, out of the `kubernetes-validate` package, and what merging asks of any schema.

The package ships the OpenAPI definitions of each Kubernetes release with their `x-kubernetes-*` extensions: list types,
map keys and patch strategies (`kubernetes-json-schema/vX.Y.Z-local/_definitions.json`).
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec

Schema = dict[str, Any]

VERSION = "1.37"
_REF = "#/$defs/"
# Key fields with a default in the Go types (`// +default=TCP` of core/v1), which the JSON schemas leave out.
KEY_DEFAULTS = {"protocol": "TCP"}


@cache
def definitions() -> dict[str, Schema]:
    folder = resources.files("kubernetes_validate").joinpath("kubernetes-json-schema")
    name = next(
        each.name for each in folder.iterdir() if each.name.startswith(f"v{VERSION}.") and each.name.endswith("-local")
    )
    decoded: dict[str, dict[str, Schema]] = msgspec.json.decode(folder.joinpath(name, "_definitions.json").read_bytes())
    return decoded["$defs"]


def resolved(schema: Schema | None) -> Schema:
    """The schema itself where it is a reference; an empty one where nothing is known."""
    while schema and "$ref" in schema:
        schema = definitions().get(schema["$ref"].removeprefix(_REF), {})
    return schema or {}


def of_definition(name: str) -> Schema:
    return definitions().get(name, {})


def types(schema: Schema) -> tuple[str, ...]:
    found = schema.get("type")
    if found is None:
        return ()
    return (found,) if isinstance(found, str) else tuple(found)


def property_of(schema: Schema, name: str) -> Schema:
    """The schema of a member of an object."""
    schema = resolved(schema)
    properties = schema.get("properties") or {}
    if name in properties:
        return properties[name]
    more = schema.get("additionalProperties")
    return more if isinstance(more, dict) else {}


def items_of(schema: Schema) -> Schema:
    found = resolved(schema).get("items")
    return found if isinstance(found, dict) else {}


def list_keys(schema: Schema) -> tuple[str, ...] | None:
    """Keys of a list that is a map (`x-kubernetes-list-type: map`)."""
    outer = schema
    schema = resolved(schema)
    kind = outer.get("x-kubernetes-list-type") or schema.get("x-kubernetes-list-type")
    if kind != "map":
        return None
    return tuple(outer.get("x-kubernetes-list-map-keys") or schema.get("x-kubernetes-list-map-keys") or ())


def is_set(schema: Schema) -> bool:
    kind = schema.get("x-kubernetes-list-type") or resolved(schema).get("x-kubernetes-list-type")
    return kind == "set"


def is_atomic_map(schema: Schema) -> bool:
    return "atomic" in (schema.get("x-kubernetes-map-type"), resolved(schema).get("x-kubernetes-map-type"))


def patch_strategy(schema: Schema) -> tuple[tuple[str, ...], str | None]:
    """Strategies (`merge`, `replace`, `retainKeys`) and merge key of a strategic merge patch."""
    text = schema.get("x-kubernetes-patch-strategy") or ""
    return tuple(filter(None, text.split(","))), schema.get("x-kubernetes-patch-merge-key")


def key_of(item: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """What identifies an item of a list that is a map."""
    return tuple(item.get(key, KEY_DEFAULTS.get(key)) for key in keys)
