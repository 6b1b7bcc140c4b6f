"""What every object store promises, over a directory, over a control plane's and over S3."""

from __future__ import annotations

import itertools
import os
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_loader.errors import LoaderError, MissingObject, ShortObject, StoreError, StoreUnavailable
from model_loader.objects import DirectoryStore, ObjectInfo, ObjectStore
from model_loader.objects import http as http_module
from model_loader.objects import s3 as s3_module
from model_loader.objects.parts import PartSize

MIB = 1024 * 1024


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few megabytes already go in several requests. Five is the least that S3 allows for an upload's part."""
    monkeypatch.setattr(s3_module, "PartSize", lambda: PartSize(MIB, MIB, MIB))
    monkeypatch.setattr(s3_module, "FIRST_BYTES", MIB)
    monkeypatch.setattr(s3_module, "PUT_WHOLE_BYTES", 5 * MIB)
    monkeypatch.setattr(s3_module, "PUT_PART_BYTES", 5 * MIB)


def test_parts_come_back_joined_and_by_range(store: ObjectStore) -> None:
    assert store.put("kv/packs/ab/x", b"hello ", memoryview(b"wor"), bytearray(b"ld"), b"") == 11
    assert store.get("kv/packs/ab/x") == b"hello world"
    assert store.get("kv/packs/ab/x", 6) == b"world"
    assert store.get("kv/packs/ab/x", 6, 2) == b"wo"
    assert store.get("kv/packs/ab/x", 6, 0) == b""
    buffer = bytearray(7)
    store.get_into("kv/packs/ab/x", 3, memoryview(buffer)[1:6])
    assert buffer == b"\0lo wo\0"
    assert store.exists("kv/packs/ab/x") == 11


def test_an_empty_object_and_the_very_end_of_one_are_nothing(store: ObjectStore) -> None:
    assert store.put("empty") == 0
    store.put("x", b"12345")
    assert store.get("empty") == b"" and store.exists("empty") == 0
    assert store.get("x", 5) == b""
    store.get_into("x", 5, memoryview(bytearray(0)))


def test_a_range_beyond_the_end_is_an_error_and_never_a_short_read(store: ObjectStore) -> None:
    store.put("x", b"12345")
    with pytest.raises(ShortObject, match="8 bytes needed, 5 found"):
        store.get("x", 3, 5)
    with pytest.raises(ShortObject):
        store.get("x", 6)
    with pytest.raises(ShortObject):
        store.get("x", 9, 1)
    with pytest.raises(ShortObject):
        store.get("x", -1, 2)
    with pytest.raises(ShortObject):
        store.get_into("x", 0, memoryview(bytearray(6)))


def test_what_is_not_there_is_told_apart(store: ObjectStore) -> None:
    assert store.exists("a/b") is None
    for read in (
        lambda: store.get("a/b"),
        lambda: store.get("a/b", 0, 5),
        lambda: store.get("a/b", 0, 0),
        lambda: store.get_into("a/b", 0, memoryview(bytearray(3))),
    ):
        with pytest.raises(MissingObject, match="a/b"):
            read()
    store.delete("a/b")
    store.put("a/b", b"1")
    store.delete("a/b")
    assert store.exists("a/b") is None


@pytest.mark.parametrize(
    "key", ["", "/x", "x/", "a//b", "../x", "a/../b", ".hidden", "a/.tmp", "a\0b", "a\\b", "x" * 1000]
)
def test_keys_that_could_leave_the_store_are_refused(store: ObjectStore, key: str) -> None:
    for call in (
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: store.delete(key),
    ):
        with pytest.raises(StoreError, match="not allowed"):
            call()


def test_an_object_is_replaced(store: ObjectStore) -> None:
    store.put("x", b"a" * 100_000)
    store.put("x", b"b" * 50)
    assert store.get("x") == b"b" * 50


def test_large_objects_come_back_whole_and_by_any_range(small_parts: None, store: ObjectStore) -> None:
    content = os.urandom(11 * MIB + 12345)
    cut = [0, 1, 4 * MIB, 4 * MIB + 7, 9 * MIB, len(content)]
    parts = [memoryview(content)[a:b] for a, b in itertools.pairwise(cut)]
    assert store.put("large", *parts) == len(content)
    assert store.exists("large") == len(content)
    assert store.get("large") == content
    assert store.get("large", 3 * MIB + 1) == content[3 * MIB + 1 :]
    view = memoryview(bytearray(5 * MIB + 3))
    store.get_into("large", MIB - 1, view)
    assert view == content[MIB - 1 : 6 * MIB + 2]
    with pytest.raises(ShortObject):
        store.get_into("large", 7 * MIB, memoryview(bytearray(5 * MIB)))


def test_many_threads_read_and_write_at_once(small_parts: None, store: ObjectStore) -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            content = bytes([number]) * (2 * MIB + number)
            for attempt in range(3):
                store.put(f"t/{number}", content)
                assert store.get(f"t/{number}") == content, attempt
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted((i.key, i.nbytes) for i in store.list("t/")) == [(f"t/{n}", 2 * MIB + n) for n in range(6)]


_NAMES = st.lists(st.lists(st.sampled_from(["a", "b", "ab", "a-b", "a.b"]), min_size=1, max_size=3), max_size=8)


def test_a_listing_holds_every_key_with_the_prefix_and_a_directory_sorts_it(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "PAGE_KEYS", 2)
    monkeypatch.setattr(http_module, "PAGE_KEYS", 2)
    runs = iter(range(1000))

    @settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(names=_NAMES, prefix=st.sampled_from(["", "a", "a/", "a/a", "ab", "b/", "a-"]))
    def check(names: list[list[str]], prefix: str) -> None:
        root = f"run-{next(runs)}/"
        keys: set[str] = set()
        for parts in names:
            key = root + "/".join(parts)
            if any(other.startswith(key + "/") or key.startswith(other + "/") for other in keys):
                continue
            store.put(key, key.encode(), durable=False)
            keys.add(key)
        expected = [ObjectInfo(key, len(key)) for key in sorted(keys) if key.startswith(root + prefix)]
        found = list(store.list(root + prefix))
        assert (found if isinstance(store, DirectoryStore) else sorted(found, key=lambda i: i.key)) == expected

    check()


def test_a_listing_tells_when_objects_were_written(store: ObjectStore) -> None:
    before_s = time.time()
    store.put("dated/x", b"1")
    (info,) = store.list("dated/")
    assert before_s - 2 <= info.modified_s <= time.time() + 2


def test_a_listing_goes_on_past_one_page(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "PAGE_KEYS", 3)
    monkeypatch.setattr(http_module, "PAGE_KEYS", 3)
    keys = [f"pages/{n:02}" for n in range(10)]
    for key in keys:
        store.put(key, b"", durable=False)
    assert [info.key for info in store.list("pages/")] == keys


def test_a_check_finds_nothing_wrong_and_leaves_nothing(store: ObjectStore) -> None:
    store.check(within_s=10)
    assert list(store.list("")) == []


def test_no_operation_begins_once_its_time_is_over(store: ObjectStore) -> None:
    store.put("x", b"12345")
    for call in (
        lambda: store.put("y", b"1", within_s=0),
        lambda: store.get("x", within_s=0),
        lambda: store.get_into("x", 0, memoryview(bytearray(5)), within_s=0),
        lambda: store.exists("x", within_s=0),
        lambda: store.delete("x", within_s=0),
    ):
        with pytest.raises(StoreUnavailable, match="deadline"):
            call()
    assert store.exists("y") is None and store.get("x", within_s=10) == b"12345"


def test_what_was_asked_and_moved_is_counted(store: ObjectStore) -> None:
    store.put("x", b"12345")
    store.get("x", 1, 3)
    store.get("x")
    store.exists("x")
    list(store.list(""))
    store.delete("x")
    with pytest.raises(MissingObject):
        store.get("x")
    use = store.stats.snapshot()
    assert {kind: (found.requests, found.nbytes) for kind, found in use.kinds.items()} == {
        "put": (1, 5), "get": (3, 8), "head": (1, 0), "list": (1, 0), "delete": (1, 0),
    }  # fmt: skip
    assert (use.failures, use.retries, use.breaker) == (0, 0, "closed")


def test_a_store_names_itself(store: ObjectStore) -> None:
    assert store.uri.startswith(("file:///", "s3://stoker-test/", "http+stoker://127.0.0.1:"))


def test_a_directory_says_what_hinders_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("odd")
    store = DirectoryStore(root / "objects")
    (root / "objects" / "store-check").write_bytes(b"in the way")
    with pytest.raises(LoaderError, match="cannot write"):
        store.check()
