"""The pod of a slot: what is in it and what is not, and which slots are alike."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from control_plane.backends.kubernetes.classes import Kind, Pool, kind_of, pool_for
from control_plane.backends.kubernetes.home import info_of
from control_plane.backends.kubernetes.pods import POOL_LABEL, Service, marks, pod_name, pod_of
from control_plane.backends.kubernetes.pool_spec import parse_pool
from control_plane.pod_spec import PodFields
from function_runtime.protocol import peer_token

SERVICE = Service("rel", b"the secret of all agents")


def pool(name: str = "default", uid: str = "uid-1", generation: int = 1, **spec: Any) -> Pool:
    return Pool(name, uid, generation, parse_pool(spec))


def kind(fields: PodFields | None = None, **spec: Any) -> Kind:
    return kind_of(pool(**spec), "stoker@sha256:own", fields)


def made(fields: PodFields | None = None, seat: int = 0, **spec: Any) -> dict[str, Any]:
    return pod_of(kind(fields, **spec), "rel-default-abc", SERVICE, namespace="ns", seat=seat)


def test_a_pod_keeps_to_the_restricted_profile() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    spec = made()["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
    assert own["readOnlyRootFilesystem"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert all(set(volume) - {"name"} == {"emptyDir"} for volume in spec["volumes"])
    assert "hostPort" not in container["ports"][0]
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False


def test_a_pod_that_is_read_by_anybody_opens_nothing() -> None:
    text, token = json.dumps(made()), SERVICE.token("rel-default-abc")
    assert token not in text and peer_token(token) not in text and "the secret" not in text
    assert hashlib.sha256(token.encode()).hexdigest() in text
    assert token != SERVICE.token("rel-default-abd")


def test_the_agent_is_reached_with_the_token_that_the_pod_has_the_hash_of() -> None:
    pod = made()
    pod["metadata"]["uid"] = "u"
    pod["status"] = {"podIP": "10.1.2.3"}
    info = info_of(pod, SERVICE)
    assert (info.host, info.port, info.token) == ("10.1.2.3", 7070, SERVICE.token("rel-default-abc"))
    command = pod["spec"]["containers"][0]["command"]
    assert command[command.index("--token-hash") + 1] == hashlib.sha256(info.token.encode()).hexdigest()
    peer = hashlib.sha256(peer_token(info.token).encode()).hexdigest()
    assert command[command.index("--peer-token-hash") + 1] == peer


def test_the_warm_pool_is_memory_and_smaller_than_its_volume() -> None:
    pod = made(pool="8Gi", disk="0", resources={"limits": {"memory": "24Gi"}})
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["spec"]["volumes"]}
    assert volumes["pool"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert int(volumes["slot"]["sizeLimit"]) >= 2**30, "logs lie there, too"
    command = pod["spec"]["containers"][0]["command"]
    assert 7 * 2**30 < int(command[command.index("--pool-bytes") + 1]) < 8 * 2**30
    assert kind(pool="8Gi", resources={"limits": {"memory": "24Gi"}}).memory_bytes == 16 * 2**30


def test_devices_are_asked_for_by_name_and_count() -> None:
    resources = made(devices={"nvidia.com/mig-1g.10gb": 2}, resources={"requests": {"cpu": "1"}})["spec"]["containers"][
        0
    ]["resources"]
    assert resources["requests"] == {"cpu": "1", "nvidia.com/mig-1g.10gb": 2}
    assert resources["limits"] == {"nvidia.com/mig-1g.10gb": 2}


def test_slots_of_a_pool_are_on_nodes_of_their_own_unless_more_may_share_one() -> None:
    def term(**said: Any) -> Any:
        return made(**said)["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]

    assert term()["topologyKey"] == "kubernetes.io/hostname"
    assert term()["labelSelector"]["matchLabels"][POOL_LABEL] == "default"
    first, second = term(seat=0, perNode=2), term(seat=1, perNode=2)
    assert first["labelSelector"] != second["labelSelector"], "two of different seats may share a node"
    assert "affinity" not in made(perNode=0)["spec"]
    own = {"nodeAffinity": {"x": 1}}
    assert made(affinity=own)["spec"]["affinity"] == own


def test_a_pod_goes_with_its_pool_and_says_what_it_is() -> None:
    metadata = made(labels={"team": "a"}, annotations={"note": "b"})["metadata"]
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("SlotPool", "default", "uid-1", True)
    assert metadata["labels"]["app.kubernetes.io/component"] == "slot" and metadata["labels"]["team"] == "a"
    assert metadata["annotations"]["note"] == "b"
    assert metadata["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


def test_what_users_give_is_in_the_pod() -> None:
    pod = made(
        nodeSelector={"gpu": "h100"},
        tolerations=[{"key": "spot", "operator": "Exists"}],
        priorityClassName="high",
        runtimeClassName="nvidia",
        imagePullSecrets=["regcred"],
        serviceAccountName="slots",
        env={"B": "2", "A": "1"},
        secretEnv={"AWS_ACCESS_KEY_ID": {"name": "s3", "key": "id"}},
        volumes=[{"name": "objects", "persistentVolumeClaim": {"claimName": "c"}}],
        volumeMounts=[{"name": "objects", "mountPath": "/objects"}],
        graceSeconds=90,
    )["spec"]
    assert pod["nodeSelector"] == {"gpu": "h100"} and pod["tolerations"][0] == {"key": "spot", "operator": "Exists"}
    assert (pod["priorityClassName"], pod["runtimeClassName"], pod["serviceAccountName"]) == ("high", "nvidia", "slots")
    assert pod["imagePullSecrets"] == [{"name": "regcred"}] and pod["terminationGracePeriodSeconds"] == 105
    env = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert env["A"]["value"] == "1" and env["STOKER_POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert env["AWS_ACCESS_KEY_ID"]["valueFrom"]["secretKeyRef"] == {"name": "s3", "key": "id"}
    assert pod["containers"][0]["volumeMounts"][-1] == {"name": "objects", "mountPath": "/objects"}


def test_a_slot_on_a_lost_node_is_given_up_sooner_than_a_pod_is_otherwise() -> None:
    own = {each["key"]: each["tolerationSeconds"] for each in made()["spec"]["tolerations"]}
    assert own == {"node.kubernetes.io/unreachable": 30, "node.kubernetes.io/not-ready": 30}
    said = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    kept = made(tolerations=[{**said, "tolerationSeconds": 600}])["spec"]["tolerations"]
    assert [each["tolerationSeconds"] for each in kept] == [600, 30], "what the pool says goes before"


# --- classes ---


def test_slots_that_differ_in_what_matters_are_of_another_class() -> None:
    names = {
        kind(**spec).name
        for spec in (
            {},
            {"devices": {"nvidia.com/gpu": 1}},
            {"devices": {"nvidia.com/gpu": 2}},
            {"image": "stoker@sha256:other"},
            {"trustDomain": "team-a"},
            {"nodeSelector": {"a": "b"}},
        )
    }
    assert len(names) == 6
    assert kind(least=0).name == kind(least=2, most=9, perNode=2, graceSeconds=5).name, "bounds make no other slots"


def test_a_function_with_fields_of_its_own_has_slots_of_its_own_over_those_of_its_pool() -> None:
    plain = kind(pool="8Gi", labels={"a": "b"})
    own = kind(PodFields(image="mine@sha256:1"), pool="8Gi", labels={"a": "b"})
    assert own.own and not plain.own and own.name != plain.name
    assert own.spec.pool == "8Gi" and own.spec.image == "mine@sha256:1"
    assert kind(PodFields(image="mine@sha256:1"), pool="8Gi", labels={"a": "b"}).name == own.name
    assert kind(PodFields(slotPool="default"), pool="8Gi", labels={"a": "b"}).name == plain.name
    assert own.as_class().least == 0 and own.as_class().on_demand


def test_a_function_without_a_pool_uses_the_default_or_the_only_one() -> None:
    one, other = pool("one"), pool("other")
    assert pool_for(None, {"one": one}, "default") is one
    assert pool_for(None, {"one": one, "other": other}, "default") is None
    assert pool_for(None, {"one": one, "other": other}, "other") is other
    assert pool_for(PodFields(slotPool="one"), {"one": one, "other": other}, "other") is one
    assert pool_for(PodFields(slotPool="gone"), {"one": one}, "one") is None


def test_names_of_pods_fit_into_a_label_and_differ() -> None:
    assert pod_name("rel", "default", "ab12cd34") == "rel-default-ab12cd34"
    long = pod_name("r" * 53, "p" * 40, "ab12cd34")
    assert len(long) <= 63 and long.endswith("-ab12cd34") and "--" not in long
    assert long != pod_name("r" * 53, "p" * 39 + "q", "ab12cd34")
    assert pod_name("rel", "default") != pod_name("rel", "default")


@pytest.mark.parametrize(("in_flight", "replicas", "safe"), [(0, 0, "true"), (0, 1, "false"), (3, 1, "false")])
def test_a_pod_says_what_would_be_lost_with_it(in_flight: int, replicas: int, safe: str) -> None:
    said = marks(in_flight, replicas)
    assert said["cluster-autoscaler.kubernetes.io/safe-to-evict"] == safe
    assert int(said["controller.kubernetes.io/pod-deletion-cost"]) == in_flight * 10 + replicas
    assert said["stoker.dev/in-flight"] == str(in_flight)


def test_of_two_slots_the_one_with_less_in_flight_is_deleted_first() -> None:
    def cost(in_flight: int, replicas: int) -> int:
        return int(marks(in_flight, replicas)["controller.kubernetes.io/pod-deletion-cost"])

    assert cost(0, 0) < cost(0, 3) < cost(1, 1) < cost(9, 2)
