"""Replicas that keep and take prefixes as fp8 or int4: what began on one goes on from it, or says that it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from function_runtime.protocol import Accepted, KvAsk, KvChunk, KvKept, KvKnown, Reuse, TokenEvent, Work
from tests.function_runtime.worker.conftest import TinyModel
from tests.function_runtime.worker.test_native import SAMPLINGS, chunks_of, end, kept_of, resume_of
from tests.support.replica_client import AgentProcess, ReplicaLink, wait_for, work

SYSTEM = tuple(range(10, 80))
WORTH_IT = Reuse(probability=1.0, device_microusd_per_hour=10**12)
FORMS = ["fp8", "int4"]


def asking(form: str, *tail: int, sampling: str = "seeded") -> Work:
    return work(
        (*SYSTEM, *tail), max_tokens=48, ignore_eos=True, prefix_form=form, reuse=WORTH_IT, **SAMPLINGS[sampling]
    )  # fmt: skip


def keep(agent: AgentProcess, model: TinyModel, store: Path, form: str) -> tuple[KvChunk, ...]:
    """What a replica that came and went left of the system prompt."""
    status = agent.ready(model.spec(store))
    with agent.connect(status) as link:
        request = link.submit(asking(form, 1, 2, 3))
        link.outcome(request)
        link.settle(request)
        wait_for(lambda: (link.receive(), len(kept_of(link, request)) >= 3)[1], what="kept chunks")
        kept = kept_of(link, request)
        packs = {chunk.pack for chunk in kept}
        wait_for(lambda: (link.receive(), in_store(store) <= packs)[1], what="the end of the raw packs")
    end(agent, status)
    assert in_store(store) == packs
    return kept


def in_store(store: Path) -> set[str]:
    return {str(path.relative_to(store)) for path in (store / "kv" / "packs").rglob("*") if path.is_file()}


def answer(link: ReplicaLink, request: Work, kept: tuple[KvChunk, ...]) -> Accepted:
    asked = link.next(KvAsk)
    link.send(KvKnown(request.request_id, request.epoch, kept[: len(asked.chains)]))
    return link.next(Accepted)


def events_of(link: ReplicaLink, request: Work) -> list[TokenEvent]:
    link.outcome(request)
    return [event for _, event in link.tokens(request)]


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_is_kept_in_the_functions_form_and_raw_requests_do_not_meet_it(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path, form: str
) -> None:
    status = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(status) as link:
        asked: dict[str, KvAsk] = {}
        kept: dict[str, KvKept] = {}
        for name in ("raw", form):
            request = link.submit(asking(name, len(asked)))
            asked[name] = link.next(KvAsk)
            link.send(KvKnown(request.request_id, request.epoch))
            link.outcome(request)
            wait_for(lambda r=request: (link.receive(), len(kept_of(link, r)) >= 2)[1], what="kept chunks")
            kept[name] = next(m for m in link.said if isinstance(m, KvKept) and m.request_id == request.request_id)
            sealed = {chunk.form for chunk in chunks_of(link, request)}
            assert sealed == {"raw"}, "what is in flight is raw"
            link.settle(request)
        assert asked["raw"].identity != asked[form].identity and not set(asked["raw"].chains) & set(asked[form].chains)
        assert {name: message.identity for name, message in kept.items()} == {n: a.identity for n, a in asked.items()}
        assert {chunk.form for chunk in kept[form].chunks} == {form}
        assert f"kept as {form}" in kept[form].reason
    end(native_agent, status)


@pytest.mark.parametrize("form", FORMS)
def test_what_began_on_a_lossy_prefix_goes_on_byte_for_byte_on_another_replica(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path, form: str
) -> None:
    kept = keep(native_agent, tiny_model, tmp_path, form)
    second = native_agent.ready(tiny_model.spec(tmp_path, prefix_cache=True))
    with native_agent.connect(second) as link:
        request = link.submit(asking(form, 4, 5))
        accepted = answer(link, request, kept)
        assert accepted.loaded_tokens == 64 and form in accepted.detail
        whole = events_of(link, request)
        # The next one finds it in the memory of this replica, and names the chunks that it was loaded from.
        neighbour = link.submit(asking(form, 6, 7, 8))
        beside = events_of(link, neighbour)
        named = [chunk for chunk in chunks_of(link, neighbour) if chunk.end <= 64]
        assert [(c.start, c.form, c.digest) for c in named] == [(c.start, form, c.digest) for c in kept[:2]]
        resumes = [resume_of(link, r, 23, chunks_of(link, r)) for r in (request, neighbour)]
    end(native_agent, second)
    third = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(third) as link:
        for resume, expected in zip(resumes, (whole, beside), strict=True):
            resumed = link.submit(resume)
            accepted = link.next(Accepted)
            assert accepted.exact and accepted.loaded_tokens >= 64, accepted
            assert events_of(link, resumed) == expected[23:]
    end(native_agent, third)


def test_without_its_lossy_prefix_a_resume_goes_on_and_says_that_it_is_not_exact(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path
) -> None:
    kept = keep(native_agent, tiny_model, tmp_path, "fp8")
    second = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(second) as link:
        request = link.submit(asking("fp8", 4, 5))
        answer(link, request, kept)
        whole = events_of(link, request)
        resume = resume_of(link, request, 23, chunks_of(link, request))
    end(native_agent, second)
    shutil.rmtree(tmp_path / "kv")
    third = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(third) as link:
        resumed = link.submit(resume)
        accepted = link.next(Accepted)
        assert not accepted.exact and accepted.loaded_tokens == 0
        assert "the fp8 prefix of 64 positions that it began on is not to be had" in accepted.detail
        assert len(events_of(link, resumed)) == len(whole) - 23
    end(native_agent, third)
