"""The official client's lists and watches against the tests' API server, also where the server is under stress."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from kubernetes import client, config, watch
from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config
from kubernetes.aio import watch as aio_watch
from kubernetes.client.exceptions import ApiException

from tests.kubernetes.cluster import TestCluster


@pytest.fixture
def core(plain_cluster: TestCluster) -> Iterator[client.CoreV1Api]:
    loaded = client.Configuration()
    config.load_kube_config(str(plain_cluster.admin_kubeconfig), client_configuration=loaded)
    loaded.retries = False
    with client.ApiClient(loaded) as made:
        yield client.CoreV1Api(made)


@pytest.fixture
async def aio_core(plain_cluster: TestCluster) -> AsyncIterator[aio_client.CoreV1Api]:
    loaded = aio_client.Configuration()
    await aio_config.load_kube_config(str(plain_cluster.admin_kubeconfig), client_configuration=loaded)
    async with aio_client.ApiClient(loaded) as made:
        yield aio_client.CoreV1Api(made)


CONTROLLERS_OWN = "kube-root-ca.crt"
"""What every namespace gets sooner or later where there is a controller manager."""


def config_map(name: str, **labels: str) -> client.V1ConfigMap:
    return client.V1ConfigMap(metadata=client.V1ObjectMeta(name=name, labels=labels or None), data={"a": "b"})


def test_a_watch_goes_on_from_the_list_it_follows(core: client.CoreV1Api, namespace: str) -> None:
    core.create_namespaced_config_map(namespace, config_map("before"))
    listed = core.list_namespaced_config_map(namespace)
    assert [each.metadata.name for each in listed.items if each.metadata.name != CONTROLLERS_OWN] == ["before"]
    core.create_namespaced_config_map(namespace, config_map("after", app="x"))
    core.patch_namespaced_config_map("after", namespace, {"metadata": {"labels": {"app": None}}})
    core.delete_namespaced_config_map("before", namespace)
    version = listed.metadata.resource_version
    stream = watch.Watch().stream(
        core.list_namespaced_config_map, namespace, resource_version=version, timeout_seconds=1
    )
    seen = [(each["type"], each["object"].metadata.name) for each in stream]
    assert [each for each in seen if each[1] != CONTROLLERS_OWN] == [
        ("ADDED", "after"), ("MODIFIED", "after"), ("DELETED", "before"),
    ]  # fmt: skip
    # To a watcher by label, what loses the label is deleted.
    chosen = watch.Watch().stream(
        core.list_namespaced_config_map, namespace, resource_version=version, label_selector="app=x", timeout_seconds=1
    )
    assert [each["type"] for each in chosen] == ["ADDED", "DELETED"]


def test_pages_are_of_one_moment(core: client.CoreV1Api, namespace: str) -> None:
    for number in range(5):
        core.create_namespaced_secret(namespace, client.V1Secret(metadata=client.V1ObjectMeta(name=f"c{number}")))
    first = core.list_namespaced_secret(namespace, limit=2)
    assert first.metadata.remaining_item_count == 3
    core.delete_namespaced_secret("c3", namespace)
    second = core.list_namespaced_secret(namespace, limit=3, _continue=first.metadata._continue)
    assert [each.metadata.name for each in second.items] == ["c2", "c3", "c4"]
    assert second.metadata.resource_version == first.metadata.resource_version


def test_an_older_version_loses_and_the_loser_is_told(core: client.CoreV1Api, namespace: str) -> None:
    made = core.create_namespaced_config_map(namespace, config_map("c"))
    made.data = {"a": "c"}
    core.replace_namespaced_config_map("c", namespace, made)
    with pytest.raises(ApiException) as refused:
        core.replace_namespaced_config_map("c", namespace, made)
    assert refused.value.status == 409 and "the object has been modified" in refused.value.body
    unchanged = core.read_namespaced_config_map("c", namespace)
    again = core.replace_namespaced_config_map("c", namespace, unchanged)
    assert again.metadata.resource_version == unchanged.metadata.resource_version


def test_versions_that_were_compacted_are_gone(
    plain_cluster: TestCluster, core: client.CoreV1Api, namespace: str
) -> None:
    version = core.list_namespaced_config_map(namespace).metadata.resource_version
    plain_cluster.expire_versions()
    with pytest.raises(ApiException) as gone:
        list(
            watch.Watch().stream(
                core.list_namespaced_config_map, namespace, resource_version=version, timeout_seconds=5
            )
        )
    assert gone.value.status == 410


def test_the_asynchronous_client_sees_bookmarks_cuts_and_resumes(
    plain_cluster: TestCluster, core: client.CoreV1Api, namespace: str
) -> None:
    import asyncio

    async def scenario() -> list[str]:
        loaded = aio_client.Configuration()
        await aio_config.load_kube_config(str(plain_cluster.admin_kubeconfig), client_configuration=loaded)
        seen: list[str] = []
        async with aio_client.ApiClient(loaded) as made:
            api = aio_client.CoreV1Api(made)
            version = (await api.list_namespaced_config_map(namespace)).metadata.resource_version
            await api.create_namespaced_config_map(namespace, aio_client.V1ConfigMap(metadata={"name": "one"}))
            async with aio_watch.Watch().stream(
                api.list_namespaced_config_map,
                namespace,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=20,
            ) as stream:
                async for event in stream:
                    seen.append(event["type"])
                    if event["type"] == "BOOKMARK":
                        break
                    # Nothing else happens: what comes next can only be a bookmark.
                    threading.Thread(target=plain_cluster.server.set_bookmark_interval, args=(0.05,)).start()
        return seen

    plain_cluster.server.set_bookmark_interval(0.2)
    try:
        assert asyncio.run(scenario()) == ["ADDED", "BOOKMARK"]
    finally:
        plain_cluster.server.set_bookmark_interval(5.0)


def test_faults_happen_as_often_as_asked(plain_cluster: TestCluster, core: client.CoreV1Api, namespace: str) -> None:
    plain_cluster.fail("create", "configmaps", 429, times=1, retry_after_s=7, namespace=namespace)
    with pytest.raises(ApiException) as refused:
        core.create_namespaced_config_map(namespace, config_map("c"))
    assert refused.value.status == 429 and refused.value.headers["Retry-After"] == "7"
    # A lost answer: the object is there, and its maker does not know.
    plain_cluster.fail("create", "configmaps", 500, times=1, lost=True, namespace=namespace)
    with pytest.raises(ApiException):
        core.create_namespaced_config_map(namespace, config_map("c"))
    assert core.read_namespaced_config_map("c", namespace).data == {"a": "b"}


def test_finalizers_hold_an_object_and_the_last_one_lets_it_go(core: client.CoreV1Api, namespace: str) -> None:
    held = config_map("c")
    held.metadata.finalizers = ["example.dev/hold"]
    core.create_namespaced_config_map(namespace, held)
    core.delete_namespaced_config_map("c", namespace)
    assert core.read_namespaced_config_map("c", namespace).metadata.deletion_timestamp is not None
    core.patch_namespaced_config_map("c", namespace, {"metadata": {"finalizers": None}})
    with pytest.raises(ApiException) as gone:
        core.read_namespaced_config_map("c", namespace)
    assert gone.value.status == 404


def test_a_dry_run_changes_nothing(core: client.CoreV1Api, namespace: str) -> None:
    made = core.create_namespaced_config_map(namespace, config_map("c"), dry_run="All")
    assert made.metadata.uid
    there = core.list_namespaced_config_map(namespace).items
    assert [each for each in there if each.metadata.name != CONTROLLERS_OWN] == []
