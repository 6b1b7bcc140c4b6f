"""What a gateway gets from a replica: tokens once and in order, whatever becomes of its connection."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from function_runtime.protocol import (
    Accepted,
    Attached,
    Cancel,
    Failed,
    Finished,
    Hello,
    Parked,
    Progress,
    ReplicaState,
    Settled,
    Tokens,
    Unknown,
    Welcome,
    encode,
)
from function_runtime.stub import stub_token
from tests.support.replica_client import AgentProcess, ReplicaLink, stub_spec, work

SLOW = {"STOKER_STUB_TOKEN_S": "0.02"}


def expected(request, choice: int = 0) -> list[int]:
    sampling = request.sampling
    return [stub_token(request.prompt, sampling.seed, choice, i) for i in range(sampling.max_tokens)]


def test_tokens_come_numbered_without_a_gap_and_end_with_the_outcome(agent: AgentProcess) -> None:
    with agent.connect(agent.ready(stub_spec())) as link:
        request = link.submit(work(max_tokens=20))
        outcome = link.outcome(request)
    assert isinstance(outcome, Finished) and not outcome.cancelled and outcome.last_seq == 20
    tokens = link.tokens(request)
    assert [seq for seq, _ in tokens] == list(range(1, 21))
    assert [event.token_id for _, event in tokens] == expected(request)
    assert isinstance(link.said[1], Accepted)


def test_choices_share_one_sequence(agent: AgentProcess) -> None:
    with agent.connect(agent.ready(stub_spec())) as link:
        request = link.submit(work(max_tokens=6, n=3))
        assert link.outcome(request).last_seq == 18
    tokens = link.tokens(request)
    assert [seq for seq, _ in tokens] == list(range(1, 19))
    for choice in range(3):
        assert [e.token_id for _, e in tokens if e.choice == choice] == expected(request, choice)


def test_a_resumed_request_goes_on_at_the_next_place(agent: AgentProcess) -> None:
    with agent.connect(agent.ready(stub_spec())) as link:
        whole = link.submit(work(max_tokens=10))
        link.outcome(whole)
        produced = tuple(event for _, event in link.tokens(whole))[:4]
        rest = link.submit(work(max_tokens=10, epoch=2, produced=produced, request_id="cmpl-" + "1" * 32))
        link.outcome(rest)
    assert [(s, e.token_id) for s, e in link.tokens(rest)] == [(s, e.token_id) for s, e in link.tokens(whole)][4:]


def test_attach_after_a_lost_connection_gives_exactly_the_missing_tokens(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    with agent.connect(status) as first:
        request = first.submit(work(max_tokens=40, n=2))
        while len(first.tokens(request)) < 7:
            first.next(Tokens)
    seen = first.tokens(request)[:7]
    with agent.connect(status) as second:
        assert (request.request_id, request.epoch) in second.welcome.running
        second.attach(request, after_seq=7)
        second.next(Attached)
        assert second.outcome(request).last_seq == 80
    tokens = seen + second.tokens(request)
    assert [seq for seq, _ in tokens] == list(range(1, 81))
    for choice in range(2):
        assert [e.token_id for _, e in tokens if e.choice == choice] == expected(request, choice)


def test_an_outcome_is_kept_until_it_is_settled(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec())
    with agent.connect(status) as first:
        request = first.submit(work())
        first.outcome(request)
    with agent.connect(status) as second:
        second.attach(request, after_seq=5)
        assert isinstance(second.outcome(request), Finished)
        assert [seq for seq, _ in second.tokens(request)] == [6, 7, 8]
        second.settle(request)
        second.attach(request, after_seq=0)
        assert isinstance(second.outcome(request), Unknown)


def test_the_same_attempt_submitted_twice_is_one_attempt(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    with agent.connect(status) as first:
        request = first.submit(work(max_tokens=20))
        first.next(Tokens)
    with agent.connect(status) as second:
        second.submit(request)
        second.outcome(request)
    assert [seq for seq, _ in second.tokens(request)] == list(range(1, 21))


def test_an_older_epoch_is_refused_and_a_newer_one_takes_over(agent: AgentProcess) -> None:
    with agent.connect(agent.ready(stub_spec(SLOW))) as link:
        request = link.submit(work(max_tokens=500, epoch=3))
        link.next(Tokens)
        stale = work(max_tokens=500, epoch=2, request_id=request.request_id)
        link.submit(stale)
        assert link.next(Unknown).epoch == 2
        newer = work(max_tokens=3, epoch=4, request_id=request.request_id)
        link.submit(newer)
        ends = [link.next(Finished), link.next(Finished)]
    assert [(end.epoch, end.cancelled) for end in ends] == [(3, True), (4, False)]


def test_cancel_ends_within_a_step_and_settled_forgets(agent: AgentProcess) -> None:
    with agent.connect(agent.ready(stub_spec(SLOW))) as link:
        request = link.submit(work(max_tokens=1000))
        link.next(Tokens)
        link.send(Cancel(request_id=request.request_id, epoch=1))
        outcome = link.outcome(request)
        assert isinstance(outcome, Finished) and outcome.cancelled
        assert outcome.last_seq == len(link.tokens(request)) < 10
        link.send(Settled(request_id=request.request_id, epoch=1))
        link.send(Cancel(request_id=request.request_id, epoch=1))
        assert isinstance(link.outcome(request), Unknown)


def test_a_request_beyond_the_context_fails_for_good(agent: AgentProcess) -> None:
    with agent.connect(agent.ready(stub_spec(max_context_tokens=64))) as link:
        request = link.submit(work(max_tokens=100))
        outcome = link.outcome(request)
    assert isinstance(outcome, Failed) and outcome.code == "context_length_exceeded" and not outcome.retry


@pytest.mark.parametrize(
    "opening",
    [
        pytest.param(encode(Hello(token="wrong", gateway="gw")), id="wrong token"),
        pytest.param(encode(Settled(request_id="cmpl-1", epoch=1)), id="no hello"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="no frame"),
        pytest.param(b"\x00\x10\x00\x00" + b"x" * 8192, id="a large frame"),
        pytest.param(b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1", id="no message"),
    ],
)
def test_nothing_is_said_to_who_does_not_know_the_token(agent: AgentProcess, opening: bytes) -> None:
    status = agent.ready(stub_spec())
    with socket.create_connection((status.host, status.port), timeout=10) as stranger:
        stranger.sendall(opening)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass
    with agent.connect(status) as link:
        assert isinstance(link.welcome, Welcome)


def test_a_gateway_that_does_not_read_stops_nobody_else(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(max_context_tokens=20_000))
    stuck = agent.connect(status)
    deaf = stuck.submit(work(max_tokens=10_000))
    with agent.connect(status) as link:
        request = link.submit(work(max_tokens=50))
        link.outcome(request)
        assert len(link.tokens(request)) == 50
        stuck.close()
        link.attach(deaf, after_seq=0)
        assert link.outcome(deaf).last_seq == 10_000
        assert [seq for seq, _ in link.tokens(deaf)] == list(range(1, 10_001))


def test_draining_finishes_what_runs_and_refuses_what_comes(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    with agent.connect(status) as link:
        running = link.submit(work(max_tokens=150))
        link.next(Tokens)
        agent.end_replica(status.replica_id, grace_s=60)
        # What comes before the replica has heard of its end is still taken.
        while isinstance(refused := link.outcome(late := link.submit(work(max_tokens=1))), Finished):
            link.settle(late)
        assert isinstance(refused, Parked) and refused.last_seq == 0 and "ending" in refused.reason
        finished = link.outcome(running)
        assert isinstance(finished, Finished) and finished.last_seq == 150
        link.settle(late)
        assert agent.replica(status.replica_id).state is ReplicaState.DRAINING
        link.settle(running)
        ended = agent.until(status.replica_id, ReplicaState.ENDED)
    assert ended.exit == "exit 0" and ended.memory_returned
    assert [stage.name for stage in ended.stages][-4:] == ["drain", "flush", "exit", "memory"]


def test_a_signal_makes_a_replica_give_its_work_back(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    with agent.connect(status) as link:
        request = link.submit(work(max_tokens=5000))
        link.next(Tokens)
        os.kill(status.pid, signal.SIGTERM)
        outcome = link.outcome(request)
        assert isinstance(outcome, Parked) and outcome.last_seq == len(link.tokens(request))
        assert outcome.reason == "this replica ended first: SIGTERM"
    assert agent.until(status.replica_id, ReplicaState.ENDED).exit == "exit 0"


def test_parking_stops_one_request_at_a_token_and_says_so_again_when_asked_again(agent: AgentProcess) -> None:
    with agent.connect(agent.ready(stub_spec(SLOW))) as link:
        request, other = link.submit(work(max_tokens=5000)), link.submit(work(max_tokens=30))
        link.next(Tokens)
        link.park(request, "a drain")
        parked = link.outcome(request)
        known = link.tokens(request)
        assert isinstance(parked, Parked) and (parked.last_seq, parked.reason) == (len(known), "a drain")
        assert parked.device.prefill_us > 0
        link.park(request)
        assert link.outcome(request) == parked
        link.attach(request, after_seq=0)
        assert link.outcome(request) == parked
        assert isinstance(link.outcome(other), Finished)
        assert link.tokens(request)[len(known) :] == known, "told again from the start, and nothing more"
        link.settle(request)
        link.park(request)
        assert isinstance(link.outcome(request), Unknown)
        produced = tuple(event for _, event in known)
        more = link.submit(work(max_tokens=len(known) + 3, epoch=2, produced=produced, request_id=request.request_id))
        assert link.outcome(more).last_seq == len(known) + 3


def test_draining_past_its_grace_gives_the_work_back(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    with agent.connect(status) as link:
        request = link.submit(work(max_tokens=5000))
        link.next(Tokens)
        agent.end_replica(status.replica_id, grace_s=0.1)
        outcome = link.outcome(request)
        assert isinstance(outcome, Parked) and outcome.last_seq == len(link.tokens(request))
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                link.receive()
    assert agent.until(status.replica_id, ReplicaState.ENDED).exit == "exit 0"


def test_time_is_accounted_for_to_the_microsecond(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec({"STOKER_STUB_TOKEN_S": "0.003"}))
    with agent.connect(status) as link:
        requests = [link.submit(work(max_tokens=20 + i)) for i in range(4)]
        cancelled = link.submit(work(max_tokens=10_000))
        ends = {}
        while len(ends) < 4:
            end = link.next(Finished)
            ends[end.request_id] = end
        link.send(Cancel(request_id=cancelled.request_id, epoch=1))
        ends[cancelled.request_id] = link.outcome(cancelled)
        for request in (*requests, cancelled):
            link.settle(request)
    agent.end_replica(status.replica_id)
    time = agent.until(status.replica_id, ReplicaState.ENDED).time
    assert time.cold_us + time.attributed_us + time.idle_us + time.overhead_us == time.held_us
    assert time.attributed_us == sum(e.device.prefill_us + e.device.decode_us for e in ends.values())
    assert all(part >= 0 for part in (time.cold_us, time.attributed_us, time.idle_us, time.overhead_us))


def test_heartbeats_come_from_the_loop_with_and_without_work(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    with agent.connect(status) as link:
        request = link.submit(work(max_tokens=40))
        link.outcome(request)
        busy = link.progress
        assert len(busy) >= 3 and any(p.running for p in busy)
        assert [p.steps for p in busy] == sorted(p.steps for p in busy)
        while link.progress[-1].running:
            link.receive()


def test_links_are_independent(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    links: list[ReplicaLink] = [agent.connect(status) for _ in range(5)]
    requests = [link.submit(work(max_tokens=10, seed=i)) for i, link in enumerate(links)]
    for link, request in zip(links, requests, strict=True):
        link.outcome(request)
        assert [e.token_id for _, e in link.tokens(request)] == expected(request)
        link.close()


def others_of(link: ReplicaLink, count: int) -> None:
    """Reads until the replica says that others take this many places."""
    while link.next(Progress).others != count:
        pass


def test_two_gateways_at_once_each_get_their_own_and_hear_of_the_others_places(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    with agent.connect(status) as first, agent.connect(status) as second:
        mine = [first.submit(work(max_tokens=60, request_id=f"cmpl-{number:032x}")) for number in range(2)]
        others_of(second, 2)
        theirs = second.submit(work(max_tokens=20, request_id="cmpl-" + "f" * 32))
        others_of(first, 1)
        assert second.outcome(theirs).last_seq == 20
        others_of(first, 0)
        for request in mine:
            assert first.outcome(request).last_seq == 60
            assert [seq for seq, _ in first.tokens(request)] == list(range(1, 61))
            assert not second.tokens(request)


def test_only_the_gateway_it_reports_to_can_end_a_request(agent: AgentProcess) -> None:
    status = agent.ready(stub_spec(SLOW))
    with agent.connect(status) as former, agent.connect(status) as heir:
        request = former.submit(work(max_tokens=40))
        former.next(Tokens)
        heir.attach(request, after_seq=0)
        heir.next(Attached)
        former.send(Cancel(request_id=request.request_id, epoch=request.epoch))
        former.next(Unknown)
        former.settle(request)
        assert not heir.outcome(request).cancelled
        assert [seq for seq, _ in heir.tokens(request)] == list(range(1, 41))
