"""A stream is read whole and once, whatever happens to its connections."""

from __future__ import annotations

import json

import pytest

from control_plane.client import AsyncClient, Client, Endpoint, HttpError, StreamLost, Unreachable
from control_plane.resumption import EventParser
from tests.control_plane.cli.scripted_server import REQUEST_ID, Script, ScriptedServer

CHAT = "/v1/chat/completions"
WORDS = ["once ", "upon ", "a ", "time ", "there ", "was"]


def read(script: Script, **options: float) -> tuple[str, int]:
    with ScriptedServer(script) as server:
        stream = Client(server.endpoint, **options).stream(CHAT, {"model": "m", "messages": []})
        return "".join(event.text() for event in stream), stream.resumes


async def read_async(script: Script) -> tuple[str, int]:
    with ScriptedServer(script) as server:
        async with AsyncClient(server.endpoint) as client:
            stream = client.stream(CHAT, {"model": "m", "messages": []})
            return "".join([event.text() async for event in stream]), stream.resumes


@pytest.mark.parametrize("cuts", [[], [0], [1], [3, 0, 1], [6], [5, 1]], ids=str)
@pytest.mark.parametrize("tell_id", [True, False], ids=["id-in-header", "id-in-first-event"])
async def test_text_arrives_whole_wherever_connections_break(cuts: list[int], tell_id: bool) -> None:
    breaks = len(cuts)
    assert read(Script(WORDS, list(cuts), tell_id)) == ("".join(WORDS), breaks)
    assert await read_async(Script(WORDS, list(cuts), tell_id)) == ("".join(WORDS), breaks)


async def test_events_that_come_twice_are_given_once() -> None:
    assert read(Script(WORDS, [4, None], repeat=3)) == ("".join(WORDS), 1)
    assert await read_async(Script(WORDS, [4, None], repeat=3)) == ("".join(WORDS), 1)


def test_a_break_before_the_id_is_known_repeats_the_post_under_the_same_key() -> None:
    script = Script(WORDS, [-1, 2])
    assert read(script) == ("".join(WORDS), 1)
    methods = [(method, headers.get("Idempotency-Key")) for method, _, headers in script.calls]
    assert [method for method, _ in methods] == ["POST", "POST", "GET"]
    assert methods[0][1] == methods[1][1] is not None


def test_resuming_asks_for_the_rest_after_the_cursor() -> None:
    script = Script(WORDS, [4])
    read(script)
    method, path, headers = script.calls[1]
    assert (method, path) == ("GET", f"{CHAT}/{REQUEST_ID}/stream?starting_after=4")
    assert headers["Last-Event-ID"] == "4"


def test_saturation_is_waited_out_and_a_refusal_is_not() -> None:
    error = json.dumps({"error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "saturated"}})
    busy = (429, {"Retry-After": "0", "x-should-retry": "true"}, error.encode())
    assert read(Script(WORDS, [busy, busy]))[0] == "".join(WORDS)
    refused = (503, {"x-should-retry": "false"}, error.encode())
    with pytest.raises(HttpError, match="full") as caught:
        read(Script(WORDS, [refused]))
    assert (caught.value.status, caught.value.code, caught.value.retryable) == (503, "saturated", False)


def test_a_stream_that_cannot_be_taken_up_again_says_how_far_it_came() -> None:
    busy = (503, {}, b"gone")
    with pytest.raises(StreamLost, match=r"after event 3 .* within 0\.01 s: gone") as caught:
        read(Script(WORDS, [3] + [busy] * 50), give_up_s=0.01)
    assert (caught.value.cursor, caught.value.request_id) == (3, REQUEST_ID)


async def test_where_nothing_ever_listened_is_said_at_once() -> None:
    with ScriptedServer(Script([])) as server:
        gone = server.endpoint
    with pytest.raises(Unreachable):
        list(Client(gone).stream(CHAT, {}))
    async with AsyncClient(gone) as client:
        with pytest.raises(Unreachable):
            [event async for event in client.stream(CHAT, {})]


def test_a_service_that_came_back_on_another_port_is_found_again() -> None:
    with ScriptedServer(Script(WORDS, [2])) as first, ScriptedServer(Script(WORDS)) as second:
        places: list[Endpoint] = [first.endpoint, second.endpoint]
        stream = Client(lambda: places.pop(0)).stream(CHAT, {})
        assert "".join(event.text() for event in stream) == "".join(WORDS)
        assert second.script.calls[0][1].endswith("starting_after=2")


def test_an_error_inside_a_stream_is_raised() -> None:
    parser, lines = EventParser(), b'id: 4\r\ndata: {"a":\r\ndata: 1}\r\n\r\n: waiting\r\rdata: [DONE]\n\n'
    events = [event for byte in lines for event in parser.feed(bytes([byte]))]
    assert [(event.data, event.id, event.comment) for event in events] == [
        ('{"a":\n1}', "4", ""),
        (None, None, "waiting"),
        ("[DONE]", None, ""),
    ]


async def test_when_one_gateway_does_not_answer_the_next_is_asked() -> None:
    with ScriptedServer(Script(WORDS, [3])) as first, ScriptedServer(Script(WORDS, [None])) as second:
        gone = Endpoint("http://127.0.0.1:1")
        stream = Client([gone, first.endpoint, second.endpoint]).stream(CHAT, {"model": "m", "messages": []})
        assert "".join(event.text() for event in stream) == "".join(WORDS)
        assert [len(server.script.calls) for server in (first, second)] == [1, 1]
        assert Client([gone, second.endpoint]).request("DELETE", f"{CHAT}/{REQUEST_ID}") == {}
    with ScriptedServer(Script(WORDS, [3])) as first, ScriptedServer(Script(WORDS, [None])) as second:
        async with AsyncClient([gone, first.endpoint, second.endpoint]) as client:
            asked = client.stream(CHAT, {"model": "m", "messages": []})
            assert "".join([event.text() async for event in asked]) == "".join(WORDS)
        assert [len(server.script.calls) for server in (first, second)] == [1, 1]


async def test_when_no_gateway_answers_it_says_so_at_once() -> None:
    gone = [Endpoint("http://127.0.0.1:1"), Endpoint("http://127.0.0.1:2")]
    with pytest.raises(Unreachable):
        list(Client(gone).stream(CHAT, {}))
    with pytest.raises(Unreachable):
        Client(gone).request("GET", "/health")
    async with AsyncClient(gone) as client:
        with pytest.raises(Unreachable):
            [event async for event in client.stream(CHAT, {})]
