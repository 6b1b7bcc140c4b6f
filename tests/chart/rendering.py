"""The chart as `helm template` renders it. Each rendering is a process of a tenth of a second: ask once, look often."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.kubernetes.tools import helm

CHART: Final = Path(__file__).parents[2] / "helm" / "stoker"
VALUES: Final = Path(__file__).parent / "values"
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Manifest = dict[str, Any]


def parse(text: str) -> list[Manifest]:
    return [document for document in yaml.load_all(text, Loader=_LOADER) if document]


def template(*arguments: str, release: str = "demo", values: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [helm(), "template", release, str(CHART), *arguments]
    if values is not None:
        command += ["--values", "-"]
    return subprocess.run(command, input=values, capture_output=True, text=True, timeout=180, check=False)


@cache
def rendered(*arguments: str, release: str = "demo", values: str | None = None) -> tuple[Manifest, ...]:
    done = template(*arguments, release=release, values=values)
    assert done.returncode == 0, done.stderr
    return tuple(parse(done.stdout))


@cache
def of_file(name: str) -> tuple[Manifest, ...]:
    """Of one of the values files of this folder."""
    return rendered("--values", str(VALUES / f"{name}.yaml"))


def value_files() -> list[str]:
    return sorted(path.stem for path in VALUES.glob("*.yaml"))


def named(documents: tuple[Manifest, ...], kind: str) -> dict[str, Manifest]:
    """Those of a kind, by name."""
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def one(documents: tuple[Manifest, ...], kind: str) -> Manifest:
    found = named(documents, kind)
    assert len(found) == 1, f"{len(found)} of kind {kind}: {sorted(found)}"
    return next(iter(found.values()))


def workload(documents: tuple[Manifest, ...]) -> Manifest:
    """The control plane's Deployment or StatefulSet."""
    found = [each for each in documents if each["kind"] in ("Deployment", "StatefulSet")]
    assert len(found) == 1
    return found[0]


def pod_of(documents: tuple[Manifest, ...]) -> Manifest:
    pod: Manifest = workload(documents)["spec"]["template"]
    return pod


def container_of(documents: tuple[Manifest, ...]) -> Manifest:
    container: Manifest = pod_of(documents)["spec"]["containers"][0]
    return container


def environment_of(documents: tuple[Manifest, ...]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container_of(documents)["env"]}
