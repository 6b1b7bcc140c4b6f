import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_loader.errors import LoaderError, MissingObject, SourceRefused, StoreError
from model_loader.objects import DirectoryStore, ObjectInfo, open_store


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "objects")


def test_parts_come_back_joined_and_by_range(store: DirectoryStore) -> None:
    assert store.put("kv/packs/ab/x", b"hello ", memoryview(b"wor"), bytearray(b"ld"), b"") == 11
    assert store.get("kv/packs/ab/x") == b"hello world"
    assert store.get("kv/packs/ab/x", 6) == b"world"
    assert store.get("kv/packs/ab/x", 6, 2) == b"wo"
    buffer = bytearray(5)
    store.get_into("kv/packs/ab/x", 3, memoryview(buffer))
    assert buffer == b"lo wo"
    assert store.exists("kv/packs/ab/x") == 11


def test_many_parts_are_written_in_order(store: DirectoryStore) -> None:
    parts = [bytes([n % 256]) * (n % 7) for n in range(3000)]
    store.put("many", *parts, durable=False)
    assert store.get("many") == b"".join(parts)


def test_a_range_beyond_the_end_is_an_error_with_both_numbers(store: DirectoryStore) -> None:
    store.put("x", b"12345")
    with pytest.raises(StoreError, match="8 bytes needed, 5 found"):
        store.get("x", 3, 5)
    with pytest.raises(StoreError):
        store.get("x", 6)
    with pytest.raises(StoreError):
        store.get_into("x", 0, memoryview(bytearray(6)))


def test_what_is_not_there_is_told_apart(store: DirectoryStore) -> None:
    assert store.exists("a/b") is None
    with pytest.raises(MissingObject, match="a/b"):
        store.get("a/b")
    store.delete("a/b")
    store.put("a/b", b"1")
    assert store.exists("a") is None
    assert store.exists("a/b/c") is None
    store.delete("a/b")
    assert store.exists("a/b") is None


@pytest.mark.parametrize(
    "key", ["", "/x", "x/", "a//b", "../x", "a/../b", ".hidden", "a/.tmp", "a\0b", "a\\b", "x" * 1000]
)
def test_keys_that_could_leave_the_store_are_refused(store: DirectoryStore, key: str) -> None:
    for call in (
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: store.delete(key),
    ):
        with pytest.raises(StoreError, match="not allowed"):
            call()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    names=st.lists(st.lists(st.sampled_from(["a", "b", "ab", "a-b", "a.b"]), min_size=1, max_size=3), max_size=8),
    prefix=st.sampled_from(["", "a", "a/", "a/a", "ab", "b/", "a-"]),
)
def test_a_listing_is_sorted_and_holds_every_key_with_the_prefix(
    tmp_path_factory: pytest.TempPathFactory, names: list[list[str]], prefix: str
) -> None:
    store = DirectoryStore(tmp_path_factory.mktemp("list"))
    keys: set[str] = set()
    for parts in names:
        key = "/".join(parts)
        if any(other.startswith(key + "/") or key.startswith(other + "/") for other in keys):
            continue
        store.put(key, key.encode(), durable=False)
        keys.add(key)
    expected = [ObjectInfo(key, len(key)) for key in sorted(keys) if key.startswith(prefix)]
    assert list(store.list(prefix)) == expected


def test_an_object_is_replaced_as_a_whole(store: DirectoryStore) -> None:
    store.put("x", b"a" * 100_000)
    before = os.open(store.root / "x", os.O_RDONLY)
    try:
        store.put("x", b"b" * 50)
        assert os.pread(before, 200_000, 0) == b"a" * 100_000
    finally:
        os.close(before)
    assert store.get("x") == b"b" * 50


def _write(root: str, number: int) -> None:
    store = DirectoryStore(Path(root))
    for _ in range(20):
        store.put("x", bytes([number]) * 10_000, durable=False)


def test_writers_in_several_processes_never_mix(store: DirectoryStore) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(str(store.root), n)) for n in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(set(store.get("x"))) == 1
    assert len(store.get("x")) == 10_000
    assert list((store.root / ".tmp").iterdir()) == []


def test_a_full_disk_leaves_nothing_and_is_told(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from model_loader.objects import DirectoryStore\n"
        "from model_loader.errors import OutOfSpace\n"
        "store = DirectoryStore(Path(sys.argv[1])); store.put('x', b'old')\n"
        "try: store.put('x', b'n' * 100_000)\n"
        "except OutOfSpace as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )  # fmt: skip
    assert "no space left while writing object x" in done.stdout
    store = DirectoryStore(tmp_path)
    assert store.get("x") == b"old"
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_what_a_killed_writer_left_is_removed_later(store: DirectoryStore) -> None:
    left = store.root / ".tmp" / "1-abc"
    left.write_bytes(b"half")
    DirectoryStore(store.root)
    assert left.exists()
    os.utime(left, (1, 1))
    DirectoryStore(store.root)
    assert not left.exists()


def test_a_store_is_opened_by_uri(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/a%20b")
    store.put("x", b"1")
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"
    for uri in ("s3://bucket/x", "file://host/x", "x", "file:relative"):
        with pytest.raises(SourceRefused, match="not supported"):
            open_store(uri)


def test_an_unwritable_root_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LoaderError, match="cannot write"):
        DirectoryStore(tmp_path / "file" / "x")
