"""What becomes of a function that is there twice, as an object of the cluster and over the API: one rule, and the forms
in which each writes it.

An object whose generation is another than both last agreed on has been changed by somebody: it wins, whatever the API
was told meanwhile. One that has not is brought in line with the API. Deleting either deletes the other. Limits: what
both changed is not merged.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from control_plane.backends.kubernetes.api import FUNCTIONS, Object
from control_plane.backends.kubernetes.bonds import Bond
from control_plane.backends.kubernetes.pods import INSTANCE_LABEL
from control_plane.backends.kubernetes.watching import name_of
from control_plane.lanes import FunctionKey
from control_plane.tenants import DEFAULT_TENANT

if TYPE_CHECKING:
    from control_plane.spec import FunctionSpec

MADE_BY: Final = "stoker.dev/made-by"
"""Annotation of objects that functions made over the API have got."""


class Step(enum.StrEnum):
    NOTHING = "nothing"
    REFUSE = "refuse"
    """The object cannot be deployed; its status says why."""
    DEPLOY = "deploy"
    """The object is told to the API."""
    NOTE = "note"
    """Both say the same, which is only to be remembered."""
    WRITE = "write"
    """The API's spec is written into the object."""
    CREATE_OBJECT = "create_object"
    DELETE_OBJECT = "delete_object"
    DELETE_FUNCTION = "delete_function"
    FORGET = "forget"
    """Both are gone."""


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    uid: str
    generation: int
    digest: str | None
    """Of the spec it asks for; None: it asks for none that can be."""


def decide(found: ObjectFacts | None, digest: str | None, bond: Bond | None, *, make_objects: bool) -> Step:
    """`digest`: of the function's current spec; None: there is no function."""
    if found is None:
        if bond is not None:
            return Step.FORGET if digest is None else Step.DELETE_FUNCTION
        return Step.CREATE_OBJECT if digest is not None and make_objects else Step.NOTHING
    if bond is None or (bond.uid, bond.generation) != (found.uid, found.generation):
        if found.digest is None:
            return Step.REFUSE
        return Step.NOTE if found.digest == digest else Step.DEPLOY
    if digest is None:
        return Step.DELETE_OBJECT
    return Step.NOTHING if digest == bond.digest else Step.WRITE


# --- forms ---


def key_of(found: Object) -> FunctionKey:
    spec = found.get("spec") or {}
    return str(spec.get("tenant") or DEFAULT_TENANT), str(spec.get("name") or name_of(found))


def spec_of(found: Object) -> dict[str, Any]:
    """The function's spec as the API takes it."""
    spec = {name: value for name, value in (found.get("spec") or {}).items() if name != "tenant"}
    spec.setdefault("name", name_of(found))
    scaling = spec.get("scaling")
    if isinstance(scaling, dict) and isinstance(scaling.get("keep_alive"), str) and scaling["keep_alive"] != "auto":
        spec["scaling"] = {**scaling, "keep_alive": float(scaling["keep_alive"])}
    return spec


def object_name(key: FunctionKey) -> str:
    """Of an object that is made for a function: other tenants' functions may have the same name."""
    tenant, name = key
    return name if tenant == DEFAULT_TENANT else f"{name}.{tenant.lower()}"


def object_spec(spec: FunctionSpec, tenant: str, name: str) -> dict[str, Any]:
    """What an object of this name says of a function; what is as it would be anyway is left out."""
    said = spec.model_dump(mode="json", exclude_defaults=True)
    if said.get("name") == name:
        del said["name"]
    if tenant != DEFAULT_TENANT:
        said["tenant"] = tenant
    scaling = said.get("scaling") or {}
    keep_alive = scaling.get("keep_alive")
    if isinstance(keep_alive, int | float):
        # A schema knows whole numbers and words there, but no fractions.
        scaling["keep_alive"] = int(keep_alive) if keep_alive == int(keep_alive) else f"{keep_alive:g}"
    return said


def new_object(spec: FunctionSpec, key: FunctionKey, release: str) -> Object:
    name = object_name(key)
    return {
        "apiVersion": FUNCTIONS.api_version,
        "kind": FUNCTIONS.kind,
        "metadata": {"name": name, "labels": {INSTANCE_LABEL: release}, "annotations": {MADE_BY: "api"}},
        "spec": object_spec(spec, key[0], name),
    }
