"""Slots that are lost under a stream, and slots that never come: a resumed request, or an error that says why, and
never a loop."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.kubernetes import tools
from tests.kubernetes.town import POOL, Town, town
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import HttpError

pytestmark = pytest.mark.e2e

TOKENS = 200
NODES = 4
IMPATIENT = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    for key in ("unreachable", "not-ready")
]
BODY = {"prompt": "hello", "max_tokens": TOKENS, "seed": 11}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny").as_uri()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Iterator[Town]:
    pool = {**POOL, "most": 4, "tolerations": IMPATIENT}
    # Longer than an agent takes to start anew, and than scheduler and kubelet say nothing, on a machine that is out of
    # breath.
    env = {"STOKER_TROUBLE_S": "12", "STOKER_UNSCHEDULABLE_S": "20", "STOKER_SLOT_HOLD_S": "60"}
    with town(tmp_path_factory.mktemp("losses"), pool, env, nodes=NODES, node_grace_s=8.0) as place:
        place.cluster.kubelet.image_environment["STOKER_STUB_TOKEN_S"] = "0.02"
        place.cluster.kubelet.lease_interval_s = 0.5
        deploy(place, "fn", checkpoint)
        yield place


def deploy(place: Town, name: str, checkpoint: str, **fields: Any) -> None:
    place.service.deploy(name, checkpoint, engine="stub", scaling={"keep_alive": 120}, **fields)


@pytest.fixture(scope="module")
def whole(place: Town) -> str:
    return stream(place)[0]


def stream(place: Town, act: Callable[[], object] | None = None) -> tuple[str, str]:
    """Text and id of the answer; `act` is called once a quarter of it has come."""
    text, places, request_id = "", list[int](), ""
    for at, event in place.service.events("/v1/completions", {**BODY, "model": "fn", "stream": True}):
        assert "error" not in event, (event, place.service.tail())
        request_id = event["id"]
        places.append(at)
        text += "".join(choice["text"] for choice in event["choices"])
        if act is not None and at >= TOKENS // 4:
            act, _ = None, act()
    assert places == list(range(1, TOKENS + 1)), "no gap and no double"
    return text, request_id


def kubectl(place: Town, *arguments: str) -> None:
    done = subprocess.run(
        [tools.kubectl(), *arguments], env=place.cluster.environment(), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr


def drain(place: Town, slot: str, node: str) -> None:
    kubectl(place, "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=150s")
    kubectl(place, "uncordon", node)


LOSSES: dict[str, Callable[[Town, str, str], object]] = {
    "its node is drained": drain,
    "its node is told that it goes": lambda place, slot, node: place.cluster.kubelet.shut_down_node(node, 1.0),
    "it needs too much memory": lambda place, slot, node: place.cluster.kubelet.oom_kill(slot),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_slot_that_is_lost_under_a_stream_is_a_resumed_request(place: Town, whole: str, loss: str) -> None:
    slot = place.name_of_slot("fn")
    node = place.cluster.api.get("pods", slot)["spec"]["nodeName"]
    creates = created(place)
    text, request_id = stream(place, lambda: LOSSES[loss](place, slot, node))
    assert text == whole
    attempts = place.service.call("GET", f"/api/v1/why/{request_id}")["attempts"]
    assert len(attempts) == 2 and attempts[0]["replica_id"] != attempts[1]["replica_id"]
    assert created(place) - creates <= 1, "one slot for the one that was lost, if any"


def test_a_machine_that_is_gone_takes_no_request_with_it_and_its_pod_is_nobodys_slot(place: Town, whole: str) -> None:
    """Nobody can say whether its pod still runs: it stays, Terminating, until its node is given up."""
    slot, api = place.name_of_slot("fn"), place.cluster.api
    node = api.get("pods", slot)["spec"]["nodeName"]
    text, request_id = stream(place, lambda: place.cluster.kubelet.lose_node(node, kill=True))
    assert text == whole and place.name_of_slot("fn") != slot
    assert len(place.service.call("GET", f"/api/v1/why/{request_id}")["attempts"]) == 2
    place.cluster.wait(lambda: "deletionTimestamp" in api.get("pods", slot)["metadata"], "a pod that is given up")

    def told() -> bool:
        coming = place.service.call("GET", "/api/v1/slots")["coming"]
        return any(each["slot_id"] == slot and each["phase"] == "leaving" for each in coming)

    place.cluster.wait(told, "a slot that is told to be leaving")
    assert stream(place)[0] == whole, "others serve meanwhile"
    assert slot in {each["metadata"]["name"] for each in place.pods()}, "it is still there, and not waited for"
    api.delete("nodes", node)
    place.cluster.wait(lambda: slot not in {each["metadata"]["name"] for each in place.pods()}, "its pod is gone")


def created(place: Town) -> int:
    records = place.cluster.server.recorded(writes=True, user="rel-stoker")
    return sum((each.verb, each.resource) == ("create", "pods") for each in records)


def no_such_image(place: Town) -> dict[str, Any]:
    place.cluster.kubelet.pull_faults["absent:*"] = "manifest unknown"
    return {"image": "absent:1"}


def crashes(place: Town) -> dict[str, Any]:
    place.cluster.kubelet.image_environments["broken:*"] = {"PYTHONHOME": "/nowhere"}
    return {"image": "broken:1"}


REFUSALS: dict[str, tuple[Callable[[Town], dict[str, Any]], str]] = {
    "its image is not there": (no_such_image, "manifest unknown"),
    "its image is broken": (crashes, "its agent ended with 1"),
    "its secret is not there": (
        lambda place: {"secretEnv": {"TOKEN": {"name": "late", "key": "a"}}}, 'secret "late" not found',
    ),
    "no node has its device": (lambda place: {"devices": {"example.dev/gpu": 1}}, "Insufficient example.dev/gpu"),
}  # fmt: skip


def refusal_of(place: Town, name: str) -> str:
    """What a client is told in the end."""
    with pytest.raises(HttpError) as refused:
        place.service.call("POST", "/v1/completions", {**BODY, "model": name})
    assert refused.value.status == 503
    return refused.value.body.replace('\\"', '"')


def test_slots_that_never_come_are_errors_that_say_why_and_not_loops(place: Town, checkpoint: str) -> None:
    names = {f"fn-{number}": refusal for number, refusal in enumerate(REFUSALS)}
    for name, refusal in names.items():
        deploy(place, name, checkpoint, pod=REFUSALS[refusal][0](place))
    creates, there = created(place), len(place.pods())
    with ThreadPoolExecutor(len(names)) as pool:
        told = dict(zip(names.values(), pool.map(lambda name: refusal_of(place, name), names), strict=True))
    for refusal, (_, words) in REFUSALS.items():
        assert "slot_unavailable" in told[refusal] and words in told[refusal], (refusal, told[refusal])
    for name in names:
        place.service.call("DELETE", f"/api/v1/functions/{name}")
    place.cluster.wait(lambda: len(place.pods()) <= there, "what never came is taken away")
    assert created(place) - creates <= 2 * len(names), "each was tried again at most once within its budget"


def test_a_quota_is_an_error_that_says_so_until_there_is_room_again(place: Town, checkpoint: str) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {"pods": "0"}},  # whatever goes meanwhile leaves no room
    }
    place.cluster.api.apply(quota)
    deploy(place, "more", checkpoint, pod={"trustDomain": "more"})
    creates = created(place)
    told = refusal_of(place, "more")
    assert "for its quota" in told and "exceeded quota" in told
    assert created(place) - creates <= 6, "after 1, 2, 4, 8, ... seconds at the soonest"
    place.cluster.api.delete("resourcequotas", "q")

    def answered() -> bool:
        try:
            place.service.call("POST", "/v1/completions", {**BODY, "model": "more", "max_tokens": 1})
        except HttpError as error:
            assert error.status == 503
            return False
        return True

    place.cluster.wait(answered, "a slot, once the quota has room", 180)
