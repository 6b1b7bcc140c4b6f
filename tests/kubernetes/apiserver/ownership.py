"""Who owns which field: `managedFields` kept over creates, updates and server-side apply.

Model: an apply says the whole of what its manager wants; what it no longer says and nobody else owns is removed, and
what somebody else owns with another value is a conflict unless forced. Any other write owns what it changed.
Upstream: `structured-merge-diff/merge/update.go`, `apimachinery/pkg/util/managedfields`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.kubernetes.apiserver import fieldsets
from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.apiserver.fieldsets import Path, decode, encode, leaves
from tests.kubernetes.apiserver.schemas import Schema

Object = dict[str, Any]
_STATUS: Path = ("f:status",)


@dataclass(frozen=True, slots=True)
class Manager:
    """An entry of managedFields."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""
    time: str = field(default="", compare=False)

    def entry(self, paths: set[Path]) -> Object:
        made: Object = {
            "manager": self.name,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": encode(paths),
        }
        if self.subresource:
            made["subresource"] = self.subresource
        return made

    def shown(self) -> str:
        text = f'"{self.name}"'
        if self.subresource:
            text += f' with subresource "{self.subresource}"'
        if self.operation == "Update":
            text += f" using {self.api_version}" + (f" at {self.time}" if self.time else "")
        return text


Owners = dict[Manager, set[Path]]


def owners_of(value: Object) -> Owners:
    found: Owners = {}
    for each in value["metadata"].get("managedFields") or []:
        if not each:
            continue
        manager = Manager(
            each.get("manager", ""),
            each.get("operation", "Update"),
            each.get("apiVersion", ""),
            each.get("subresource", ""),
            each.get("time", ""),
        )
        found[manager] = decode(each.get("fieldsV1") or {})
    return found


def written(owners: Owners) -> list[Object]:
    # Applies first, then by time and name (`managedfields/internal/managedfields.go`, sortEncodedManagedFields).
    ordered = sorted(owners, key=lambda each: (each.operation != "Apply", each.time, each.name))
    return [each.entry(owners[each]) for each in ordered if owners[each]]


def after_write(live: Object | None, new: Object, manager: Manager, schema: Schema, has_status: bool) -> list[Object]:
    """managedFields after a create, update or patch by `manager`."""
    given = new["metadata"].get("managedFields")
    reset = given is not None and len(given) == 1 and not given[0]
    owners = {} if reset else owners_of(new) or (owners_of(live) if live else {})
    before = _own(leaves(live, schema) if live else {}, manager, has_status)
    after = _own(leaves(new, schema), manager, has_status)
    changed = {path for path, each in after.items() if path not in before or before[path] != each}
    removed = before.keys() - after.keys()
    touched = changed | removed
    kept: Owners = {}
    for each, paths in owners.items():
        kept[each] = paths - removed if each == manager else paths - touched
    if changed:
        mine = kept.pop(manager, set()) | changed
        kept[manager] = mine
    return written(kept)


def applied(
    live: Object | None, config: Object, manager: Manager, schema: Schema, has_status: bool, force: bool
) -> Object:
    """The object after a server-side apply, managedFields included."""
    owners = owners_of(live) if live else {}
    wanted = _own(leaves(config, schema), manager, has_status)
    config = _only(config, manager, has_status)
    current = leaves(live, schema) if live else {}
    differing = {path for path, each in wanted.items() if path in current and current[path] != each}
    conflicts = {each: (paths & wanted.keys()) & differing for each, paths in owners.items() if each != manager}
    conflicts = {each: paths for each, paths in conflicts.items() if paths}
    if conflicts and not force:
        raise _conflict(conflicts)
    for each, paths in conflicts.items():
        owners[each] = owners[each] - paths
    dropped = owners.get(manager, set()) - wanted.keys()
    others = set().union(*(paths for each, paths in owners.items() if each != manager))
    # An item stays as long as somebody owns something in it.
    held = {path[:depth] for path in others for depth in range(1, len(path) + 1)}
    made = fieldsets.merged(live, config, schema) if live else config
    made = fieldsets.without(made, dropped - held, schema)
    previous = next((each for each in owners if each == manager), None)
    unchanged = previous is not None and owners[previous] == set(wanted)
    mine = previous if unchanged and previous is not None else manager
    if previous is not None:
        del owners[previous]
    owners[mine] = set(wanted)
    metadata = {**(made.get("metadata") or {}), "managedFields": written(owners)}
    return {**made, "metadata": metadata}


def retimed(value: Object, manager: Manager, time: str) -> Object:
    """The entry of `manager` at its new time: done only where the object itself changed."""
    owners = {
        (replace(each, time=time) if each == manager else each): paths for each, paths in owners_of(value).items()
    }
    return {**value, "metadata": {**value["metadata"], "managedFields": written(owners)}}


def _own(found: dict[Path, Any], manager: Manager, has_status: bool) -> dict[Path, Any]:
    """Only what this endpoint may write: status by its subresource, everything else by the resource itself."""
    if not has_status:
        return found
    status = manager.subresource == "status"
    return {path: each for path, each in found.items() if (path[:1] == _STATUS) == status}


def _only(config: Object, manager: Manager, has_status: bool) -> Object:
    if not has_status:
        return config
    envelope = ("apiVersion", "kind", "metadata")
    if manager.subresource == "status":
        return {name: each for name, each in config.items() if name in (*envelope, "status")}
    return {name: each for name, each in config.items() if name != "status"}


def _conflict(conflicts: dict[Manager, set[Path]]) -> ApiError:
    """Words of `managedfields/internal/conflict.go`."""
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {each.shown()}", "field": fieldsets.shown(path)}
        for each, paths in conflicts.items()
        for path in sorted(paths)
    ]
    if len(causes) == 1:
        text = f"{causes[0]['message']}: {causes[0]['field']}"
    else:
        parts = []
        for each, paths in sorted(conflicts.items(), key=lambda pair: pair[0].name):
            lines = "".join(f"\n- {fieldsets.shown(path)}" for path in sorted(paths))
            parts.append(f"conflicts with {each.shown()}:{lines}")
        text = "\n".join(parts)
    number = f"{len(causes)} conflict" + ("s" if len(causes) > 1 else "")
    return ApiError(409, "Conflict", f"Apply failed with {number}: {text}", {"causes": causes})
