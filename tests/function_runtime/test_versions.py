"""Versions one apart: fields that one side does not know are ignored, messages skipped, and versions really said."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgspec
import pytest

from function_runtime.gateway_link import GatewayLink
from function_runtime.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    Hello,
    Progress,
    ProtocolError,
    ReplicaSpec,
    ReplicaTime,
    Sampling,
    SlotEvent,
    Submit,
    UnknownMessage,
    Welcome,
    Work,
    decode_gateway,
    decode_replica,
    encode,
    speaks,
)


def body(message: Any) -> bytes:
    return encode(message)[4:]


def with_more(message: Any, **fields: Any) -> bytes:
    """As the next version might send it."""
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(body(message)), **fields})


def frame(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


def test_fields_of_another_version_are_ignored() -> None:
    cancel = Cancel("cmpl-1", 3)
    assert decode_gateway(with_more(cancel, why="the client left", urgency={"a": [1]})) == cancel
    progress = Progress(1, 2, 3, 4, 5, ReplicaTime())
    assert decode_replica(with_more(progress, temperature_c=61)) == progress
    work = msgspec.to_builtins(Work("cmpl-1", 1, "default", "", (1, 2), Sampling(seed=1, max_tokens=3)))
    work |= {"later": True, "sampling": {**work["sampling"], "later": 0.5}}
    submitted = decode_gateway(msgspec.msgpack.encode({"type": "Submit", "work": work}))
    assert isinstance(submitted, Submit) and submitted.work.sampling.max_tokens == 3


def test_an_agent_that_knows_more_or_less_is_understood() -> None:
    least = {"slot_id": "s", "agent_pid": 1, "incarnation": "i", "template_ready": True, "warm_workers": 0,
             "warm_target": 0, "pool_budget_bytes": 0, "pool_used_bytes": 0}  # fmt: skip
    older = msgspec.json.decode(msgspec.json.encode({"state": least}), type=SlotEvent).state
    assert older is not None and (older.protocol, older.terminating, older.devices) == (1, False, ())
    newer = {"state": {**least, "protocol": 2, "fans": [{"rpm": 900}]}, "weather": "fine"}
    state = msgspec.json.decode(msgspec.json.encode(newer), type=SlotEvent).state
    assert state is not None and state.protocol == 2
    spec: dict[str, Any] = {"replica_id": "r", "function": "f", "revision": 1, "tenant": "t", "manifest_path": "",
                            "identity": "i", "options": {"engine": "stub", "later": 1}, "later": []}  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ReplicaSpec).options.engine == "stub"


def test_messages_of_another_version_are_told_from_what_is_no_message() -> None:
    for decode in (decode_gateway, decode_replica):
        with pytest.raises(UnknownMessage) as unknown:
            decode(msgspec.msgpack.encode({"type": "Hibernate", "request_id": "r"}))
        assert unknown.value.tag == "Hibernate"
        for wrong in (b"\xc1", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"type": 7})):
            with pytest.raises(ProtocolError) as fault:
                decode(wrong)
            assert not isinstance(fault.value, UnknownMessage)
    with pytest.raises(ProtocolError) as fault:
        decode_gateway(msgspec.msgpack.encode({"type": "Cancel", "request_id": 7}))
    assert not isinstance(fault.value, UnknownMessage), "a known message that is wrong is wrong"


def test_a_version_that_is_not_the_first_is_really_said() -> None:
    """What is a default is left out of a frame: a default that moved would make every peer seem to be like oneself."""
    for said in (Hello("t", "gw", version=2), Welcome("r", "f", 1, "i", 1, 1, version=2)):
        assert msgspec.msgpack.decode(body(said))["version"] == 2
    assert Hello("t", "gw").version == 1 and Welcome("r", "f", 1, "i", 1, 1).version == 1
    silent = decode_gateway(msgspec.msgpack.encode({"type": "Hello", "token": "t", "gateway": "gw"}))
    assert isinstance(silent, Hello) and silent.version == 1
    assert [speaks(PROTOCOL_VERSION + step) for step in (-2, -1, 0, 1, 2)] == [False, True, True, True, False]


@pytest.fixture
def pair() -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def linked(pair: Any) -> GatewayLink:
    """Unix sockets have no TCP_NODELAY."""
    ours, _ = pair

    class Plain(socket.socket):
        def setsockopt(self, *args: Any) -> None:
            return

    return GatewayLink(Plain(fileno=ours.detach()), time.monotonic_ns())


def test_a_replica_skips_what_a_newer_gateway_says_and_hears_the_rest(pair: Any) -> None:
    link = linked(pair)
    try:
        link.welcome = True
        later = frame(msgspec.msgpack.encode({"type": "Hibernate", "request_id": "r"}))
        pair[1].sendall(later + encode(Cancel("cmpl-1", 1)) + later + encode(Cancel("cmpl-2", 1)))
        heard = link.receive()
        assert [each.request_id for each in heard if isinstance(each, Cancel)] == ["cmpl-1", "cmpl-2"]
        assert not link.closed
    finally:
        link.close()


def test_who_greets_with_something_else_is_closed(pair: Any) -> None:
    link = linked(pair)
    try:
        pair[1].sendall(frame(msgspec.msgpack.encode({"type": "Hibernate"})))
        assert link.receive() == [] and link.closed
    finally:
        link.close()
