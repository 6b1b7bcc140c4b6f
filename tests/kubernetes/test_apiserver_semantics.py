"""What the server makes of patches, applies, schemas, rules and rights: each module by itself, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes.apiserver import cel, crds, ownership, patches, schemas, structural, tables
from tests.kubernetes.apiserver.access import Access, Attributes, service_account_user
from tests.kubernetes.apiserver.admission import restricted_faults
from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.apiserver.ownership import Manager
from tests.kubernetes.apiserver.protobuf import read_protobuf
from tests.kubernetes.apiserver.resources import builtin_types
from tests.kubernetes.apiserver.selectors import matches, parse_fields, parse_labels
from tests.kubernetes.apiserver.store import Store
from tests.kubernetes.quantities import parse_quantity, pod_requests, shown_quantity

Object = dict[str, Any]
POD = schemas.of_definition("io.k8s.api.core.v1.Pod")


def a_pod(**spec: Any) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}


def applied(live: Object | None, config: Object, who: str, force: bool = False) -> Object:
    return ownership.applied(live, config, Manager(who, "Apply", "v1"), POD, True, force)


def test_an_apply_merges_lists_by_their_keys_and_takes_back_only_its_own() -> None:
    first = applied(None, a_pod(containers=[{"name": "a", "image": "a:1"}, {"name": "b", "image": "b:1"}]), "one")
    second = applied(first, a_pod(containers=[{"name": "b", "command": ["x"]}, {"name": "c", "image": "c:1"}]), "two")
    assert [each["name"] for each in second["spec"]["containers"]] == ["a", "b", "c"]
    third = applied(second, a_pod(containers=[{"name": "a", "image": "a:1"}]), "one")
    # Somebody still owns a field of b: it stays, without what the first had said of it.
    assert third["spec"]["containers"] == [
        {"name": "a", "image": "a:1"}, {"name": "b", "command": ["x"]}, {"name": "c", "image": "c:1"},
    ]  # fmt: skip
    fourth = applied(third, a_pod(containers=[{"name": "c", "image": "c:1"}]), "two")
    assert [each["name"] for each in fourth["spec"]["containers"]] == ["a", "c"]


def test_an_apply_that_says_the_same_shares_and_one_that_differs_conflicts() -> None:
    first = applied(None, a_pod(restartPolicy="Always"), "one")
    shared = applied(first, a_pod(restartPolicy="Always"), "two")
    assert len(shared["metadata"]["managedFields"]) == 2
    with pytest.raises(ApiError) as refused:
        applied(shared, a_pod(restartPolicy="Never"), "three")
    assert refused.value.code == 409
    assert {each["field"] for each in refused.value.details["causes"]} == {".spec.restartPolicy"}
    forced = applied(shared, a_pod(restartPolicy="Never"), "three", force=True)
    owners = {each["manager"] for each in forced["metadata"]["managedFields"]}
    assert owners == {"three"} and forced["spec"]["restartPolicy"] == "Never"


def test_an_update_takes_ownership_of_what_it_changed_and_of_nothing_else() -> None:
    live = applied(None, a_pod(restartPolicy="Always", nodeName="n"), "one")
    changed = {**live, "spec": {"restartPolicy": "Never", "nodeName": "n"}}
    entries = ownership.after_write(live, changed, Manager("two", "Update", "v1"), POD, True)
    assert {each["manager"]: each["fieldsV1"] for each in entries} == {
        "one": {"f:spec": {"f:nodeName": {}}},
        "two": {"f:spec": {"f:restartPolicy": {}}},
    }


def test_a_strategic_patch_deletes_orders_and_replaces_by_directive() -> None:
    live = a_pod(
        containers=[
            {"name": "a", "image": "a"},
            {"name": "b", "image": "b", "args": ["1"]},
            {"name": "c", "image": "c"},
        ],
        tolerations=[{"key": "x"}],
    )
    live["metadata"]["finalizers"] = ["one", "two"]

    def patched(body: Object) -> Object:
        found: Object = patches.strategic_patch(live, body, POD)
        return found

    gone = patched({"spec": {"containers": [{"$patch": "delete", "name": "a"}, {"name": "b", "args": ["2"]}]}})
    assert gone["spec"]["containers"] == [{"name": "b", "image": "b", "args": ["2"]}, {"name": "c", "image": "c"}]
    order = {"spec": {"$setElementOrder/containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}]}}
    assert [each["name"] for each in patched(order)["spec"]["containers"]] == ["c", "a", "b"]
    assert patched({"spec": {"$retainKeys": ["tolerations"]}})["spec"] == {"tolerations": [{"key": "x"}]}
    # No merge key: the list is replaced whole.
    assert patched({"spec": {"tolerations": [{"key": "y"}]}})["spec"]["tolerations"] == [{"key": "y"}]
    primitive = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["one"], "finalizers": ["three"]}}
    assert patched(primitive)["metadata"]["finalizers"] == ["two", "three"]
    assert patched({"metadata": {"finalizers": None}})["metadata"] == {"name": "p"}


def test_json_patches_apply_whole_or_not_at_all() -> None:
    live = {"a": {"b": [1, 2]}}
    moved = patches.json_patch(
        live, [{"op": "move", "from": "/a/b/0", "path": "/a/b/-"}, {"op": "copy", "from": "/a/b", "path": "/c"}]
    )
    assert moved == {"a": {"b": [2, 1]}, "c": [2, 1]}
    with pytest.raises(ApiError):
        patches.json_patch(
            live, [{"op": "add", "path": "/a/x", "value": 1}, {"op": "test", "path": "/a/b/0", "value": 9}]
        )
    assert live == {"a": {"b": [1, 2]}}


SCHEMA: Object = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "properties": {
                "port": {"x-kubernetes-int-or-string": True},
                "mode": {"type": "string", "default": "fast", "nullable": True},
                "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                "rules": {
                    "type": "array",
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "x-kubernetes-validations": [{"rule": "self.size >= oldSelf.size", "message": "may only grow"}],
                        "properties": {"name": {"type": "string"}, "size": {"type": "integer", "default": 1}},
                    },
                },
            },
        }
    },
}


def checked(spec: Object) -> tuple[Object, list[str], list[str]]:
    value, walk = structural.checked_custom(SCHEMA, {"metadata": {"name": "x"}, "spec": spec})
    return value["spec"], [each.text() for each in walk.faults], walk.unknown


def test_custom_resources_are_pruned_and_defaulted_at_every_depth() -> None:
    spec, faults, unknown = checked({"open": {"any": {"thing": 1}}, "rules": [{"name": "a", "typo": 1}], "typo": 2})
    assert spec == {"open": {"any": {"thing": 1}}, "rules": [{"name": "a", "size": 1}], "mode": "fast"}
    assert faults == [] and sorted(unknown) == ["spec.rules[0].typo", "spec.typo"]
    assert checked({"mode": None})[0] == {"mode": None}
    assert "Duplicate value" in checked({"rules": [{"name": "a"}, {"name": "a"}]})[1][0]
    assert checked({"port": "http"})[1] == checked({"port": 80})[1] == []
    assert "integer or string" in checked({"port": 1.5})[1][0]
    assert "spec.rules[0].name: Required value" in checked({"rules": [{}]})[1]


def test_transition_rules_of_list_items_compare_what_has_the_same_key() -> None:
    def rules(*pairs: tuple[str, int]) -> Object:
        return {"spec": {"rules": [{"name": name, "size": size} for name, size in pairs]}}

    old = rules(("a", 5), ("b", 1))
    assert cel.evaluate(SCHEMA, rules(("new", 0), ("b", 2), ("a", 5)), old) == []
    faults = cel.evaluate(SCHEMA, rules(("b", 1), ("a", 4)), old)
    assert [each.text() for each in faults] == ['spec.rules[1]: Invalid value: "object": may only grow']
    # There is no transition at birth.
    assert cel.evaluate(SCHEMA, rules(("a", 0)), None) == []


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        (
            "quantity(self.memory) == quantity('2Gi') && quantity('1').isGreaterThan(quantity('999m')) "
            "&& quantity('1Gi').add(quantity('1Gi')).compareTo(quantity(self.memory)) == 0",
            True,
        ),
        ("!has(self.absent) || self.absent > 0", True),
        ("self.list.all(each, each > 0) && self.list.isSorted() && self.list.sum() == 6", True),
        ("self.name.matches('^[a-z]+$') && self.name.find('b.') == 'bc'", True),
        ("self.?absent.orValue(7) == 7", True),
        ("isURL(self.url) && duration('90s') > duration('1m')", True),
        ("self.list.exists_one(each, each == 9)", False),
    ],
)
def test_rules_know_the_libraries_of_kubernetes(rule: str, holds: bool) -> None:
    schema = {"type": "object", "x-kubernetes-validations": [{"rule": rule}]}
    value = {"memory": "2048Mi", "list": [1, 2, 3], "name": "abc", "url": "https://x/y"}
    assert (cel.evaluate(schema, value, None) == []) is holds


def test_a_definition_that_is_no_structural_schema_is_refused() -> None:
    def faults(schema: Object) -> list[str]:
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        names = {"kind": "T", "plural": "ts"}
        body = {"metadata": {"name": "ts.x.dev"}, "spec": {"group": "x.dev", "names": names, "versions": [version]}}
        return [each.text() for each in crds.faults_of(body)]

    assert faults({"type": "object"}) == []
    assert "must not be empty" in faults({"type": "object", "properties": {"a": {}}})[0]
    wrong = {"type": "object", "x-kubernetes-validations": [{"rule": "self.a >"}]}
    assert "compilation failed" in faults(wrong)[0]
    both = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "string"}}
    assert "mutual exclusive" in faults(both)[0]


def test_roles_allow_by_verb_resource_subresource_and_name() -> None:
    store = Store()

    def put(kind: str, plural: str, namespace: str, **parts: Any) -> None:
        metadata = {"name": kind.lower(), "namespace": namespace, "uid": kind}
        store.put(("rbac.authorization.k8s.io", plural), {"kind": kind, "metadata": metadata, **parts})

    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "create"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create"], "resourceNames": ["mine"]},
        {"apiGroups": ["x.dev"], "resources": ["things/status"], "verbs": ["patch"]},
    ]
    put("ClusterRole", "clusterroles", "", rules=rules)
    subject = {"kind": "ServiceAccount", "name": "sa", "namespace": "ns"}
    put("RoleBinding", "rolebindings", "ns", roleRef={"kind": "ClusterRole", "name": "clusterrole"}, subjects=[subject])
    access, user = Access(store), service_account_user("ns", "sa")

    def may(verb: str, group: str, resource: str, namespace: str = "ns", name: str = "") -> bool:
        return access.allows(user, Attributes(verb, group, resource, namespace, name))

    assert may("get", "", "pods") and may("get", "", "secrets", name="mine") and may("patch", "x.dev", "things/status")
    assert not may("get", "", "pods", namespace="other")
    assert not may("get", "", "pods/log") and not may("delete", "", "pods")
    assert not may("get", "", "secrets", name="yours") and not may("create", "", "secrets")
    assert not may("patch", "x.dev", "things")
    assert not access.allows(service_account_user("ns", "other"), Attributes("get", "", "pods", "ns"))


def test_selectors_choose_as_they_are_written() -> None:
    labels = {"app": "x", "tier": "web", "n": "5"}
    for text, holds in {
        "app=x": True, "app==x,tier!=db": True, "tier in (web, db)": True, "tier notin (web)": False, "!absent": True,
        "absent": False, "n>4": True, "n<5": False, "absent!=x": True,
    }.items():  # fmt: skip
        assert parse_labels(text)(labels) is holds, text
    assert matches({"matchExpressions": [{"key": "app", "operator": "In", "values": ["x"]}]}, labels)
    assert not matches(None, labels) and matches({}, labels)
    pods = next(each for each in builtin_types() if each.plural == "pods")
    assert parse_fields("spec.nodeName!=,status.phase=Running", pods)(
        {"spec": {"nodeName": "n"}, "status": {"phase": "Running"}}
    )
    with pytest.raises(ApiError):
        parse_fields("spec.containers=x", pods)


def test_json_paths_of_printer_columns() -> None:
    value = {"status": {"conditions": [{"type": "Ready", "status": "True"}], "list": [1, 2]}, "a.b": 3}
    assert tables.json_path(value, '.status.conditions[?(@.type=="Ready")].status') == ["True"]
    assert tables.json_path(value, ".status.list[*]") == [1, 2] and tables.json_path(value, ".status.list[-1]") == [2]
    assert tables.json_path(value, r".a\.b") == [3] and tables.json_path(value, ".nothing.here") == []


def test_protobuf_of_a_typed_client() -> None:
    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    metadata = field(1, b"s") + field(2, b"") + b"\x38\x00" + field(8, b"")
    entry = field(1, b"k") + field(2, b"\xff\x00")
    secret = field(1, metadata) + field(2, entry) + field(3, b"Opaque") + b"\x28\x00"
    envelope = b"k8s\x00" + field(1, field(1, b"v1") + field(2, b"Secret")) + field(2, secret)
    # A zero where Go has no pointer is left out; `immutable` is a pointer, and its false is said.
    assert read_protobuf(envelope) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"k": "/wA="},
        "type": "Opaque",
        "immutable": False,
    }


def test_quantities_and_what_a_pod_asks_for() -> None:
    assert parse_quantity("500m") * 2 == 1 and parse_quantity("1Ki") == 1024 and parse_quantity("1e3") == 1000
    assert shown_quantity(parse_quantity("0.5")) == "500m"
    with pytest.raises(ValueError):
        parse_quantity("lots")
    spec = {
        "initContainers": [{"resources": {"requests": {"cpu": "3"}}}],
        "containers": [
            {"resources": {"limits": {"memory": "1Gi", "x/y": "1"}}},
            {"resources": {"requests": {"cpu": "1"}}},
        ],
    }
    asked = {name: str(amount) for name, amount in pod_requests(spec).items()}
    assert asked == {"cpu": "3", "memory": str(2**30), "x/y": "1"}


def test_pods_that_are_not_restricted_are_told_what_is_missing() -> None:
    strict = {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert list(restricted_faults({"containers": [{"name": "a", "securityContext": strict}]})) == []
    broken = list(
        restricted_faults({"containers": [{"name": "a"}], "volumes": [{"name": "h", "hostPath": {"path": "/"}}]})
    )
    assert len(broken) == 5 and any("hostPath" in each for each in broken)


def test_every_imitated_kind_has_its_schema() -> None:
    missing = [each.kind for each in builtin_types() if not schemas.of_definition(each.definition)]
    assert missing == []
