"""What is particular to a control plane's store over HTTP: tokens and their scope, faults on the way, links."""

from __future__ import annotations

import contextlib
import http.client
import socket
from pathlib import Path

import pytest

from control_plane.environment import store_uri
from control_plane.store_tokens import OF_A_SLOT, StoreTokens
from model_loader.errors import (
    MissingObject,
    OutOfSpace,
    SourceRefused,
    StoreProblem,
    StoreRefused,
    StoreUnavailable,
    problem_of,
)
from model_loader.objects import directory, open_store
from model_loader.objects.http import CRC_HEADER, OBJECTS_PATH, HttpStore
from model_loader.objects.resilience import Limits
from tests.support.replica_client import wait_for
from tests.support.served_store import TOKEN, ServedStore

PATIENT = Limits(attempts=40, first_pause_s=0.01, longest_pause_s=0.05, budget=100.0, failures_to_open=100)
HASTY = Limits(attempts=1)


def put(served: ServedStore, key: str, body: bytes, headers: dict[str, str], *, announced: int | None = None) -> int:
    """A PUT as a broken client would send it; its status."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        connection.putrequest("PUT", OBJECTS_PATH + key)
        for name, value in {"Authorization": f"Bearer {TOKEN}", **headers}.items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body) if announced is None else announced))
        connection.endheaders(body)
        if announced is not None:
            return 0
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    "uri", ["http+stoker://host", "http+stoker://host:1/path", "http+stoker://u:p@host:1", "x://h:1"]
)
def test_an_address_that_names_no_store_is_refused(uri: str) -> None:
    with pytest.raises(SourceRefused):
        HttpStore(uri)
    with pytest.raises(ValueError):
        store_uri(uri)
    assert store_uri("http+stoker://stoker:8080/") == "http+stoker://stoker:8080"


def test_the_token_comes_from_the_environment_and_without_one_nothing_is_asked(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STOKER_STORE_TOKEN", raising=False)
    with contextlib.closing(open_store(served.uri)) as store, pytest.raises(StoreRefused, match="STOKER_STORE_TOKEN"):
        store.exists("x")
    monkeypatch.setenv("STOKER_STORE_TOKEN", TOKEN)
    with contextlib.closing(open_store(served.uri)) as store:
        assert store.put("x", b"1") == 1


def test_a_wrong_token_is_told_as_that(served: ServedStore) -> None:
    with contextlib.closing(served.store("another")) as store, pytest.raises(StoreRefused) as refused:
        store.check()
    assert problem_of(refused.value) is StoreProblem.WRONG_CREDENTIALS


def test_a_slot_reads_and_writes_what_slots_do_and_nothing_else(served: ServedStore) -> None:
    served.directory.put("models/m/weights", b"weights")
    served.directory.put("elsewhere/x", b"secret")
    served.scope = OF_A_SLOT
    with contextlib.closing(served.store()) as store:
        store.check()
        store.put("kv/packs/ab/x", b"pack")
        assert store.get("models/m/weights") == b"weights"
        assert [info.key for info in store.list("kv/")] == ["kv/packs/ab/x"]
        for refused in (
            lambda: store.put("models/m/weights", b"mine"),
            lambda: store.delete("models/m/weights"),
            lambda: store.get("elsewhere/x"),
            lambda: store.exists("elsewhere/x"),
            lambda: list(store.list("")),
            lambda: list(store.list("elsewhere/")),
        ):
            with pytest.raises(StoreRefused) as error:
                refused()
            assert problem_of(error.value) is StoreProblem.NO_PERMISSION
    assert served.directory.get("models/m/weights") == b"weights"


def test_a_token_is_its_slots_own() -> None:
    tokens, others = StoreTokens(b"a" * 32), StoreTokens(b"b" * 32)
    assert tokens.slot_of(tokens.of("slot-7f.pool-0")) == "slot-7f.pool-0"
    other = tokens.of("slot-1").replace("slot-1", "slot-2")
    for wrong in ("", "slot.", "slot..", other, others.of("slot-1"), tokens.of("slot-1")[:-1], "slot.\udcff.x"):
        assert tokens.slot_of(wrong) is None


def test_what_arrives_altered_or_cut_off_is_not_stored(served: ServedStore) -> None:
    served.directory.put("x", b"before")
    assert put(served, "x", b"12345", {CRC_HEADER: "1"}) == 503
    assert put(served, "x", b"12345", {}) == 400
    assert put(served, "x", b"12345", {CRC_HEADER: "1"}, announced=1000) == 0
    with contextlib.closing(served.store()) as store:
        assert store.get("x") == b"before"
        store.put("y", b"12345")
    wait_for(lambda: not list((served.directory.root / ".tmp").iterdir()), what="the end of a body that broke off")


def test_a_store_that_is_away_for_a_moment_is_asked_again(served: ServedStore) -> None:
    with contextlib.closing(served.store(limits=HASTY)) as store:
        store.put("x", b"1")
        served.stop()
        with pytest.raises(StoreUnavailable):
            store.get("x")
    served.start()
    with contextlib.closing(served.store(limits=PATIENT)) as store:
        assert store.get("x") == b"1"
        served.stop()
        served.start()
        assert store.get("x") == b"1", "a kept connection that died was not made anew"


def test_a_store_that_takes_connections_and_never_answers_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        store = HttpStore(f"http+stoker://127.0.0.1:{mute.getsockname()[1]}", token=TOKEN)
        with contextlib.closing(store):
            for ask in (lambda: store.get("x", within_s=0.1), lambda: store.put("x", b"1", within_s=0.1)):
                with pytest.raises(StoreUnavailable, match="deadline"):
                    ask()


def test_a_full_disk_is_told_as_one_and_the_old_object_stays(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with contextlib.closing(served.store()) as store:
        store.put("x", b"before")
        monkeypatch.setattr(directory.os, "writev", full)
        with pytest.raises(OutOfSpace):
            store.put("x", b"after")
        monkeypatch.undo()
        assert store.get("x") == b"before"


def test_nothing_outside_the_store_is_reached_by_a_link_in_it(served: ServedStore, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    (served.directory.root / "kv").mkdir()
    (served.directory.root / "kv" / "link").symlink_to(tmp_path / "outside")
    with contextlib.closing(served.store()) as store:
        with pytest.raises(MissingObject):
            store.get("kv/link")
        assert store.exists("kv") is None


def test_files_of_checkpoints_are_read_where_they_lie_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights" * 1000)

    def file_of(identity: str, number: int) -> Path:
        if (identity, number) != ("ab" * 32, 1):
            raise MissingObject("no such checkpoint")
        return tmp_path / "model.gguf"

    key = f"checkpoints/{'ab' * 32}/1"
    with (
        ServedStore(tmp_path / "served", OF_A_SLOT, file_of) as served,
        contextlib.closing(served.store()) as store,
    ):
        assert store.exists(key) == 7000 and store.get(key, 3500, 7) == b"weights"
        for missing in (f"checkpoints/{'ab' * 32}/2", f"checkpoints/{'ab' * 32}/x", "checkpoints/ab"):
            assert store.exists(missing) is None
        with pytest.raises(StoreRefused):
            store.put(key, b"mine")
