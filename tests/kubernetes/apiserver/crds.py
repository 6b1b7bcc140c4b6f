"""CustomResourceDefinitions: what one declares becomes a served kind; what its schema may say is checked.

Upstream: `apiextensions-apiserver/pkg/apis/apiextensions/validation/validation.go`,
`pkg/apiserver/schema/structural.go` (structural schemas), `pkg/controller/status/naming_controller.go` (conditions).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kubernetes.apiserver import cel
from tests.kubernetes.apiserver.errors import FieldFault
from tests.kubernetes.apiserver.resources import Column, ResourceType
from tests.kubernetes.clock import stamp

Object = dict[str, Any]
KEY = ("apiextensions.k8s.io", "customresourcedefinitions")
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
_VALUE_ONLY = ("allOf", "anyOf", "oneOf", "not")


def served_types(definition: Object) -> list[ResourceType]:
    spec = definition["spec"]
    names = spec["names"]
    made = []
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        subresources = {}
        declared = version.get("subresources") or {}
        if "status" in declared:
            subresources["status"] = names["kind"]
        if "scale" in declared:
            subresources["scale"] = "Scale"
        columns = tuple(
            Column(
                each["name"],
                each["type"],
                each["jsonPath"],
                each.get("priority", 0),
                each.get("description", ""),
                each.get("format", ""),
            )
            for each in version.get("additionalPrinterColumns") or []
        )
        made.append(
            ResourceType(
                spec["group"],
                version["name"],
                names["kind"],
                names["plural"],
                namespaced=spec["scope"] == "Namespaced",
                short_names=tuple(names.get("shortNames") or ()),
                categories=tuple(names.get("categories") or ()),
                subresources=subresources,
                columns=columns,
                schema=version["schema"]["openAPIV3Schema"],
                selectable=tuple(each["jsonPath"].lstrip(".") for each in version.get("selectableFields") or []),
                singular_name=names.get("singular", ""),
                list_kind_name=names.get("listKind", ""),
                custom=True,
            )
        )
    return made


def scale_paths(definition: Object, version: str) -> Object:
    found = next(each for each in definition["spec"]["versions"] if each["name"] == version)
    return dict(found["subresources"]["scale"])


def accepted_status(definition: Object) -> Object:
    """Status of a definition whose names are free, which it is once it is stored."""
    spec = definition["spec"]
    at = stamp()
    old = definition.get("status") or {}
    conditions = old.get("conditions") or [
        {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": at}
        for kind, reason, message in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        )
    ]
    stored = next(each["name"] for each in spec["versions"] if each.get("storage"))
    return {
        "conditions": conditions,
        "acceptedNames": spec["names"],
        "storedVersions": sorted({*(old.get("storedVersions") or []), stored}),
    }


def faults_of(definition: Object) -> list[FieldFault]:
    spec = definition["spec"]
    found: list[FieldFault] = []
    wanted = f"{spec['names']['plural']}.{spec['group']}"
    if definition["metadata"]["name"] != wanted:
        found.append(
            FieldFault(
                "metadata.name",
                f'must be spec.names.plural+"."+spec.group ({wanted})',
                value=definition["metadata"]["name"],
            )
        )
    if spec["names"]["plural"] != spec["names"]["plural"].lower():
        found.append(FieldFault("spec.names.plural", "must be lower case", value=spec["names"]["plural"]))
    if sum(bool(each.get("storage")) for each in spec["versions"]) != 1:
        found.append(FieldFault("spec.versions", "must have exactly one version marked as storage version", value=""))
    for at, version in enumerate(spec["versions"]):
        path = f"spec.versions[{at}].schema.openAPIV3Schema"
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            found.append(FieldFault(path, "schemas are required", "FieldValueRequired"))
            continue
        if schema.get("type") != "object":
            found.append(FieldFault(f"{path}.type", "must be object at the root", value=schema.get("type")))
        found += _structural(schema, path, root=True)
        found += cel.rule_errors(schema, path)
        for index, column in enumerate(version.get("additionalPrinterColumns") or []):
            if not column["jsonPath"].startswith("."):
                where = f"spec.versions[{at}].additionalPrinterColumns[{index}].jsonPath"
                found.append(FieldFault(where, "must be a simple json path starting with .", value=column["jsonPath"]))
    return found


def _structural(schema: Object, path: str, root: bool = False) -> Iterable[FieldFault]:
    if (
        not schema.get("type")
        and not schema.get("x-kubernetes-int-or-string")
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        yield FieldFault(
            f"{path}.type",
            "must not be empty for specified " + ("root" if root else "fields and items"),
            "FieldValueRequired",
        )
    if schema.get("$ref"):
        yield FieldFault(f"{path}.$ref", "$ref is not supported", "FieldValueForbidden")
    if schema.get("properties") and schema.get("additionalProperties") is not None:
        yield FieldFault(
            f"{path}.additionalProperties",
            "additionalProperties and properties are mutual exclusive",
            "FieldValueForbidden",
        )
    if schema.get("additionalProperties") is False:
        yield FieldFault(f"{path}.additionalProperties", "cannot be set to false", "FieldValueForbidden")
    if schema.get("uniqueItems"):
        yield FieldFault(
            f"{path}.uniqueItems",
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
            "FieldValueForbidden",
        )
    if schema.get("type") == "array" and not schema.get("items"):
        yield FieldFault(f"{path}.items", "must be specified", "FieldValueRequired")
    if schema.get("x-kubernetes-list-type") == "map":
        keys = schema.get("x-kubernetes-list-map-keys") or []
        items = schema.get("items") or {}
        if not keys:
            yield FieldFault(
                f"{path}.x-kubernetes-list-map-keys",
                "must not be empty if x-kubernetes-list-type is map",
                "FieldValueRequired",
            )
        for key in keys:
            part = (items.get("properties") or {}).get(key)
            if part is None or ("default" not in part and key not in (items.get("required") or [])):
                yield FieldFault(
                    f"{path}.items.properties[{key}].default",
                    "this property is in x-kubernetes-list-map-keys, so it must have a default or be a "
                    "required property",
                    "FieldValueRequired",
                )
    if root and "metadata" in (schema.get("properties") or {}):
        inner = schema["properties"]["metadata"]
        if set(inner.get("properties") or {}) - {"name", "generateName"}:
            yield FieldFault(
                f"{path}.properties[metadata]",
                "must not specify anything other than name and generateName, but metadata is implicitly specified",
                "FieldValueForbidden",
            )
    for junctor in _VALUE_ONLY:
        parts = schema.get(junctor)
        for at, part in enumerate([parts] if isinstance(parts, dict) else parts or []):
            yield from _value_only(part, f"{path}.{junctor}[{at}]", bool(schema.get("x-kubernetes-int-or-string")))
    for name, part in (schema.get("properties") or {}).items():
        if not (root and name == "metadata"):
            yield from _structural(part, f"{path}.properties[{name}]")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from _structural(schema[name], f"{path}.{name}")


def _value_only(schema: Object, path: str, int_or_string: bool) -> Iterable[FieldFault]:
    """Below a junctor no type, default, description or pruning may be set."""
    for name in ("type", "default", "description", "additionalProperties", "x-kubernetes-preserve-unknown-fields"):
        if name in schema and not (name == "type" and int_or_string):
            yield FieldFault(f"{path}.{name}", "must be empty to be structural", "FieldValueForbidden")
