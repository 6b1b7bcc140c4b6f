"""Every value does something, every other is refused, and each is explained where it stands.

A leaf of values.yaml is read if the chart renders otherwise once it is changed, with everything switched on that it is
about. Limits: that it is read, not that it does the right thing: that is `test_chart`'s.
"""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from typing import Any, Final

import pytest
import yaml

from control_plane.environment import ENVIRONMENT
from tests.chart.rendering import CHART, template

SCHEMA: Final = json.loads((CHART / "values.schema.json").read_text())
TEXT: Final = (CHART / "values.yaml").read_text()
DEFAULTS: Final = yaml.safe_load(TEXT)
Path = tuple[str, ...]

PODS: Final = {
    "slots": {"mode": "pods"}, "database": {"existingSecret": "db"}, "objectStore": {"uri": "s3://bucket/p"},
}  # fmt: skip
SQL: Final = {
    "database": {"url": "postgresql://u@h/d", "existingSecret": "db"}, "objectStore": {"uri": "s3://bucket/p"},
}  # fmt: skip
EMBEDDED: Final = {"slots": {"mode": "embedded"}}
BASES: Final[dict[str, dict[str, Any]]] = {
    # What has to be switched on for a value to matter; the longest beginning of its path counts.
    "autoscaling": {**PODS, "autoscaling": {"enabled": True}},
    "autoscaling.enabled": PODS,
    "replicas": PODS,
    "preStopSeconds": PODS,
    "resources": PODS,
    "database.url": {"objectStore": {"uri": "s3://bucket/p"}},
    "database.existingSecret": {"objectStore": {"uri": "s3://bucket/p"}},
    "slot": EMBEDDED,
    "serviceAccount.create": {"serviceAccount": {"name": "mine"}},
    "database.passwordKey": SQL,
    "database.urlKey": PODS,
    "database.caSecret": SQL,
    "database.caKey": {**SQL, "database": {**SQL["database"], "caSecret": "ca"}},
    "objectStore.existingSecret": {"objectStore": {"uri": "s3://bucket/p"}},
    "objectStore.accessKeyIdKey": {"objectStore": {"uri": "s3://bucket/p", "existingSecret": "s"}},
    "objectStore.secretAccessKeyKey": {"objectStore": {"uri": "s3://bucket/p", "existingSecret": "s"}},
    "agentSecret": {"slots": {"mode": "pods"}},
    "rbac": {"slots": {"mode": "pods"}},
    "crds": {"slots": {"mode": "pods"}},
    "slots.pools": {"slots": {"mode": "pods"}},
    "slots.defaultPool": {"slots": {"mode": "pods"}},
    "slots.functionObjects": {"slots": {"mode": "pods"}},
    "slots.serviceAccount": {"slots": {"mode": "pods"}},
    "slots.prepull": {"slots": {"mode": "pods", "prepull": {"enabled": True}}},
    "slots.prepull.enabled": {"slots": {"mode": "pods"}},
    "slots.podDisruptionBudget.enabled": {"slots": {"mode": "pods"}},
    "slots.podDisruptionBudget": {"slots": {"mode": "pods", "podDisruptionBudget": {"enabled": True}}},
    "tracing.share": {"tracing": {"endpoint": "http://collector:4318"}},
    "topologySpread": PODS,
    "podDisruptionBudget": PODS,
    "networkPolicy.egress": {"networkPolicy": {"egress": {"enabled": True}}},
    "networkPolicy.egress.slots": {"slots": {"mode": "pods"}, "networkPolicy": {"egress": {"enabled": True}}},
    "networkPolicy.egress.enabled": {},
    "monitoring.serviceMonitor": {"monitoring": {"serviceMonitor": {"enabled": True}}},
    "monitoring.podMonitor": {"monitoring": {"podMonitor": {"enabled": True}}},
    "monitoring.serviceMonitor.enabled": {},
    "monitoring.podMonitor.enabled": {},
    "ingress": {"ingress": {"enabled": True, "hosts": ["h.example"]}},
    "ingress.enabled": {"ingress": {"hosts": ["h.example"]}},
    "httpRoute": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gw"}]}},
    "httpRoute.enabled": {"httpRoute": {"parentRefs": [{"name": "gw"}]}},
}
OTHER: Final[dict[str, Any]] = {
    # Another value, where no other follows from the default's type.
    "image.pullPolicy": "Always",
    "image.digest": "sha256:" + "0" * 64,
    "slots.mode": "embedded",
    "slots.functionObjects": "all",
    "service.type": "NodePort",
    "tracing.endpoint": "http://collector:4318",
    "tracing.share": 0.5,
    "slot.pool": "7Gi",
    "slot.devices": {"nvidia.com/gpu": 1},
    "slot.resources.requests.memory": "7Gi",
    "persistence.size": "7Gi",
    "scratch.size": "7Gi",
    "allowedModels": ["s3://other/*"],
    "settings": {"STOKER_LEASE_S": "9"},
    "database.url": "postgresql://u@h/d",
    "objectStore.uri": "s3://other/p",
    "topologySpread.host": "DoNotSchedule",
    "topologySpread.zone": "DoNotSchedule",
    "monitoring.serviceMonitor.interval": "9s",
    "monitoring.podMonitor.interval": "9s",
    "httpRoute.timeout": "9s",
    "tolerations": [{"key": "k"}],
    "affinity": {"nodeAffinity": {}},
    "networkPolicy.from": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    "networkPolicy.metricsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    "networkPolicy.egress.controlPlane": [{"ports": [{"port": 443}]}],
    "networkPolicy.egress.slots": [{"ports": [{"port": 443}]}],
    "httpRoute.parentRefs": [{"name": "other"}],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraEnvFrom": [{"secretRef": {"name": "a"}}],
    "extraVolumes": [{"name": "a", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "a", "mountPath": "/a"}],
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}],
    "podDisruptionBudget.maxUnavailable": 2,
}


def leaves(values: dict[str, Any], above: Path = ()) -> list[Path]:
    found: list[Path] = []
    for name, value in values.items():
        here = (*above, name)
        found += leaves(value, here) if isinstance(value, dict) and value else [here]
    return found


def other(path: Path, value: Any) -> Any:
    dotted = ".".join(path)
    if dotted in OTHER:
        return OTHER[dotted]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return ["other"]
    if isinstance(value, dict):
        return {"other": "value"}
    return re.sub(r"\d", "7", value) if re.fullmatch(r"[0-9]+[A-Za-z]*", value) else "other"


def base_of(path: Path) -> dict[str, Any]:
    for length in range(len(path), 0, -1):
        if (dotted := ".".join(path[:length])) in BASES:
            return BASES[dotted]
    return {}


def with_value(values: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    place = changed
    for name in path[:-1]:
        place = place.setdefault(name, {})
    place[path[-1]] = value
    return changed


_RANDOM: Final = re.compile(r"(admin-key|agent-secret): [A-Za-z0-9+/=]{40,}")


@cache
def shown(values: str) -> str:
    done = template(values=values)
    assert done.returncode == 0, f"{values}: {done.stderr}"
    return _RANDOM.sub("", done.stdout)


@pytest.mark.parametrize("part", DEFAULTS)
def test_every_value_is_read(part: str) -> None:
    """In parts, each a few renderings: of a tenth of a second of a processor."""
    unread = []
    for path in leaves({part: DEFAULTS[part]}):
        base, value = base_of(path), DEFAULTS
        for name in path:
            value = value[name]
        if shown(json.dumps(with_value(base, path, other(path, value)))) == shown(json.dumps(base)):
            unread.append(".".join(path))
    assert not unread


def unexplained(text: str) -> list[str]:
    """Keys without a comment: in the line before, or, of a key that only has others in it, in the line after."""
    lines, bare = text.splitlines(), list[str]()
    for number, line in enumerate(lines):
        if not re.match(r" *[a-z]\w*:", line):
            continue
        before, after = ["", *lines][number], [*lines, ""][number + 1]
        only_others = line.endswith(":")
        if not (before.lstrip().startswith("#") or (only_others and after.lstrip().startswith("#"))):
            bare.append(line.strip())
    return bare


def test_every_value_is_explained_where_it_stands() -> None:
    assert not unexplained(TEXT)
    assert unexplained("# What.\na: 1\nb:\n  # Why.\n  c: 1\n  d: 1\n") == ["d: 1"]


def closed(schema: dict[str, Any], path: str = "") -> list[str]:
    """Objects with named properties that would take any other, by path."""
    found = []
    if "properties" in schema and schema.get("additionalProperties") is not False:
        found.append(path)
    for name, part in schema.get("properties", {}).items():
        found += closed(part, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            found += closed(schema[name], f"{path}.{name}")
    return found


def test_the_schema_closes_every_object_whose_fields_it_names() -> None:
    assert not closed(SCHEMA)


def test_the_schema_knows_exactly_what_there_is() -> None:
    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        named = set(schema["properties"]) - {"global"}
        assert named == set(values), path
        for name, value in values.items():
            if isinstance(value, dict) and "properties" in schema["properties"][name]:
                if path + name in ("affinity",):
                    continue  # of Kubernetes' making: all of it may be left out
                compare(schema["properties"][name], value, f"{path}{name}.")

    compare(SCHEMA, DEFAULTS, "")


@pytest.mark.parametrize(
    "setting",
    [
        "unknown=1", "image.unknown=1", "slots.unknown=1", "slots.pools.default.unknown=1", "slot.resources.claims=1",
        "networkPolicy.egress.unknown=1", "monitoring.podMonitor.unknown=1", "tolerations[0].keey=a",
        "slots.pools.Upper.least=1", "slots.pools.default.devices.gpu=0", "drainSeconds=-1", "slot.pool=lots",
        "image.pullPolicy=Sometimes", "slots.prepull.image=a", "tracing.share=2", "tracing.endpoint=c:4318",
        "networkPolicy.enabled=yes", "database.url=mysql://h/d", "objectStore.uri=gs://b",
        "settings.PATH=/bin", "replicas=two", "test.model=", "ingress.hosts=h.example", "image.digest=abc",
    ],
)  # fmt: skip
def test_what_is_unknown_or_impossible_is_refused(setting: str) -> None:
    done = template("--set", setting)
    assert done.returncode != 0
    assert "specifications of the schema" in done.stderr, done.stderr


def test_pools_take_what_their_definition_takes() -> None:
    definition = yaml.safe_load((CHART / "files" / "crds" / "slotpools.yaml").read_text())
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    pool = SCHEMA["properties"]["slots"]["properties"]["pools"]["additionalProperties"]
    assert set(pool["properties"]) == set(spec["properties"])


def test_the_settings_that_other_values_make_are_those_that_exist() -> None:
    checks = (CHART / "templates" / "_checks.tpl").read_text()
    names = set(re.findall(r'"(STOKER_[A-Z_]+)"', checks)) - {"STOKER_DATA_DIR"}
    assert names <= set(ENVIRONMENT), names - set(ENVIRONMENT)
