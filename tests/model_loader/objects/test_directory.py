import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from model_loader.errors import LoaderError, OutOfSpace, SourceRefused, StoreProblem, problem_of
from model_loader.objects import DirectoryStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "objects")


def test_many_parts_are_written_in_order(store: DirectoryStore) -> None:
    parts = [bytes([n % 256]) * (n % 7) for n in range(3000)]
    store.put("many", *parts, durable=False)
    assert store.get("many") == b"".join(parts)


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
    assert problem_of(OutOfSpace("")) is StoreProblem.FULL
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
    for uri in ("gs://bucket/x", "file://host/x", "x", "file:relative"):
        with pytest.raises(SourceRefused, match="not supported"):
            open_store(uri)


def test_an_unwritable_root_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LoaderError, match=r"cannot write .* give this user write permission") as refused:
        DirectoryStore(tmp_path / "file" / "x")
    assert problem_of(refused.value) is StoreProblem.UNWRITABLE


def test_what_is_not_a_file_is_no_object(store: DirectoryStore) -> None:
    store.put("a/b", b"1")
    assert store.exists("a") is None
    assert store.exists("a/b/c") is None
    store.delete("a/b/c")
