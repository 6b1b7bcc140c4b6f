"""The tools that make stores and networks misbehave do what they say, by their seed, and nothing else."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from model_loader.errors import MissingObject, ShortObject, StoreUnavailable
from model_loader.objects import DirectoryStore
from tests.support.faulty_proxy import FaultyProxy
from tests.support.faulty_store import TRANSIENT, WRONG, FaultyStore, damage

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    inner = DirectoryStore(tmp_path)
    inner.put("a/x", CONTENT)
    inner.put("a/y", CONTENT[::-1])
    return FaultyStore(inner, seed=5, sleep=lambda seconds: None)


def test_without_faults_it_is_the_store_inside(store: FaultyStore) -> None:
    assert store.get("a/x") == CONTENT and store.exists("a/x") == len(CONTENT)
    store.put("b", b"1")
    store.delete("b")
    assert [info.key for info in store.list("")] == ["a/x", "a/y"]
    store.check()
    assert store.made == []


@pytest.mark.parametrize("what", [what for what in TRANSIENT if what != "slow"])
def test_what_does_not_answer_is_unavailable_for_every_operation(store: FaultyStore, what: str) -> None:
    store.fail(what)
    calls: list[Callable[[], object]] = [
        lambda: store.get("a/x"),
        lambda: store.put("a/x", b""),
        lambda: store.exists("a/x"),
        lambda: list(store.list("")),
        lambda: store.delete("a/x"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()
    store.heal()
    assert store.get("a/x") == CONTENT


def test_a_slow_store_sleeps_but_not_beyond_the_deadline(store: FaultyStore) -> None:
    slept: list[float] = []
    store.sleep, store.slow_s = slept.append, 3.0
    store.fail("slow")
    assert store.get("a/x") == CONTENT
    with pytest.raises(StoreUnavailable, match="deadline"):
        store.get("a/x", within_s=1.0)
    assert slept == [3.0, 1.0]


def test_what_is_wrong_with_an_object_is_met_by_its_readers_only(store: FaultyStore) -> None:
    for what in WRONG:
        store.heal()
        store.fail(what, times=1)
        store.put("other/z", b"1")
        if what in ("truncated", "deleted"):
            with pytest.raises(ShortObject if what == "truncated" else MissingObject):
                store.get("a/x")
        elif what == "flipped":
            view = memoryview(bytearray(len(CONTENT)))
            store.get_into("a/x", 0, view)
            (bits,) = [(a ^ b).bit_count() for a, b in zip(view, CONTENT, strict=True) if a != b]
            assert bits == 1
        else:
            assert store.get("a/x") == CONTENT[::-1]
        assert store.get("a/x") == CONTENT
    assert [made.what for made in store.made] == list(WRONG)


def test_faults_come_by_share_and_seed(tmp_path: Path) -> None:
    def faults(seed: int) -> list[int]:
        store = FaultyStore(DirectoryStore(tmp_path), seed=seed)
        store.fail("reset", share=0.3)
        failed = []
        for number in range(200):
            try:
                store.exists("x")
            except StoreUnavailable:
                failed.append(number)
        return failed

    assert faults(1) == faults(1) != faults(2)
    assert 30 < len(faults(1)) < 90


@pytest.mark.parametrize("how", WRONG)
def test_damage_stays(store: FaultyStore, how: str) -> None:
    damage(store.inner, "a/x", how, seed=3, other="a/y")
    if how == "deleted":
        assert store.exists("a/x") is None
    elif how == "truncated":
        assert CONTENT.startswith(store.get("a/x")) and store.exists("a/x") != len(CONTENT)
    elif how == "flipped":
        assert sum((a ^ b).bit_count() for a, b in zip(store.get("a/x"), CONTENT, strict=True)) == 1
    else:
        assert (store.get("a/x"), store.get("a/y")) == (CONTENT[::-1], CONTENT)


def test_an_unknown_fault_is_refused(store: FaultyStore) -> None:
    with pytest.raises(ValueError, match="no fault 'explode'"):
        store.fail("explode")


# --- the proxy --------------------------------------------------------------------------------------------------------


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with FaultyProxy(server.server_address[1]) as proxy:
            yield proxy
        server.shutdown()


def ask(proxy: FaultyProxy, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
    try:
        connection.request(method, "/x", body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_well_proxy_passes_everything_on(proxy: FaultyProxy) -> None:
    proxy.set()
    assert ask(proxy) == (200, CONTENT)
    assert ask(proxy, "PUT", b"z" * 300_000) == (200, b"z" * 300_000)
    assert proxy.set() == {"requests": 2}


def test_faults_on_the_wire_are_what_they_are_called(proxy: FaultyProxy) -> None:
    proxy.set(unavailable=1.0)
    status, body = ask(proxy)
    assert status == 503 and b"<Code>SlowDown</Code>" in body
    for fault in ("reset", "cut"):
        proxy.set(**{fault: 1.0})
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(proxy)
    proxy.set(flip=1.0)
    status, body = ask(proxy)
    assert sum((a ^ b).bit_count() for a, b in zip(body, CONTENT, strict=True)) == 1
    proxy.set(unavailable=1.0, methods=("PUT",))
    assert ask(proxy)[0] == 200 and ask(proxy, "PUT", b"1")[0] == 503


def test_faults_on_the_wire_come_by_share_and_seed(proxy: FaultyProxy) -> None:
    def statuses(seed: int) -> list[int]:
        proxy.set(seed=seed, unavailable=0.3)
        return [ask(proxy)[0] for _ in range(40)]

    first = statuses(1)
    assert first == statuses(1) != statuses(2)
    assert {200, 503} == set(first)
