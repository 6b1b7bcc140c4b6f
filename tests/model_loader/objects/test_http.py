"""What is particular to a control plane's store over HTTP: tokens and their scope, faults on the way, links."""

from __future__ import annotations

import contextlib
import http.client
import socket
from pathlib import Path

import pytest

from control_plane.environment import store_uri
from control_plane.sealing import EVERYBODY
from control_plane.store_tokens import STEP_S, StoreScope, StoreTokens, is_placeless, place_of
from model_loader.errors import (
    MissingObject,
    OutOfSpace,
    SourceRefused,
    StoreProblem,
    StoreRefused,
    StoreUnavailable,
    problem_of,
)
from model_loader.forms.sweeping import form_names
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


IDENTITY, PRIVATE = "a" * 64, "b" * 64


def test_a_token_opens_its_tenants_kv_and_its_checkpoint_and_nothing_else(served: ServedStore) -> None:
    mine, theirs, common = (f"kv/packs/{place_of(owner)}/ab/x" for owner in ("mine", "theirs", EVERYBODY))
    form, other_form = (f"forms/{min(form_names(identity))}/head" for identity in (IDENTITY, PRIVATE))
    for key in (theirs, common, f"models/{IDENTITY}/w", f"models/{PRIVATE}/w", other_form, "elsewhere/x"):
        served.directory.put(key, b"there")
    tokens = StoreTokens(b"s" * 32)

    def opened_by(**given: bool) -> None:
        claims = tokens.read(tokens.of("slot-1", "mine", IDENTITY, **given))
        assert claims is not None
        served.scope = claims.scope

    opened_by()
    with contextlib.closing(served.store()) as store:
        store.check()
        for key in (mine, form, f"artifacts/{IDENTITY}/x.bin"):
            store.put(key, b"made")
            assert store.get(key) == b"made"
        assert store.get(f"models/{IDENTITY}/w") == b"there"
        assert [info.key for info in store.list(f"kv/packs/{place_of('mine')}/")] == [mine]
        for refused in (
            lambda: store.get(theirs),
            lambda: store.exists(theirs),
            lambda: store.put(theirs, b"mine"),
            lambda: store.delete(theirs),
            lambda: store.get(common),
            lambda: store.get(f"models/{PRIVATE}/w"),
            lambda: store.get(f"checkpoints/{PRIVATE}/0"),
            lambda: store.get(other_form),
            lambda: store.put(other_form, b"mine"),
            lambda: store.put(f"models/{IDENTITY}/w", b"mine"),
            lambda: store.delete(f"models/{IDENTITY}/w"),
            lambda: store.get("elsewhere/x"),
            lambda: list(store.list("")),
            lambda: list(store.list("kv/packs/")),
            lambda: list(store.list("forms/")),
        ):
            with pytest.raises(StoreRefused) as error:
                refused()
            assert problem_of(error.value) is StoreProblem.NO_PERMISSION
        with pytest.raises(StoreRefused, match="the token of slot-1 for tenant mine and checkpoint aaaa"):
            store.get(theirs)
        opened_by(shares=True)
        assert store.get(common) == b"there"
        with pytest.raises(StoreRefused):
            store.get(theirs)
    assert served.directory.get(f"models/{IDENTITY}/w") == b"there" == served.directory.get(theirs)


def test_a_token_for_nobody_opens_a_checkpoint_and_no_kv() -> None:
    tokens = StoreTokens(b"s" * 32)
    claims = tokens.read(tokens.of("slot-1", "", IDENTITY, shares=True))
    assert claims is not None
    scope = claims.scope
    assert scope.may_read(f"checkpoints/{IDENTITY}/0") and not scope.may_write(f"checkpoints/{IDENTITY}/0")
    assert not any(scope.may_read(f"kv/packs/{place_of(owner)}/ab/x") for owner in ("", "mine", EVERYBODY))
    assert not scope.may_read("kv/packs/") and not scope.owners


def test_a_token_says_whose_it_is_and_runs_out() -> None:
    now_s = [1_000_000.0]
    tokens, others = StoreTokens(b"a" * 32, lambda: now_s[0]), StoreTokens(b"b" * 32)
    token = tokens.of("slot-7f.pool-0", "mine", IDENTITY)
    claims = tokens.read(token)
    assert claims is not None and (claims.slot_id, claims.tenant, claims.identity) == (
        "slot-7f.pool-0",
        "mine",
        IDENTITY,
    )
    assert tokens.of("slot-7f.pool-0", "mine", IDENTITY) == token, "every gateway makes the same"
    changed = (tokens.of("slot-7f.pool-0", "theirs", IDENTITY), tokens.of("slot-8", "mine", IDENTITY))
    assert len({token, *changed, tokens.of("slot-7f.pool-0", "mine", PRIVATE)}) == 4
    assert not tokens.has_run_out(claims)
    now_s[0] += 2 * STEP_S
    assert not tokens.has_run_out(claims)
    newer = tokens.read(tokens.of("slot-7f.pool-0", "mine", IDENTITY))
    now_s[0] += STEP_S
    assert newer is not None and tokens.has_run_out(claims) and not tokens.has_run_out(newer)
    body, _, mac = token.rpartition(".")
    swapped = f"{changed[0].rpartition('.')[0]}.{mac}"
    foreign = others.of("slot-1", "mine", IDENTITY)
    for wrong in ("", "st1.", "st1..", swapped, foreign, token[:-1], f"{body}.", "st1.\udcff.x", f"slot.slot-1.{mac}"):
        assert tokens.read(wrong) is None


def test_packs_of_before_have_no_place() -> None:
    assert is_placeless(f"kv/packs/ab/{IDENTITY}")
    assert not is_placeless(f"kv/packs/{place_of('mine')}/ab/{IDENTITY}") and not is_placeless("kv/packs/ab/x/y")


def test_a_newer_token_in_the_environment_is_used_by_a_store_that_is_open(
    served: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_STORE_TOKEN", "old")
    with contextlib.closing(open_store(served.uri)) as store:
        with pytest.raises(StoreRefused):
            store.exists("x")
        monkeypatch.setenv("STOKER_STORE_TOKEN", TOKEN)
        assert store.exists("x") is None


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

    key, scope = f"checkpoints/{'ab' * 32}/1", StoreScope(("checkpoints/",), ("kv/",))
    with (
        ServedStore(tmp_path / "served", scope, file_of) as served,
        contextlib.closing(served.store()) as store,
    ):
        assert store.exists(key) == 7000 and store.get(key, 3500, 7) == b"weights"
        for missing in (f"checkpoints/{'ab' * 32}/2", f"checkpoints/{'ab' * 32}/x", "checkpoints/ab"):
            assert store.exists(missing) is None
        with pytest.raises(StoreRefused):
            store.put(key, b"mine")
