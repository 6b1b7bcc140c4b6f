"""An agent on another machine: where it listens, whom it obeys without holding a secret, and how it goes away."""

from __future__ import annotations

import http.client
import signal
import socket
from collections.abc import Callable

import msgspec
import pytest

from function_runtime.agent.access import Access
from function_runtime.agent.address import Address
from function_runtime.protocol import (
    Finished,
    Parked,
    ReplicaState,
    SlotEvent,
    SlotState,
    Tokens,
    agent_token,
    peer_token,
    token_hash,
)
from tests.support.replica_client import AgentError, AgentProcess, stub_spec, wait_for, work

HOST = "127.0.0.2"
TOKEN = agent_token(b"the secret of a control plane", "slot-0")
HASHES = ("--token-hash", token_hash(TOKEN), "--peer-token-hash", token_hash(peer_token(TOKEN)))
StartAgent = Callable[..., AgentProcess]


def health(agent: AgentProcess) -> tuple[int, str]:
    connection = http.client.HTTPConnection(agent.info.host, agent.info.port, timeout=10)
    try:
        connection.request("GET", "/v1/health")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def commanded(agent: AgentProcess) -> AgentProcess:
    """The agent, with the token that its directory does not tell."""
    agent.info = msgspec.structs.replace(agent.info, token=TOKEN)
    return agent


@pytest.mark.parametrize(
    ("listen", "advertise", "ports", "found"),
    [
        ("127.0.0.1:0", "", "", Address()),
        ("10.1.2.3:7070", "", "7100-7163", Address("10.1.2.3", 7070, "10.1.2.3", (7100, 7163))),
        ("0.0.0.0:7070", "10.1.2.3", "7100", Address("0.0.0.0", 7070, "10.1.2.3", (7100, 7100))),
        ("[::]:7070", "fd00::7", "", Address("::", 7070, "fd00::7")),
    ],
)
def test_an_address_is_parsed(listen: str, advertise: str, ports: str, found: Address) -> None:
    assert Address.parse(listen, advertise, ports) == found


@pytest.mark.parametrize(
    ("listen", "ports", "why"),
    [
        ("7070", "", "HOST:PORT is needed"),
        ("h:99999", "", "HOST:PORT is needed"),
        ("0.0.0.0:7070", "", "say with --advertise"),
        (":7070", "", "say with --advertise"),
        ("h:1", "9-3", "FIRST-LAST is needed"),
        ("h:1", "a-b", "FIRST-LAST is needed"),
    ],
)
def test_an_address_that_cannot_be_is_refused(listen: str, ports: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Address.parse(listen, "", ports)


def test_a_hash_opens_nothing() -> None:
    access = Access.parse(token_hash(TOKEN), token_hash(peer_token(TOKEN)))
    assert access.is_command(f"Bearer {TOKEN}") and access.is_peer(f"Bearer {peer_token(TOKEN)}")
    for given in ("", "Bearer ", TOKEN, f"Bearer {access.agent_hash}", f"Bearer {peer_token(TOKEN)}", "Bearer \udcff"):
        assert not access.is_command(given)
    for wrong in (("", access.peer_hash), (access.agent_hash, ""), (access.agent_hash.upper(), access.peer_hash)):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            Access.parse(*wrong)


def test_a_slot_elsewhere_obeys_its_token_holds_no_secret_and_says_where_its_replicas_are(
    start_agent: StartAgent,
) -> None:
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    agent = start_agent("--listen", f"{HOST}:0", "--replica-ports", f"{port}-{port}", *HASHES)
    assert (agent.info.host, agent.info.token) == (HOST, "")
    assert health(agent) == (200, "ok")
    for token in ("", "wrong", peer_token(TOKEN), token_hash(TOKEN)):
        with pytest.raises(AgentError) as refused:
            agent.call("GET", "/v1/state", token=token)
        assert refused.value.status == 401
    for token, status in ((peer_token(TOKEN), 404), (TOKEN, 404), ("wrong", 401)):
        with pytest.raises(AgentError) as refused:
            agent.call("GET", "/v1/pool/nothing", token=token)
        assert refused.value.status == status
    commanded(agent)
    status = agent.ready(stub_spec())
    assert (status.host, status.port) == (HOST, port)
    with agent.connect(status) as link:
        assert link.welcome.replica_id == status.replica_id
    second = stub_spec()
    agent.start_replica(second)
    failed = agent.until(second.replica_id, ReplicaState.FAILED)
    assert failed.error is not None and (failed.error.code, failed.error.retry) == ("no_replica_port", True)


def test_a_terminated_slot_says_so_takes_nothing_new_finishes_or_parks_and_exits(start_agent: StartAgent) -> None:
    agent = commanded(start_agent("--listen", f"{HOST}:0", "--term-grace-s", "1.5", *HASHES))
    quick, slow = (agent.ready(stub_spec({"STOKER_STUB_TOKEN_S": step_s})) for step_s in ("0.02", "0.1"))
    events = agent.events()
    assert next(events).state is not None
    with agent.connect(quick) as short, agent.connect(slow) as long:
        small, large = short.submit(work(max_tokens=30)), long.submit(work(max_tokens=400))
        short.next(Tokens), long.next(Tokens)
        agent.process.send_signal(signal.SIGTERM)
        state = _terminating(events)
        assert {status.replica_id for status in state.replicas} == {quick.replica_id, slow.replica_id}
        assert health(agent) == (503, "terminating")
        with pytest.raises(AgentError, match="slot_terminating") as refused:
            agent.start_replica(stub_spec())
        assert refused.value.status == 503
        assert isinstance(short.outcome(small), Finished)
        short.settle(small)
        parked = long.outcome(large)
        assert isinstance(parked, Parked) and 0 < parked.last_seq < 400
    assert wait_for(lambda: agent.process.poll() is not None, what="the agent's end")
    assert agent.process.returncode == 0 and not agent.family()


def _terminating(events: object) -> SlotState:
    event: SlotEvent
    for event in events:  # type: ignore[attr-defined]
        if event.state is not None and event.state.terminating:
            return event.state
    raise AssertionError("the slot never said that it terminates")
