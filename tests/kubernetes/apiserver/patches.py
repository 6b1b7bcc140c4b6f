"""JSON patch, merge patch and strategic merge patch.

RFC 6902 and RFC 7386; the third is Kubernetes' own: lists with a merge key are merged by it, and directives delete,
replace, order and retain (`apimachinery/pkg/util/strategicpatch/patch.go`; documented in
`contributors/devel/sig-api-machinery/strategic-merge-patch.md`).
"""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes.apiserver import schemas
from tests.kubernetes.apiserver.errors import ApiError, bad_request
from tests.kubernetes.apiserver.schemas import Schema, resolved

_DELETE_PRIMITIVES = "$deleteFromPrimitiveList/"
_ORDER = "$setElementOrder/"


def json_patch(value: Any, operations: list[dict[str, Any]]) -> Any:
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    value = copy.deepcopy(value)
    for each in operations:
        try:
            value = _operation(value, each)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            if each.get("op") == "test":
                raise _failed(f"testing value {each.get('path')} failed") from error
            raise _failed(
                f"{each.get('op')} operation does not apply: doc is missing path: {each.get('path')}"
            ) from error
    return value


def _failed(message: str) -> ApiError:
    return ApiError(422, "Invalid", f"the server rejected our request due to an error in our request: {message}")


def _operation(value: Any, each: dict[str, Any]) -> Any:
    op, path = each["op"], _pointer(each["path"])
    if op == "test":
        if _reach(value, path) != each.get("value"):
            raise ValueError("test failed")
        return value
    if op in ("move", "copy"):
        source = _pointer(each["from"])
        moved = copy.deepcopy(_reach(value, source))
        if op == "move":
            value = _removed(value, source)
        return _added(value, path, moved)
    if op == "add":
        return _added(value, path, each["value"])
    if op == "remove":
        return _removed(value, path)
    if op == "replace":
        _reach(value, path)
        if not path:
            return each["value"]
        parent = _reach(value, path[:-1])
        parent[int(path[-1]) if isinstance(parent, list) else path[-1]] = each["value"]
        return value
    raise bad_request(f"unexpected kind: {op}")


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError(text)
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _reach(value: Any, path: list[str]) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def _added(value: Any, path: list[str], new: Any) -> Any:
    if not path:
        return new
    parent = _reach(value, path[:-1])
    if isinstance(parent, list):
        at = len(parent) if path[-1] == "-" else int(path[-1])
        if at > len(parent):
            raise IndexError(at)
        parent.insert(at, new)
    else:
        parent[path[-1]] = new
    return value


def _removed(value: Any, path: list[str]) -> Any:
    parent = _reach(value, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]
    return value


def merge_patch(value: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    made = dict(value) if isinstance(value, dict) else {}
    for name, each in patch.items():
        if each is None:
            made.pop(name, None)
        else:
            made[name] = merge_patch(made.get(name), each)
    return made


def strategic_patch(value: Any, patch: Any, schema: Schema) -> Any:
    """The patched copy; `schema` says which lists merge and by which key."""
    if not isinstance(patch, dict):
        raise bad_request("invalid patch: not an object")
    return _merged_map(value if isinstance(value, dict) else {}, patch, schema)


def _merged_map(value: dict[str, Any], patch: dict[str, Any], schema: Schema) -> dict[str, Any]:
    directive = patch.get("$patch")
    if directive == "replace":
        return {name: copy.deepcopy(each) for name, each in patch.items() if name != "$patch"}
    if directive == "delete":
        return {}
    made = dict(value)
    retained = patch.get("$retainKeys")
    if retained is not None:
        made = {name: each for name, each in made.items() if name in retained}
    orders = {}
    for name, each in patch.items():
        if name in ("$patch", "$retainKeys"):
            continue
        if name.startswith(_DELETE_PRIMITIVES):
            target = name.removeprefix(_DELETE_PRIMITIVES)
            made[target] = [item for item in made.get(target) or [] if item not in each]
        elif name.startswith(_ORDER):
            orders[name.removeprefix(_ORDER)] = each
        elif each is None:
            made.pop(name, None)
        else:
            made[name] = _merged(made.get(name), each, schemas.property_of(schema, name))
    for name, order in orders.items():
        if name in made:
            made[name] = _ordered(made[name], order, schemas.property_of(schema, name))
    return made


def _merged(value: Any, patch: Any, schema: Schema) -> Any:
    strategies, key = schemas.patch_strategy(schema)
    if isinstance(patch, dict):
        if "replace" in strategies or not isinstance(value, dict):
            value = {}
        return _merged_map(value, patch, resolved(schema))
    if isinstance(patch, list) and "merge" in strategies:
        return _merged_list(value if isinstance(value, list) else [], patch, schema, key)
    return copy.deepcopy(patch)


def _merged_list(value: list[Any], patch: list[Any], schema: Schema, key: str | None) -> list[Any]:
    if key is None:
        return value + [each for each in patch if each not in value]
    if any(isinstance(each, dict) and each.get("$patch") == "replace" and len(each) == 1 for each in patch):
        return [copy.deepcopy(each) for each in patch if each.get("$patch") != "replace"]
    made = list(value)
    items = schemas.items_of(schema)
    for each in patch:
        if not isinstance(each, dict) or key not in each:
            raise bad_request(f"map: {each} does not contain declared merge key: {key}")
        at = next((at for at, item in enumerate(made) if item.get(key) == each[key]), None)
        if each.get("$patch") == "delete":
            made = [item for item in made if item.get(key) != each[key]]
        elif at is None:
            made.append(_merged_map({}, each, resolved(items)))
        else:
            made[at] = _merged_map(made[at], each, resolved(items))
    return made


def _ordered(value: list[Any], order: list[Any], schema: Schema) -> list[Any]:
    """Items in the order that the patch names; the ones it does not name stay after those they came after."""
    _, key = schemas.patch_strategy(schema)
    wanted = [each.get(key) if key and isinstance(each, dict) else each for each in order]

    def name(item: Any) -> Any:
        return item.get(key) if key and isinstance(item, dict) else item

    listed = sorted((each for each in value if name(each) in wanted), key=lambda each: wanted.index(name(each)))
    made: list[Any] = []
    for each in value:
        if name(each) in wanted:
            made.append(listed.pop(0))
        else:
            made.append(each)
    return made
