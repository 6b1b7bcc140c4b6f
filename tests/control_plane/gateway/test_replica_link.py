"""A link greets, tells what it hears in order, and tells its loss once; silence is a loss only while there is work."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from control_plane.replica_link import LinkError, ReplicaLink
from function_runtime.protocol import (
    PROTOCOL_VERSION,
    EngineOptions,
    ReplicaMessage,
    ReplicaSpec,
    Sampling,
    Tokens,
    Work,
)
from tests.control_plane.gateway.conftest import until
from tests.control_plane.gateway.fakes import Behaviour, FakeReplica


class Ear:
    def __init__(self) -> None:
        self.messages: list[ReplicaMessage] = []
        self.losses: list[str] = []

    def link_message(self, link: ReplicaLink, message: ReplicaMessage) -> None:
        self.messages.append(message)

    def link_lost(self, link: ReplicaLink, reason: str) -> None:
        self.losses.append(reason)


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    spec = ReplicaSpec("rep-1", "fn", 1, "default", "", "id", EngineOptions(engine="stub"))
    replica = FakeReplica(spec, Behaviour())
    await replica.listen()
    yield replica
    await replica.die()


async def connect(replica: FakeReplica, ear: Ear, stalled_after_s: float = 20.0) -> ReplicaLink:
    return await ReplicaLink.connect(
        "127.0.0.1", replica.port, replica.token, "gw-1", ear, stalled_after_s=stalled_after_s
    )


def work(epoch: int = 1) -> Work:
    return Work("cmpl-1", epoch, "default", "", (1, 2), Sampling(seed=1, max_tokens=3))


async def test_it_greets_and_tells_what_it_hears_in_order(replica: FakeReplica) -> None:
    ear = Ear()
    link = await connect(replica, ear)
    assert link.welcome is not None
    assert (link.replica_id, link.welcome.identity) == ("rep-1", "id")
    link.submit(work())
    await until(lambda: len(ear.messages) == 5)
    assert [type(message).__name__ for message in ear.messages] == ["Accepted", *["Tokens"] * 3, "Finished"]
    assert [message.first_seq for message in ear.messages if isinstance(message, Tokens)] == [1, 2, 3]
    link.close()
    assert ear.losses == []


async def test_a_loss_is_told_once(replica: FakeReplica) -> None:
    ear = Ear()
    link = await connect(replica, ear)
    await replica.cut_connections()
    await until(lambda: ear.losses)
    link.close()
    assert len(ear.losses) == 1


async def test_silence_with_work_in_flight_is_a_stall_and_a_heartbeat_is_not(replica: FakeReplica) -> None:
    ear = Ear()
    link = await connect(replica, ear, stalled_after_s=0.1)
    await asyncio.sleep(0.15)
    assert ear.losses == []
    link.set_busy(True)
    for _ in range(5):
        await asyncio.sleep(0.04)
        replica.heartbeat()
    assert ear.losses == []
    await until(lambda: ear.losses)
    assert "no progress" in ear.losses[0]


async def test_who_does_not_greet_is_not_there() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(LinkError, match="no welcome"):
        await ReplicaLink.connect("127.0.0.1", port, "t", "gw-1", Ear(), connect_s=0.05)
    server.close()
    with pytest.raises(LinkError, match="cannot connect"):
        await ReplicaLink.connect("127.0.0.1", port, "t", "gw-1", Ear())


async def greeting(*said: dict[str, Any]) -> asyncio.Server:
    """A replica that says these things to whoever connects."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for each in said:
            body = msgspec.msgpack.encode(each)
            writer.write(struct.pack(">I", len(body)) + body)
        await reader.read()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


WELCOME = {"type": "Welcome", "replica_id": "rep-1", "function": "fn", "revision": 1, "identity": "id",
           "max_requests": 1, "max_context_tokens": 1, "later": True}  # fmt: skip


async def test_a_replica_one_version_on_is_heard_and_what_only_it_knows_is_skipped() -> None:
    later = {"type": "Weather", "request_id": "r"}
    unknown = {"type": "Unknown", "request_id": "r", "epoch": 1}
    server = await greeting({**WELCOME, "version": PROTOCOL_VERSION + 1}, later, unknown, later, unknown)
    ear = Ear()
    link = await ReplicaLink.connect("127.0.0.1", server.sockets[0].getsockname()[1], "t", "gw-1", ear)
    await until(lambda: len(ear.messages) == 2)
    assert ear.losses == [] and {type(each).__name__ for each in ear.messages} == {"Unknown"}
    link.close()
    server.close()


async def test_a_replica_further_apart_is_refused_with_both_versions() -> None:
    server = await greeting({**WELCOME, "version": PROTOCOL_VERSION + 2})
    with pytest.raises(LinkError, match=f"speaks version {PROTOCOL_VERSION + 2}, this gateway {PROTOCOL_VERSION}"):
        await ReplicaLink.connect("127.0.0.1", server.sockets[0].getsockname()[1], "t", "gw-1", Ear())
    server.close()


async def test_what_is_no_frame_ends_the_link() -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff\xff\xff\xffHTTP/1.1 200 OK")

    server = await asyncio.start_server(rude, "127.0.0.1", 0)
    with pytest.raises(LinkError, match="exceeds"):
        await ReplicaLink.connect("127.0.0.1", server.sockets[0].getsockname()[1], "t", "gw-1", Ear())
    server.close()
