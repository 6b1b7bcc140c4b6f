"""Replicas of a tiny model: resumed from stored KV or without it, byte for byte; pages shared, memory returned."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from function_runtime.protocol import (
    Accepted,
    Failed,
    Finished,
    KvAsk,
    KvBad,
    KvChunk,
    KvKept,
    KvKnown,
    KvSealed,
    Parked,
    ReplicaState,
    ReplicaStatus,
    Reuse,
    Settled,
    TokenEvent,
    Tokens,
    Work,
)
from function_runtime.serving import STOOD_STILL_NS
from tests.function_runtime.worker.conftest import TinyModel
from tests.support.replica_client import AgentError, AgentProcess, ReplicaLink, wait_for, work

PROMPT = tuple(range(10, 87))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "two choices": {"temperature": 0.8, "seed": 5, "n": 2},
}


@pytest.fixture(params=SAMPLINGS.values(), ids=SAMPLINGS.keys())
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def request_of(sampling: dict[str, Any], **fields: Any) -> Work:
    return work(PROMPT, max_tokens=96, ignore_eos=True, **sampling, **fields)


def undisturbed(link: ReplicaLink, sampling: dict[str, Any]) -> list[TokenEvent]:
    request = link.submit(request_of(sampling, write_kv=False))
    assert isinstance(link.outcome(request), Finished)
    link.settle(request)
    return [event for _, event in link.tokens(request)]


def interrupted(link: ReplicaLink, sampling: dict[str, Any], tokens: int) -> Work:
    """A request under way whose first `tokens` tokens are known and whose KV is stored up to a whole chunk."""
    request = link.submit(request_of(sampling))
    while len(link.tokens(request)) < tokens:
        link.next(Tokens)
    wait_for(lambda: stored_end(link, request) >= len(PROMPT) or link.receive() is None, what="stored KV")
    return request


def chunks_of(link: ReplicaLink, request: Work) -> tuple[KvChunk, ...]:
    sealed = [m for m in link.said if isinstance(m, KvSealed) and m.request_id == request.request_id]
    return tuple(chunk for message in sealed for chunk in message.chunks)


def stored_end(link: ReplicaLink, request: Work) -> int:
    return max((chunk.end for chunk in chunks_of(link, request) if chunk.choice == 0), default=0)


def resume_of(link: ReplicaLink, request: Work, tokens: int, kv: tuple[KvChunk, ...]) -> Work:
    first = next(m for m in link.said if isinstance(m, Tokens) and m.request_id == request.request_id)
    produced = tuple(event for _, event in link.tokens(request))[:tokens]
    return msgspec.structs.replace(
        request, epoch=request.epoch + 1, produced=produced, prefill_ends=first.prefill_ends,
        begun=first.begun, kv=kv,
    )  # fmt: skip


def kill(agent: AgentProcess, status: ReplicaStatus) -> None:
    os.kill(status.pid, signal.SIGKILL)
    agent.until(status.replica_id, ReplicaState.FAILED)


def end(agent: AgentProcess, status: ReplicaStatus) -> ReplicaStatus:
    agent.end_replica(status.replica_id, grace_s=0)
    return agent.until(status.replica_id, ReplicaState.ENDED)


def test_a_killed_request_goes_on_byte_for_byte_from_stored_kv(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    first = native_agent.ready(tiny_model.spec(tmp_path))
    link = native_agent.connect(first)
    whole = undisturbed(link, sampling)
    request = interrupted(link, sampling, 41)
    kill(native_agent, first)
    second = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(second) as successor:
        resumed = successor.submit(resume_of(link, request, 41, chunks_of(link, request)))
        accepted = successor.next(Accepted)
        assert accepted.exact and accepted.loaded_tokens >= len(PROMPT), accepted
        assert successor.outcome(resumed).last_seq == len(whole)
        rest = successor.tokens(resumed)
    assert [seq for seq, _ in rest] == list(range(42, len(whole) + 1))
    assert [event for _, event in rest] == whole[41:]
    end(native_agent, second)


@pytest.mark.parametrize("damage", ["no store", "altered", "another tenant"])
def test_without_usable_kv_it_goes_on_byte_for_byte_all_the_same(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path, damage: str
) -> None:
    sampling = SAMPLINGS["two choices"]
    first = native_agent.ready(tiny_model.spec(tmp_path))
    link = native_agent.connect(first)
    whole = undisturbed(link, sampling)
    request = interrupted(link, sampling, 41)
    kill(native_agent, first)
    resume = resume_of(link, request, 41, chunks_of(link, request))
    match damage:
        case "altered":
            for pack in {chunk.pack for chunk in resume.kv}:
                raw = bytearray((tmp_path / pack).read_bytes())
                raw[len(raw) // 2] ^= 1
                raw[-100] ^= 1
                raw[4096] ^= 1
                (tmp_path / pack).write_bytes(raw)
        case "another tenant":
            resume = msgspec.structs.replace(resume, kv_scope="scope-b")
    second = native_agent.ready(tiny_model.spec(None if damage == "no store" else tmp_path))
    with native_agent.connect(second) as successor:
        resumed = successor.submit(resume)
        accepted = successor.next(Accepted)
        assert accepted.exact and accepted.recomputed_tokens > 0
        if damage == "another tenant":
            assert accepted.loaded_tokens == 0 and "another tenant" in accepted.detail
        successor.outcome(resumed)
        assert [event for _, event in successor.tokens(resumed)] == whole[41:]
    end(native_agent, second)


def test_a_drain_past_its_grace_stores_what_was_computed(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path
) -> None:
    sampling = SAMPLINGS["greedy"]
    first = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(first) as link:
        whole = undisturbed(link, sampling)
        request = link.submit(request_of(sampling))
        link.next(Tokens)
        native_agent.end_replica(first.replica_id, grace_s=0)
        parked = link.outcome(request)
        known = len(link.tokens(request))
        assert isinstance(parked, Parked) and parked.last_seq == known and "ended first" in parked.reason
        assert stored_end(link, request) >= len(PROMPT) + known - 1
    native_agent.until(first.replica_id, ReplicaState.ENDED)
    second = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(second) as successor:
        resumed = successor.submit(resume_of(link, request, known, chunks_of(link, request)))
        assert successor.next(Accepted).loaded_tokens >= len(PROMPT) + known - 1
        successor.outcome(resumed)
        assert [event for _, event in successor.tokens(resumed)] == whole[known:]
    end(native_agent, second)


def test_a_parked_request_leaves_its_kv_for_whoever_goes_on_and_others_run_on(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path
) -> None:
    sampling = SAMPLINGS["two choices"]
    first = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(first) as link:
        whole = undisturbed(link, sampling)
        other_whole = undisturbed(link, SAMPLINGS["greedy"])
        request, other = link.submit(request_of(sampling)), link.submit(request_of(SAMPLINGS["greedy"]))
        while len(link.tokens(request)) < 20:
            link.next(Tokens)
        link.park(request)
        parked = link.outcome(request)
        known = len(link.tokens(request))
        assert isinstance(parked, Parked) and (parked.last_seq, parked.reason) == (known, "a test")
        assert known < len(whole)
        chunks = chunks_of(link, request)
        assert max(chunk.end for chunk in chunks) >= len(PROMPT) + known // 2 - 1
        link.settle(request)
        ended = [m for m in link.said if isinstance(m, Finished) and m.request_id == other.request_id]
        assert ended or isinstance(link.outcome(other), Finished)
        assert [event for _, event in link.tokens(other)] == other_whole
        assert len(link.tokens(request)) == known
    second = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(second) as successor:
        resumed = successor.submit(resume_of(link, request, known, chunks))
        accepted = successor.next(Accepted)
        assert accepted.exact and accepted.loaded_tokens >= len(PROMPT) + known // 2 - 1, accepted
        successor.outcome(resumed)
        assert [event for _, event in successor.tokens(resumed)] == whole[known:]
    end(native_agent, first)
    end(native_agent, second)


@pytest.mark.slow
def test_a_slot_that_was_stopped_for_long_gives_its_work_up_and_stores_nothing_more(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Others may have taken over by then: agent and replica are stopped together, as a whole machine would be."""
    store = tmp_path / "store"
    with AgentProcess(tmp_path / "slot") as agent:
        status = agent.ready(tiny_model.spec(store))
        with agent.connect(status) as link:
            request = link.submit(request_of(SAMPLINGS["greedy"]))
            while len(link.tokens(request)) < 20:
                link.next(Tokens)
            for pid in (agent.process.pid, status.pid):
                os.kill(pid, signal.SIGSTOP)
            kept = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
            time.sleep(STOOD_STILL_NS / 1e9 + 1.0)  # the time it takes is what this is about
            for pid in (status.pid, agent.process.pid):
                os.kill(pid, signal.SIGCONT)
            failed = link.outcome(request)
            assert isinstance(failed, Failed) and failed.retry and failed.code == "stalled", failed
            link.settle(request)
            after = link.submit(request_of(SAMPLINGS["greedy"], write_kv=False))
            assert isinstance(link.outcome(after), Finished)
        assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == kept


def test_kv_of_a_settled_request_is_deleted(native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path) -> None:
    first = native_agent.ready(tiny_model.spec(tmp_path))
    link = native_agent.connect(first)
    request = interrupted(link, SAMPLINGS["greedy"], 30)
    inherited = set(tmp_path.glob("kv/packs/*/*"))
    assert inherited
    kill(native_agent, first)
    second = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(second) as successor:
        resumed = successor.submit(resume_of(link, request, 30, chunks_of(link, request)))
        successor.outcome(resumed)
        successor.settle(resumed)
        # What an earlier replica wrote may be another's by now: collection decides about it.
        wait_for(lambda: set(tmp_path.glob("kv/packs/*/*")) == inherited, what="the end of its own packs")
    end(native_agent, second)


@pytest.mark.parametrize("how", ["settled as going on", "submitted anew here"])
def test_kv_of_an_attempt_that_is_over_stays_for_the_next(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path, how: str
) -> None:
    """A gateway that lost sight of this replica goes on with the request elsewhere, and tells it so when it is back."""
    replica = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(replica) as link:
        request = interrupted(link, SAMPLINGS["greedy"], 30)
        stored = {tmp_path / chunk.pack for chunk in chunks_of(link, request)}
        if how == "submitted anew here":
            anew = link.submit(msgspec.structs.replace(request, epoch=2, write_kv=False))
            while link.outcome(anew).epoch != 2:
                pass
            link.settle(anew)
        else:
            link.send(Settled(request_id=request.request_id, epoch=1, goes_on=True))
        over = link.submit(work(tuple(range(200, 300)), max_tokens=40, ignore_eos=True))
        link.outcome(over)
        wait_for(lambda: chunks_of(link, over) or link.receive() is None, what="stored KV")
        link.settle(over)
        own = tmp_path / chunks_of(link, over)[0].pack
        wait_for(lambda: not own.exists(), what="the end of what is over")
        assert all(path.exists() for path in stored)
    end(native_agent, replica)


def test_two_replicas_share_the_pools_pages(native_agent: AgentProcess, tiny_model: TinyModel) -> None:
    statuses = [native_agent.ready(tiny_model.spec()) for _ in range(2)]
    for status in statuses:
        with native_agent.connect(status) as link:
            undisturbed(link, SAMPLINGS["greedy"])
    for status in statuses:
        (pool,) = (m for m in psutil.Process(status.pid).memory_maps() if m.path.endswith(".prepared"))
        assert pool.rss > 0 and pool.shared_clean + pool.shared_dirty == pool.rss
    (entry,) = native_agent.state().pool
    assert set(entry.holders) == {status.replica_id for status in statuses}
    for status in statuses:
        end(native_agent, status)
    (entry,) = native_agent.state().pool
    assert entry.holders == () and entry.state == "ready"


def test_memory_comes_back_after_the_end(native_agent: AgentProcess, tiny_model: TinyModel) -> None:
    for _ in range(2):
        status = native_agent.ready(tiny_model.spec())
        with native_agent.connect(status) as link:
            undisturbed(link, SAMPLINGS["greedy"])
        ended = end(native_agent, status)
        assert ended.memory_returned and not psutil.pid_exists(ended.pid)
        assert {"drain", "flush", "exit", "memory"} <= {stage.name for stage in ended.stages}


def test_device_time_is_attributed_exactly(native_agent: AgentProcess, tiny_model: TinyModel) -> None:
    status = native_agent.ready(tiny_model.spec())
    with native_agent.connect(status) as link:
        requests = [link.submit(work(PROMPT[: 20 + i], max_tokens=20, seed=i)) for i in range(3)]
        ends: dict[str, Finished] = {}
        while len(ends) < len(requests):
            finished = link.next(Finished)
            ends[finished.request_id] = finished
        for request in requests:
            link.settle(request)
    time = end(native_agent, status).time
    assert time.attributed_us == sum(e.device.prefill_us + e.device.decode_us for e in ends.values())
    assert time.cold_us + time.attributed_us + time.idle_us + time.overhead_us == time.held_us


def test_an_impossible_request_fails_alone(native_agent: AgentProcess, tiny_model: TinyModel) -> None:
    status = native_agent.ready(tiny_model.spec(max_context_tokens=128))
    with native_agent.connect(status) as link:
        good = link.submit(work(PROMPT, max_tokens=30, ignore_eos=True))
        bad = link.submit(work((1,) * 200, max_tokens=5))
        assert link.outcome(bad).code == "context_length_exceeded"
        assert link.outcome(good).last_seq == 30
    end(native_agent, status)


@pytest.mark.parametrize("fault", ["another identity", "no manifest", "a truncated checkpoint", "an unknown dtype"])
def test_a_checkpoint_that_cannot_be_used_is_refused_for_good(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path, fault: str
) -> None:
    spec = tiny_model.spec()
    manifest = tiny_model.manifest
    match fault:
        case "another identity":
            spec = msgspec.structs.replace(spec, identity="f" * 64)
        case "no manifest":
            spec = msgspec.structs.replace(spec, manifest_path=str(tmp_path / "none" / "manifest.json"))
        case "a truncated checkpoint":
            source = Path(manifest.files[0].path)
            short = tmp_path / source.name
            short.write_bytes(source.read_bytes()[:-4096])
            copy = replace(manifest, files=(replace(manifest.files[0], path=str(short)),))
            shutil.copytree(manifest.directory, tmp_path / "copy")
            path = copy.save(tmp_path / "copy" / "manifest.json").path
            spec = msgspec.structs.replace(tiny_model.spec(dtype="bfloat16"), manifest_path=str(path))
        case _:
            spec = tiny_model.spec(dtype="int3")
    native_agent.start_replica(spec)
    failed = native_agent.until(spec.replica_id, ReplicaState.FAILED)
    assert failed.error is not None and failed.error.retry is False and failed.error.message
    assert not [e for e in native_agent.state().pool if spec.replica_id in e.holders]


def test_the_pool_can_be_warmed_ahead(native_agent: AgentProcess, tiny_model: TinyModel) -> None:
    body = {"manifest_path": str(tiny_model.manifest.path), "dtype": "float16"}
    assert msgspec.json.decode(native_agent.call("POST", "/v1/pool/warm", body))["nbytes"] > 0
    with pytest.raises(AgentError) as refused:
        native_agent.call("POST", "/v1/pool/warm", {**body, "manifest_path": "/nowhere/manifest.json"})
    assert refused.value.status == 422 and "model_not_found" in refused.value.body


def kept_of(link: ReplicaLink, request: Work) -> tuple[KvChunk, ...]:
    said = [m for m in link.said if isinstance(m, KvKept) and m.request_id == request.request_id]
    return tuple(chunk for message in said for chunk in message.chunks)


def test_a_prompt_that_another_replica_computed_is_loaded_by_the_next_cold_one(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path
) -> None:
    worth_it = Reuse(probability=1.0, device_microusd_per_hour=10**12)
    first = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(first) as link:
        whole = undisturbed(link, SAMPLINGS["greedy"])
        request = link.submit(request_of(SAMPLINGS["greedy"], reuse=worth_it))
        link.outcome(request)
        link.settle(request)
        wait_for(lambda: link.receive() and len(kept_of(link, request)) >= 4, what="kept chunks")
        kept = kept_of(link, request)
    assert [chunk.start for chunk in kept][:2] == [0, 32] and all(c.end - c.start == 32 for c in kept)
    end(native_agent, first)
    second = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(second) as link:
        request = link.submit(request_of(SAMPLINGS["greedy"]))
        asked = link.next(KvAsk)
        assert list(asked.chains) == [chunk.chain for chunk in kept[: len(asked.chains)]]
        link.send(KvKnown(request.request_id, request.epoch, kept[: len(asked.chains)]))
        accepted = link.next(Accepted)
        assert accepted.loaded_tokens == len(PROMPT) // 32 * 32 and accepted.exact
        assert link.outcome(request).cached_tokens == accepted.loaded_tokens
        assert [event.token_id for _, event in link.tokens(request)] == [event.token_id for event in whole]
        # The journal is told what the request was begun with, so that a resume can begin with the same.
        assert {chunk.digest for chunk in kept[: len(asked.chains)]} <= {c.digest for c in chunks_of(link, request)}
    end(native_agent, second)


def test_what_began_on_a_stored_prefix_goes_on_byte_for_byte_when_the_prefix_is_gone(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The prefix holds a prompt and an answer: they are computed again as they were, one pass and single steps."""
    worth_it = Reuse(probability=1.0, device_microusd_per_hour=10**12)
    first = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(first) as link:
        request = link.submit(request_of(SAMPLINGS["greedy"], reuse=worth_it))
        link.outcome(request)
        answer = [event.token_id for _, event in link.tokens(request)]
        wait_for(lambda: link.receive() and len(kept_of(link, request)) >= 5, what="kept chunks")
        kept = kept_of(link, request)
        link.settle(request)
    end(native_agent, first)
    turn = work(
        (*PROMPT, *answer, 11, 12, 13), max_tokens=60, ignore_eos=True, logprobs=2, reuse=worth_it,
        **SAMPLINGS["seeded"],
    )  # fmt: skip
    second = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(second) as link:
        request = link.submit(turn)
        asked = link.next(KvAsk)
        link.send(KvKnown(request.request_id, request.epoch, kept[: len(asked.chains)]))
        assert link.next(Accepted).loaded_tokens == kept[-1].end
        link.outcome(request)
        whole = [event for _, event in link.tokens(request)]
        resume = resume_of(link, request, 23, chunks_of(link, request))
    assert resume.prefill_ends[0] == kept[-1].end and resume.begun.passes == (77, 77, kept[-1].end, -1)
    end(native_agent, second)
    shutil.rmtree(tmp_path / "kv")
    third = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(third) as link:
        resumed = link.submit(resume)
        accepted = link.next(Accepted)
        assert accepted.exact and accepted.loaded_tokens == 0, accepted
        link.outcome(resumed)
        assert [event for _, event in link.tokens(resumed)] == whole[23:]
    end(native_agent, third)


@pytest.mark.parametrize("answer", ["none", "late", "another byte"])
def test_without_a_usable_answer_a_prompt_is_computed(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path, answer: str
) -> None:
    status = native_agent.ready(tiny_model.spec(tmp_path))
    with native_agent.connect(status) as link:
        request = link.submit(request_of(SAMPLINGS["greedy"], share_prefix=False))
        link.outcome(request)
        known = [event for _, event in link.tokens(request)]
        wait_for(lambda: stored_end(link, request) >= len(PROMPT) or link.receive() is None, what="stored KV")
        chunks = sorted((c for c in chunks_of(link, request) if c.end in (32, 64)), key=lambda c: c.start)
        again = link.submit(request_of(SAMPLINGS["greedy"]))
        link.next(KvAsk)
        if answer == "another byte":
            path = tmp_path / chunks[0].pack
            raw = bytearray(path.read_bytes())
            raw[chunks[0].offset + chunks[0].nbytes // 2] ^= 1
            path.write_bytes(raw)
            link.send(KvKnown(again.request_id, again.epoch, tuple(chunks)))
            bad = link.next(KvBad)
            assert bad.chunk == chunks[0] and ("digest" in bad.reason or "checksum" in bad.reason)
        elif answer == "none":
            link.send(KvKnown(again.request_id, again.epoch))
        # The sound chunk behind the bad one may be met by what is computed from the front.
        assert link.outcome(again).cached_tokens in ((0, 32) if answer == "another byte" else (0,))
        (accepted,) = (m for m in link.said if isinstance(m, Accepted) and m.request_id == again.request_id)
        assert accepted.loaded_tokens in (0, 32)
        assert [event for _, event in link.tokens(again)] == known
    end(native_agent, status)


def test_a_replica_goes_on_byte_for_byte_with_another_share_of_its_device(
    native_agent: AgentProcess, tiny_model: TinyModel, sampling: dict[str, Any]
) -> None:
    status = native_agent.ready(tiny_model.spec())
    assert status.kv_bytes == 64 << 20
    with native_agent.connect(status) as link:
        whole = undisturbed(link, sampling)
        request = link.submit(request_of(sampling, write_kv=False))
        for tokens, share in ((10, 8 << 20), (30, 48 << 20)):
            while len(link.tokens(request)) < tokens:
                link.next(Tokens)
            native_agent.call("POST", "/v1/kv-shares", {"kv_bytes": {status.replica_id: share}})
            wait_for(lambda: native_agent.replica(status.replica_id).kv_bytes != 64 << 20, 20, "another share")
        assert isinstance(link.outcome(request), Finished)
        assert [event for _, event in link.tokens(request)] == whole
    wait_for(lambda: native_agent.replica(status.replica_id).kv_bytes == 48 << 20, 20, "the last share")
    with pytest.raises(AgentError):
        native_agent.call("POST", "/v1/kv-shares", {"kv_bytes": {status.replica_id: 0}})
    end(native_agent, status)
