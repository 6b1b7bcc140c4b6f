"""Which fields an object has, in the language of `managedFields`.

Model: `leaves` lists every field that can be owned: scalars, atomic maps and lists, items of lists that are maps or
sets, keys of free maps; a path is a tuple of FieldsV1 elements (`f:name`, `k:{"name":"x"}`, `v:"x"`). What merges and
what is atomic is the schema's (`x-kubernetes-list-type`, `x-kubernetes-map-type`); without a schema maps merge and
lists are atomic. Upstream: `structured-merge-diff/typed/tofieldset.go`, `merge.go`, `remove.go`,
`fieldpath/element.go`.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from tests.kubernetes.apiserver import schemas
from tests.kubernetes.apiserver.schemas import Schema, resolved

Path = tuple[str, ...]
# Stands for an item or key as such, beside the fields in it.
MEMBER = object()

# Never owned by anybody (`apimachinery/pkg/util/managedfields/internal/stripmeta.go`).
_STRIPPED: frozenset[Path] = frozenset(
    {
        ("f:apiVersion",),
        ("f:kind",),
        ("f:metadata",),
        *(
            ("f:metadata", f"f:{name}")
            for name in (
                *("name", "namespace", "creationTimestamp", "selfLink", "uid", "clusterName", "generation"),
                *("managedFields", "resourceVersion"),
            )
        ),
    }
)  # fmt: skip


def leaves(value: dict[str, Any], schema: Schema) -> dict[Path, Any]:
    """Every ownable field with its value."""
    found: dict[Path, Any] = {}
    _map(found, (), value, resolved(schema))
    return {
        path: each
        for path, each in found.items()
        if path not in _STRIPPED and path[:2] != ("f:metadata", "f:managedFields")
    }


def _map(found: dict[Path, Any], path: Path, value: dict[str, Any], schema: Schema) -> None:
    properties = schema.get("properties") or {}
    for name, each in value.items():
        below = (*path, f"f:{name}")
        if each is None or each == {}:
            found[below] = each
            continue
        if name not in properties and isinstance(each, (dict, list)):
            found[below] = MEMBER
        _any(found, below, each, schemas.property_of(schema, name))


def _any(found: dict[Path, Any], path: Path, value: Any, schema: Schema) -> None:
    if isinstance(value, dict) and not schemas.is_atomic_map(schema):
        _map(found, path, value, resolved(schema))
        return
    if isinstance(value, list):
        keys = schemas.list_keys(schema)
        if keys is not None and all(isinstance(each, dict) for each in value):
            items = resolved(schemas.items_of(schema))
            for each in value:
                below = (*path, element(each, keys))
                found[below] = MEMBER
                _map(found, below, each, items)
            return
        if schemas.is_set(schema):
            for each in value:
                found[(*path, "v:" + json.dumps(each, separators=(",", ":")))] = each
            return
    found[path] = value


def element(item: dict[str, Any], keys: tuple[str, ...]) -> str:
    values = dict(zip(keys, schemas.key_of(item, keys), strict=True))
    named = {key: each for key, each in sorted(values.items()) if each is not None}
    return "k:" + json.dumps(named, separators=(",", ":"))


def encode(paths: set[Path]) -> dict[str, Any]:
    """FieldsV1."""
    root: dict[str, Any] = {}
    for path in sorted(paths):
        node = root
        for part in path:
            node = node.setdefault(part, {})
        node["."] = {}

    def trimmed(node: dict[str, Any]) -> dict[str, Any]:
        # A leaf is `{}`; "." is written only beside children.
        return {} if set(node) == {"."} else {part: trimmed(each) if part != "." else {} for part, each in node.items()}

    return trimmed(root)


def decode(fields: dict[str, Any]) -> set[Path]:
    found: set[Path] = set()

    def visit(node: dict[str, Any], path: Path) -> None:
        if not node:
            found.add(path)
            return
        for part, each in node.items():
            if part == ".":
                found.add(path)
            else:
                visit(each, (*path, part))

    for part, each in fields.items():
        if part != ".":
            visit(each, (part,))
    return found


def shown(path: Path) -> str:
    """As conflicts name it: `.spec.containers[name="web"].image`."""
    text = ""
    for part in path:
        kind, rest = part[0], part[2:]
        if kind == "f":
            text += f".{rest}"
        elif kind == "k":
            text += "[" + ",".join(f"{key}={json.dumps(each)}" for key, each in json.loads(rest).items()) + "]"
        else:
            text += f"[={rest}]"
    return text


def merged(live: Any, applied: Any, schema: Schema) -> Any:
    """`live` with everything that `applied` says."""
    if isinstance(applied, dict) and isinstance(live, dict) and not schemas.is_atomic_map(schema):
        made = dict(live)
        for name, each in applied.items():
            made[name] = (
                merged(live[name], each, schemas.property_of(schema, name)) if name in live else copy.deepcopy(each)
            )
        return made
    if isinstance(applied, list) and isinstance(live, list):
        keys = schemas.list_keys(schema)
        if keys is not None:
            items = schemas.items_of(schema)
            pending = {element(each, keys): each for each in applied}
            made_list = []
            for each in live:
                more = pending.pop(element(each, keys), None)
                made_list.append(each if more is None else merged(each, more, items))
            return made_list + [copy.deepcopy(each) for each in pending.values()]
        if schemas.is_set(schema):
            return live + [each for each in applied if each not in live]
    return copy.deepcopy(applied)


def without(value: Any, gone: set[Path], schema: Schema, path: Path = ()) -> Any:
    """A copy without the fields of `gone`; maps and lists that this empties go, too."""
    if isinstance(value, dict) and not schemas.is_atomic_map(schema):
        made = {}
        for name, each in value.items():
            below = (*path, f"f:{name}")
            if below in gone:
                continue
            left = without(each, gone, schemas.property_of(schema, name), below)
            if left in ({}, []) and each not in ({}, []):
                continue
            made[name] = left
        return made
    keys = schemas.list_keys(schema) if isinstance(value, list) else None
    if keys is not None:
        items = schemas.items_of(schema)
        named = [((*path, element(each, keys)), each) for each in value]
        return [without(each, gone, items, below) for below, each in named if below not in gone]
    if isinstance(value, list) and schemas.is_set(schema):
        return [each for each in value if (*path, "v:" + json.dumps(each, separators=(",", ":"))) not in gone]
    return value
