"""Manifests against the API schemas of Kubernetes releases, strictly: a field that a release does not know is a fault.

The schemas are those that `kubernetes-validate` carries; its own function reads megabytes of them for every object.
Limits: what no schema says (immutable fields, references) is an API server's to find; kinds of other groups than
Kubernetes' own are not known here.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

RELEASES: Final = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
_SCHEMAS: Final = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


def _folder(release: str) -> Path:
    return _SCHEMAS / f"v{release}.0-local-strict"


@cache
def _registry(release: str) -> Any:
    return Resource.from_contents(json.loads((_folder(release) / "_definitions.json").read_text())) @ Registry()


@cache
def _validator(release: str, kind: str, api_version: str) -> Draft202012Validator | None:
    """None for a kind that the release does not have."""
    api = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    path = _folder(release) / f"{kind.lower()}-{api}.json"
    if not path.exists():
        return None
    schema = json.loads(path.read_text())
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _registry(release))


def is_known(manifest: dict[str, Any]) -> bool:
    return all(_validator(release, manifest["kind"], manifest["apiVersion"]) is not None for release in RELEASES)


def faults(manifest: dict[str, Any]) -> list[str]:
    """What any of the releases has against it."""
    found = []
    for release in RELEASES:
        validator = _validator(release, manifest["kind"], manifest["apiVersion"])
        if validator is None:
            found.append(f"{release} has no {manifest['apiVersion']} {manifest['kind']}")
            continue
        for error in validator.iter_errors(manifest):
            found.append(f"{release}: {'.'.join(str(part) for part in error.absolute_path)}: {error.message[:300]}")
    return found
