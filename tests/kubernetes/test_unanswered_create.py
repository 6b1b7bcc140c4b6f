"""A control plane that is killed between a pod's creation, whose answer never came, and its next try: its successor
makes no second pod for it, and none is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_plane.client import Client, Endpoint
from tests.chaos.readers import Reader
from tests.kubernetes.town import Town, town
from tests.support.checkpoints import make_tiny_llama

pytestmark = pytest.mark.e2e

BODY = {"model": "fn", "prompt": "hello", "max_tokens": 5, "seed": 11, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("unanswered")
    with town(folder, env={"STOKER_SLOT_HOLD_S": "0.2"}) as place:
        place.service.deploy(
            "fn", f"file://{make_tiny_llama(folder / 'tiny')}", engine="stub", scaling={"keep_alive": 0}
        )
        yield place


@pytest.mark.parametrize("heard", [True, False])
def test_whoever_comes_after_a_kill_makes_one_pod_for_one_need(place: Town, heard: bool) -> None:
    """`heard`: whether the call that was not answered has made a pod."""
    service, ended = place.service, list[str]()
    place.cluster.kubelet.on_end = lambda worker: ended.append(worker.name)
    place.cluster.server.forget_recorded()
    fault = place.cluster.fail("create", "pods", "reset", 1, lost=heard, user="rel-stoker")
    reader = Reader(Client(lambda: Endpoint(service.url, service.key), give_up_s=60.0), BODY)
    reader.start()
    place.cluster.wait(lambda: fault.met and len(place.pods()) == heard, "the call", every_s=0.001)
    assert service.kill("gateway")
    calls = place.cluster.server.recorded(writes=True, user="rel-stoker")
    assert sum(each.verb == "create" and each.resource == "pods" for each in calls) <= 1, "killed before it tried again"
    service.start(ready_within_s=180.0)
    reader.join(60)
    assert reader.answer is not None and reader.answer.tokens == BODY["max_tokens"], (reader.error, service.tail())
    place.cluster.wait(lambda: place.pods() == [], "no pod is left", every_s=0.05)
    place.cluster.kubelet.wait_idle()
    assert len(ended) == 1, "one need, one pod"
