"""The main job on slots that are pods, with a model that is computed and the rights of the chart: from zero to an
answer, an eviction under a stream, a node that is cut off and comes back, kills of everything that can be killed,
books that add up, and zero again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.chaos.killing import VICTIMS, audit, kill_rounds
from tests.chaos.seeds import SEED
from tests.chaos.test_zombies import Durable
from tests.kubernetes.town import POOL, Town, town
from tests.support.checkpoints import make_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 300
BODY = {"model": "fn", "prompt": list(range(20, 120)), "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
        "stream": True, "logprobs": 0}  # fmt: skip
ROUNDS = int(os.environ.get("STOKER_CHAOS_ROUNDS", "8"))
ENGINE: dict[str, Any] = {"threads": 1, "kv_bytes": 32 << 20, "prefix_cache": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    """Nobody has called its function yet."""
    folder = tmp_path_factory.mktemp("pods")
    checkpoint = make_tiny_llama(folder / "tiny", layers=2, hidden=64)
    # No grace: what half of an answer takes is not to be within it.
    with town(folder, {**POOL, "graceSeconds": 0}, nodes=2, node_grace_s=8.0) as place:
        # Without cached or stored prefixes a repeated prompt is computed as the first time: equal means byte for byte.
        place.service.deploy(
            "fn", f"file://{checkpoint}", scaling={"keep_alive": 5}, engine_options=ENGINE, share_prefixes="none"
        )
        yield place


def stream(place: Town, act: Callable[[], None] | None = None) -> tuple[str, list[int], str]:
    """Text, places and id of the answer; `act` is called once a quarter of it has come."""
    text, places, request_id = "", list[int](), ""
    for at, event in place.service.events("/v1/completions", BODY):
        assert "error" not in event, (event, place.service.tail())
        request_id = event["id"]
        places.append(at)
        text += "".join(choice["text"] for choice in event["choices"])
        if act is not None and at >= TOKENS // 4:
            act, _ = None, act()
    return text, places, request_id


def test_a_pod_comes_for_a_request_and_is_lost_under_a_stream(place: Town) -> None:
    assert place.pods() == [], "nobody called it yet"
    whole, places, _ = stream(place)
    assert places == list(range(1, TOKENS + 1))
    assert len(place.pods()) == 1

    first = place.name_of_slot()
    text, places, request_id = stream(place, lambda: place.cluster.api.evict(first))
    assert (text, places) == (whole, list(range(1, TOKENS + 1)))
    attempts = place.service.call("GET", f"/api/v1/why/{request_id}")["attempts"]
    assert len(attempts) == 2 and place.name_of_slot() != first


def test_a_node_that_is_cut_off_and_comes_back_has_written_nothing(place: Town) -> None:
    """Its pod computes on, and reaches the store: only what it says to its control plane, and hears, is cut."""
    api, kubelet, service = place.cluster.api, place.cluster.kubelet, place.service
    kubelet.relayed_ports = (7070, *range(7100, 7164))
    try:
        for pod in place.pods():
            api.delete("pods", pod["metadata"]["name"], gracePeriodSeconds=0)
        place.cluster.wait(lambda: not service.replicas(), "nothing runs any more")
        whole, places, _ = stream(place)
    finally:
        kubelet.relayed_ports = ()
    slot = place.name_of_slot()
    node = api.get("pods", slot)["spec"]["nodeName"]
    (dead,) = (row for row in service.replicas() if row["slot_id"] == slot)

    text, again, request_id = stream(place, lambda: kubelet.lose_node(node))
    assert (text, again) == (whole, places)
    attempts = service.call("GET", f"/api/v1/why/{request_id}")["attempts"]
    assert [attempt["epoch"] for attempt in attempts] == [1, 2]
    assert [attempt["replica_id"] == dead["replica_id"] for attempt in attempts] == [True, False]
    conditions = {each["type"]: each["status"] for each in api.get("nodes", node)["status"]["conditions"]}
    assert conditions["Ready"] == "Unknown", "the API server has missed it, too"
    assert service.runs(dead), "nobody could end it"

    durable = Durable(service, request_id)
    place.cluster.wait(lambda: durable.rows()["ledger"], "the outcome")
    before, objects = durable.rows(), durable.objects()
    kubelet.restore_node(node)
    place.cluster.wait(lambda: not service.runs(dead), "its end, once it can be told")
    place.cluster.wait(
        lambda: dead["replica_id"] not in {row["replica_id"] for row in service.replicas()}, "and that it is known"
    )
    assert durable.rows() == before
    now = durable.objects()
    assert set(now) - set(objects) <= durable.known_packs(), "objects that nothing names"
    assert [name for name, content in now.items() if objects.get(name, content) != content] == []


def test_kills_of_replica_agent_control_plane_and_pod_change_no_answer(place: Town) -> None:
    victims = (*VICTIMS, "pod")
    report = kill_rounds(place.service, "fn", rounds=ROUNDS, seed=SEED, max_tokens=100, victims=victims)
    assert not report.problems, f"STOKER_CHAOS_SEED={SEED}:\n" + "\n".join(report.problems)
    killed = {victim: sum(each.killed for each in report.rounds if each.victim == victim) for victim in victims}
    assert min(killed.values()) > 0, f"some victims were never there to be killed: {killed}"


def test_zero_is_zero_and_every_token_and_second_is_accounted_for(place: Town) -> None:
    place.service.wait_zero()
    place.cluster.wait(lambda: place.pods() == [], "no slot is left", 180)
    place.cluster.wait(lambda: place.cluster.kubelet.running_pods == [], "nor a process of one", 120)
    # One for each stream above, and of each kind an undisturbed one for every round of it.
    assert audit(place.service.data_dir)["done"] >= 4 + ROUNDS
