"""Two copies of the control plane over PostgreSQL, as the chart installs them: what runs does not notice that one of
them goes, and one that was only away writes nothing when it comes back."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from control_plane.client import Client, Endpoint
from tests.chaos.readers import Reader
from tests.kubernetes.copies import (
    RELEASE,
    SPACE,
    VALUES,
    Copies,
    copies,
    earlier_code,
    is_ready,
    stream_body,
    wait_events,
)
from tests.kubernetes.town import CHART
from tests.support import postgres as postgresql

pytestmark = pytest.mark.e2e

TOKENS = 300


@pytest.fixture(scope="module")
def place() -> Iterator[Copies]:
    if (reason := postgresql.missing()) is not None:
        pytest.skip(reason)
    with copies() as place:
        place.cluster.kubelet.image_environment["STOKER_STUB_TOKEN_S"] = "0.02"
        place.deploy(place.gateways()[0], "fn", (place.folder / "tiny").as_uri(), scaling={"keep_alive": 120})
        yield place


@pytest.fixture(scope="module")
def whole(place: Copies) -> Any:
    """The undisturbed answer, asked for where the function was not deployed."""
    return answer(place.read(place.gateways()[1], model="fn", tokens=TOKENS))


def answer(reader: Any) -> Any:
    reader.join(240)
    assert reader.error is None and reader.answer is not None, reader.error
    assert reader.seqs == list(range(1, TOKENS + 1)), "no gap and no double"
    return reader.answer


@pytest.mark.parametrize("grace_s", [0, 30])
def test_a_leader_that_goes_in_mid_stream_is_taken_over_token_for_token(
    place: Copies, whole: Any, grace_s: int
) -> None:
    """Killed at once, and asked to go."""
    leader = place.settled()
    other, slots = place.other(leader), place.slots()
    readers = [
        place.read(leader, other, model="fn", tokens=TOKENS),
        place.read(other, leader, model="fn", tokens=TOKENS),
    ]
    for reader in readers:
        wait_events(reader, 20)
    place.cluster.api.delete("pods", leader, SPACE, gracePeriodSeconds=grace_s)
    for reader in readers:
        assert answer(reader) == whole
        attempts = place.call(other, "GET", f"/api/v1/why/{reader.request_id}")["attempts"]
        assert len(attempts) == 1, "it was attached to where it ran: nothing was computed twice"
    assert readers[0].resumes >= 1
    assert place.settled() == other, "the one that was there leads, by database and Lease"
    assert place.slots() == slots, "slots outlive who made them"


def test_a_leader_that_was_stopped_creates_and_deletes_nothing_when_it_goes_on(place: Copies, whole: Any) -> None:
    leader = place.settled()
    other, slots = place.other(leader), place.slots()
    # A slot of a class of its own, which the leader asks for again and again, without an answer.
    fault = place.cluster.fail("create", "pods", "reset", None, user="demo-stoker")
    model = (place.folder / "tiny").as_uri()
    place.deploy(other, "apart", model, pod={"trustDomain": "apart"}, scaling={"keep_alive": 120})
    reader = place.read(other, model="apart", tokens=TOKENS)
    place.cluster.wait(lambda: fault.met >= 2, "a call that is made again")
    pid = place.pid(leader)
    os.kill(pid, signal.SIGSTOP)
    try:
        place.cluster.wait(lambda: place.holder() == other and place.leader() == other, "another leader")
        place.cluster.faults.clear()
        assert answer(reader) == whole
        place.cluster.server.forget_recorded()
    finally:
        os.kill(pid, signal.SIGCONT)

    def follows() -> bool:
        """It has looked who leads, and been told by the cluster what there is."""
        known = place.call(leader, "GET", "/api/v1/replicas")["data"]
        gauge = metric(place, leader, "stoker_gateway_leads")
        return gauge == 0 and {each["function"] for each in known} == {"fn", "apart"}

    place.cluster.wait(follows, "a copy that knows that it does not lead")
    # One more look of everything that acts at intervals.
    place.cluster.wait(lambda: metric(place, leader, "stoker_gateway_leads") == 0, "no lead")
    written = [each for each in place.cluster.server.recorded(writes=True) if each.pod == leader]
    assert written == [], "whoever does not lead writes nothing"
    assert len(place.slots()) == len(slots) + 1, "one slot more: that of the function that was called"
    assert place.settled() == other


def metric(place: Copies, pod: str, name: str) -> float:
    with urllib.request.urlopen(f"{place.url(pod)}/metrics", timeout=60) as found:
        lines = found.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


class Flow:
    """Streams without a pause, through the Service, as users see it: each begins when another has ended."""

    def __init__(self, place: Copies, streams: int) -> None:
        client = Client(lambda: Endpoint(url, place.key), give_up_s=90)
        url = place.cluster.service_url(f"{RELEASE}-stoker", "http", SPACE)
        self._client = client
        self._over = threading.Event()
        self.readers: list[Reader] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(streams)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            reader = Reader(self._client, stream_body("fn", TOKENS))
            self.readers.append(reader)
            reader.start()
            reader.join()

    def end(self) -> list[Reader]:
        self._over.set()
        for thread in self._threads:
            thread.join(240)
        return self.readers


def images(pods: list[dict[str, Any]]) -> set[str]:
    return {each["spec"]["containers"][0]["image"] for each in pods if "deletionTimestamp" not in each["metadata"]}


def test_versions_one_apart_are_replaced_by_one_another_under_live_streams(place: Copies, whole: Any) -> None:
    """First back to the earlier one, with slots of today's, then on to today's, with slots of the earlier one."""
    code = earlier_code(place.folder / "earlier")
    place.cluster.kubelet.image_environments["stoker:earlier"] = {"PYTHONPATH": str(code)}
    for tag in ("earlier", "today"):
        place.settled()
        image, before = f"stoker:{tag}", place.slots()
        flow = Flow(place, 2)
        place.helm("upgrade", RELEASE, str(CHART), **{**VALUES, "image": {"repository": "stoker", "tag": tag}})

        def arrived(image: str = image) -> str:
            pods = [each for each in place.pods("control-plane") if is_ready(each) and image in images([each])]
            return pods[0]["metadata"]["name"] if pods else ""

        first = str(place.cluster.wait(arrived, f"a copy of {tag}", 240))

        def runs_on_the_others(first: str = first, before: Collection[str] = before) -> bool:
            replicas = place.call(first, "GET", "/api/v1/replicas")["data"]
            return bool({each["slot_id"] for each in replicas if each["running"]} & set(before))

        # Before anything else is done: its slots are replaced as soon as it leads.
        place.cluster.wait(runs_on_the_others, "a gateway of one version, slots of the other")
        reader = place.read(first, model="fn", tokens=TOKENS)
        wait_events(reader, 5)
        _, where = place.cluster.kubelet.execute(
            first, ["python", "-c", "import autoscaler as a; print(a.__file__)"], SPACE
        )
        assert where.startswith(str(code)) is (tag == "earlier"), where
        assert answer(reader) == whole
        place.cluster.wait(lambda image=image: images(place.pods("control-plane")) == {image}, "copies of one version")
        place.cluster.wait(lambda image=image: images(place.pods("slot")) == {image}, "slots have followed", 240)
        place.settled()
        readers = flow.end()
        assert len(readers) >= 4 and all(answer(each) == whole for each in readers)
        assert not set(before) & set(place.slots())
