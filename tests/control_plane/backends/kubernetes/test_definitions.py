"""The custom resource definitions: made from the models, structural, with rules in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from control_plane.backends.kubernetes.definitions import DEFINITIONS, render
from control_plane.backends.kubernetes.pool_spec import SlotPoolSpec, parse_pool
from control_plane.database import Database
from control_plane.errors import InvalidRequest
from control_plane.functions import FunctionStore
from control_plane.pod_spec import PodFields, quantity_value
from control_plane.settings import DatabaseSettings
from control_plane.spec import FunctionSpec, parse_mapping

FOLDER = Path(__file__).parents[4] / "helm" / "stoker" / "files" / "crds"
MODELS: dict[str, tuple[type[BaseModel], set[str]]] = {
    "functions.yaml": (FunctionSpec, {"tenant"}),
    "slotpools.yaml": (SlotPoolSpec, set()),
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return found


def whole_schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read(name)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from nodes(each, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name], f"{path}[]")


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_files_are_what_the_models_say(name: str) -> None:
    there = (FOLDER / name).read_text(encoding="utf-8")
    assert there == render(DEFINITIONS[name]()), "run python -m control_plane.backends.kubernetes.definitions"


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_the_model_is_in_the_schema_and_nothing_else_is(name: str) -> None:
    model, more = MODELS[name]

    def compare(model: type[BaseModel], schema: dict[str, Any], more: set[str]) -> None:
        assert set(schema["properties"]) == set(model.model_fields) | more
        for field, info in model.model_fields.items():
            inner = [each for each in (info.annotation, *getattr(info.annotation, "__args__", ())) if is_part(each)]
            if inner:
                there = schema["properties"][field]
                compare(inner[0], there.get("items") or there.get("additionalProperties") or there, set())

    compare(model, whole_schema(name)["properties"]["spec"], more)


def is_part(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_schema_is_structural(name: str) -> None:
    """https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
    #specifying-a-structural-schema: a type at every node, and no properties beside additionalProperties."""
    for path, node in nodes(whole_schema(name)):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert not {"$ref", "anyOf", "allOf", "oneOf", "not", "default", "title", "const"} & node.keys(), path
        assert not isinstance(node.get("exclusiveMinimum"), int | float) or node["exclusiveMinimum"] is True, path
        if node.get("x-kubernetes-list-type") == "set":
            assert node["items"]["type"] == "string", path
        if any("self.all(" in rule["rule"] for rule in node.get("x-kubernetes-validations", ())):
            # What a rule may cost is estimated from the bounds of what it runs over.
            assert node.get("maxProperties") or any(
                each.get("maxProperties") or each.get("maxItems") for each in node.get("properties", {}).values()
            ), path


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_rule_says_in_words_what_is_wrong(name: str) -> None:
    rules = [rule for _, node in nodes(whole_schema(name)) for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) >= 6
    for rule in rules:
        assert len(rule["message"]) > 20 and "self" not in rule["message"], rule


def test_the_definitions_have_short_names_columns_and_a_status_of_their_own() -> None:
    for name, (kind, short) in {"functions.yaml": ("Function", "fn"), "slotpools.yaml": ("SlotPool", "sp")}.items():
        spec = read(name)["spec"]
        assert (spec["names"]["kind"], spec["names"]["shortNames"], spec["scope"]) == (kind, [short], "Namespaced")
        (version,) = spec["versions"]
        assert version["name"] == "v1alpha1" and version["subresources"] == {"status": {}}
        properties = whole_schema(name)["properties"]
        for column in version["additionalPrinterColumns"]:
            path = column["jsonPath"].split("[")[0].strip(".").split(".")
            if path[0] == "metadata":
                continue
            node = properties
            for part in path:
                node = node[part]
                node = node.get("properties", node)


# --- the models ---


def test_a_function_may_say_what_its_slots_are_and_old_specs_keep_their_digest() -> None:
    plain = parse_mapping({"name": "f", "model": "file:///m"})
    assert plain.pod is None and '"pod"' not in plain.canonical()
    given = {"name": "f", "model": "file:///m", "pod": {"devices": {"nvidia.com/gpu": 2}, "slotPool": "gpus"}}
    own = parse_mapping(given)
    assert own.pod is not None and own.pod.devices == {"nvidia.com/gpu": 2}
    assert own.digest() != plain.digest()


@pytest.mark.parametrize(
    ("pod", "word"),
    [
        ({"devices": {"gpu": 1}}, "domain"),
        ({"devices": {"nvidia.com/gpu": 0}}, "1 to 64"),
        ({"labels": {"stoker.dev/class": "x"}}, "Stoker's own"),
        ({"env": {"STOKER_STORE": "x"}}, "reserved"),
        ({"resources": {"limits": {"memory": "4Gb"}}}, "quantity"),
        ({"volumeMounts": [{"name": "data", "mountPath": "/data"}]}, "no volume"),
        ({"hostNetwork": True}, "no such field"),
    ],
)
def test_pod_fields_that_cannot_be_are_refused_in_words(pod: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        parse_mapping({"name": "f", "model": "file:///m", "pod": pod})


def test_a_memory_limit_has_to_hold_the_warm_pool() -> None:
    with pytest.raises(InvalidRequest, match="does not hold the warm pool"):
        parse_pool({"pool": "8Gi", "resources": {"limits": {"memory": "8Gi"}}})
    assert parse_pool({"pool": "8Gi", "resources": {"limits": {"memory": "9Gi"}}}).pool == "8Gi"


def test_a_pool_counts_places_by_its_devices() -> None:
    assert parse_pool({}).places == 4
    assert parse_pool({"devices": {"nvidia.com/gpu": 8}}).places == 8
    assert parse_pool({"devices": {"nvidia.com/gpu": 8}, "replicas": 3}).places == 3
    with pytest.raises(InvalidRequest, match="above most"):
        parse_pool({"least": 3, "most": 2})


def test_quantities_are_those_of_kubernetes() -> None:
    assert [quantity_value(each) for each in ("500m", "2", 3, "4Gi", "1.5G")] == [0.5, 2, 3, 4 * 2**30, 1.5e9]
    assert PodFields(devices={"amd.com/gpu": 1}).devices == {"amd.com/gpu": 1}


async def test_where_slots_are_no_pods_a_function_that_says_what_they_are_is_refused(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "stoker.db"), DatabaseSettings())
    try:
        functions = FunctionStore(database)
        spec = parse_mapping({"name": "f", "model": "file:///m", "pod": {"slotPool": "gpus"}})
        with pytest.raises(InvalidRequest, match="no pods"):
            await functions.put(spec, "default")
        functions.slots_are_pods = True
        assert (await functions.put(spec, "default")).revision == 1
    finally:
        await database.close()
