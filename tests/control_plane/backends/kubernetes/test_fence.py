"""What a copy may write that has lost the lead, or is about to: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from control_plane.backends import link
from control_plane.backends.base import SlotUnavailable
from control_plane.backends.kubernetes import home
from control_plane.backends.kubernetes.api import PODS, SLOT_POOLS, Api, ApiError
from control_plane.backends.kubernetes.backend import KubernetesBackend
from control_plane.backends.kubernetes.fence import FencedApi, NotLeading
from tests.control_plane.backends.kubernetes.fake_cluster import (
    FakeApi,
    Kubelet,
    backend_of,
    listening,
    pod_client_of,
    slot_pool,
)
from tests.control_plane.backends.town import Listener, Machine, until


class Lead:
    def __init__(self) -> None:
        self.left_s = 60.0

    def __call__(self) -> float:
        return self.left_s


class SlowApi(FakeApi):
    """Answers to creation when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def create(self, resource: Any, body: Any) -> Any:
        await self.answers.wait()
        return await super().create(resource, body)


def pod(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}}


async def test_every_write_needs_the_lead_and_no_read_does() -> None:
    inner, lead = FakeApi(), Lead()
    api: Api = FencedApi(inner, lead)
    await api.create(PODS, pod("a"))
    lead.left_s = 0.0
    writes = inner.writes
    for write in (
        api.create(PODS, pod("b")),
        api.replace(PODS, "a", pod("a")),
        api.patch(PODS, "a", {"metadata": {"labels": {"x": "y"}}}),
        api.delete(PODS, "a"),
    ):
        with pytest.raises(NotLeading):
            await write
    assert inner.writes == writes
    assert len((await api.list(PODS)).items) == 1 and (await api.get(PODS, "a"))["metadata"]["name"] == "a"


async def test_a_call_under_way_is_given_up_with_the_lead_and_waited_for_while_it_is_renewed() -> None:
    inner, lead = SlowApi(), Lead()
    api: Api = FencedApi(inner, lead)
    lead.left_s = 0.01
    renewed = asyncio.create_task(api.create(PODS, pod("a")))
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert not renewed.done(), "it still leads each time it looks"
    lead.left_s = 0.0
    with pytest.raises(NotLeading):
        await renewed
    inner.answers.set()
    await asyncio.sleep(0)
    assert inner.objects.get("pods", {}) == {}


@pytest_asyncio.fixture
async def backend(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[KubernetesBackend, FakeApi, Lead]]:
    api, machine, lead = FakeApi(), Machine(), Lead()
    Kubelet(api, machine)
    monkeypatch.setattr(link, "AgentClient", pod_client_of(machine))
    monkeypatch.setattr(home, "listens", listening(lambda: bool(machine.living)))
    made = backend_of(api)
    made.leads_for_s = lead
    api.put(SLOT_POOLS, slot_pool())
    await made.start(Listener())
    await until(lambda: bool(made.classes) and made.synced)
    yield made, api, lead
    await made.close(end_agents=False, grace_s=0)


async def test_a_create_call_without_an_answer_is_not_made_again_by_who_does_not_lead_any_more(
    backend: tuple[KubernetesBackend, FakeApi, Lead],
) -> None:
    made, api, lead = backend
    api.faults.append(("create pods", ApiError("no answer")))
    (kind,) = made.classes
    assert await made.add_slots(kind.name, 1) == 1
    await until(lambda: bool(made.backoffs))
    lead.left_s = 0.0
    await until(lambda: made.asked == {})
    assert api.calls["create pods"] == 1 and made.coming == {}
    assert made.backoffs[kind.name].failures == 1, "that it does not lead is no failure of the class"


async def test_who_does_not_lead_neither_begins_slots_nor_gives_them_back(
    backend: tuple[KubernetesBackend, FakeApi, Lead],
) -> None:
    made, api, lead = backend
    (kind,) = made.classes
    await made.add_slots(kind.name, 1)
    await until(lambda: any(each.heard for each in made._links.values()))
    (name,) = made._links
    lead.left_s = 0.0
    writes = api.writes
    with pytest.raises(SlotUnavailable):
        await made.add_slots(kind.name, 1)
    with pytest.raises(SlotUnavailable):
        await made.remove_slot(name)
    assert api.writes == writes and name in made._links and name not in made.leaving
