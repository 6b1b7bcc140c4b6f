"""A form's memory: huge pages where the kernel has them, the same bytes in any case, no fault where none is left."""

from __future__ import annotations

import errno
import gc
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from model_loader import form_memory
from model_loader.errors import OutOfSpace, SourceMissing
from model_loader.file_memory import HUGE_BYTES, address_of, huge_share, is_cached, make_huge, map_file
from model_loader.form_memory import REGION_BYTES, FormMemory
from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.progress import Progress
from model_loader.recipe import prepare
from tests.support.checkpoints import make_tiny_llama

NBYTES = 2 * HUGE_BYTES + 5000


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"stoker-test-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


def new_file(path: Path, nbytes: int) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(handle, nbytes)
    return handle


def mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def test_what_is_put_into_a_view_is_in_the_file_whatever_the_pages(shared_memory: Path) -> None:
    path = shared_memory / "form"
    handle = new_file(path, NBYTES)
    memory = FormMemory(path, handle, NBYTES)
    view = memory.view(HUGE_BYTES - 10, 20)
    view[:] = bytes(range(20))
    memory.view(NBYTES - 3, 3)[:] = b"end"
    content = path.read_bytes()
    assert content[HUGE_BYTES - 10 : HUGE_BYTES + 10] == bytes(range(20)) and content[-3:] == b"end"
    assert address_of(memory.look(0, 1)) % HUGE_BYTES == 0
    os.close(handle)


def test_a_retired_form_is_found_grown_and_shrunk_with_what_it_holds(shared_memory: Path) -> None:
    path = shared_memory / "form"
    path.write_bytes(b"old" * 100_000)
    handle = os.open(path, os.O_RDWR)
    memory = FormMemory.retired(path)
    assert bytes(memory.look(0, 6)) == b"oldold"
    os.ftruncate(handle, NBYTES)
    grown = memory.resized(handle, NBYTES)
    grown.view(NBYTES - 1, 1)[:] = b"x"
    assert bytes(grown.view(0, 3)) == b"old" and path.read_bytes()[-1:] == b"x"
    os.ftruncate(handle, 10)
    assert grown.resized(handle, 10) is grown and grown.nbytes == 10
    os.close(handle)
    with pytest.raises(SourceMissing):
        FormMemory.retired(shared_memory / "absent")


def test_no_memory_left_is_said_and_no_fault(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(address: int, nbytes: int) -> bool:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(form_memory, "enter_huge", full)
    handle = new_file(shared_memory / "form", NBYTES)
    with pytest.raises(OutOfSpace, match="form"):
        FormMemory(shared_memory / "form", handle, NBYTES).view(0, 10)
    os.close(handle)


@pytest.mark.parametrize("answer", ["none free", "slow"])
def test_huge_pages_that_are_not_to_be_had_are_not_asked_for_again(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    asked: list[int] = []
    clock = iter(range(1000))
    monkeypatch.setattr(form_memory.time, "thread_time", lambda: float(next(clock)))

    def huge(address: int, nbytes: int) -> bool:
        asked.append(nbytes)
        return answer == "slow"

    monkeypatch.setattr(form_memory, "enter_huge", huge)
    nbytes = 4 * REGION_BYTES
    handle = new_file(shared_memory / "form", nbytes)
    memory = FormMemory(shared_memory / "form", handle, nbytes)
    memory.view(0, nbytes)[-1:] = b"x"
    assert asked == [REGION_BYTES] * (1 if answer == "slow" else 3)
    os.close(handle)


def test_a_thread_that_finds_a_region_being_made_makes_the_next(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def huge(address: int, nbytes: int) -> bool:
        made.append((address - start) // REGION_BYTES)
        if len(made) == 1:
            begun.set()
            assert go_on.wait(10)
        else:
            go_on.set()
        return True

    monkeypatch.setattr(form_memory, "enter_huge", huge)
    handle = new_file(shared_memory / "form", 3 * REGION_BYTES)
    memory = FormMemory(shared_memory / "form", handle, 3 * REGION_BYTES)
    start = address_of(memory.look(0, 1))
    first = threading.Thread(target=memory.enter, args=(0, 1))
    first.start()
    assert begun.wait(10)
    memory.enter(1, 1)
    first.join()
    memory.enter(0, 2 * REGION_BYTES)
    assert made == [0, 1]
    os.close(handle)


def test_what_was_there_before_a_form_grew_is_not_made_anew(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def huge(address: int, nbytes: int) -> bool:
        asked.append((address - start, nbytes))
        return True

    monkeypatch.setattr(form_memory, "enter_huge", huge)
    path = shared_memory / "form"
    path.write_bytes(b"old" * 1000)
    memory = FormMemory.retired(path)
    handle = os.open(path, os.O_RDWR)
    os.ftruncate(handle, REGION_BYTES + 10)
    grown = memory.resized(handle, REGION_BYTES + 10)
    start = address_of(grown.look(0, 1))
    grown.enter(0, REGION_BYTES + 10)
    assert asked == [(HUGE_BYTES, REGION_BYTES - HUGE_BYTES)]
    os.close(handle)


def test_a_mapping_ends_with_its_last_view(shared_memory: Path) -> None:
    path = shared_memory / "mapped"
    path.write_bytes(b"abc" * 5000)
    handle = os.open(path, os.O_RDONLY)
    view = map_file(handle, 15_000)
    assert is_cached(handle, 0, 15_000) and is_cached(handle, 4097, 1)
    os.close(handle)
    piece = np.frombuffer(view[3:9], np.uint8)
    assert view.readonly and mappings(str(path)) == 1
    del view
    gc.collect()
    assert piece.tobytes() == b"abcabc" and mappings(str(path)) == 1
    del piece
    gc.collect()
    assert mappings(str(path)) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_form_made_in_shared_memory_is_that_made_on_a_disk(
    tmp_path: Path, shared_memory: Path, imported: Callable[[Path], Manifest], dtype: str
) -> None:
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 4, "layers": 3, "vocab": 4096, "dtype": "bfloat16"}
    manifest = imported(make_tiny_llama(tmp_path / "model", **sizes))
    prepare(manifest, dtype, tmp_path / "form")
    prepare(manifest, dtype, shared_memory / "new")
    (shared_memory / "retired").write_bytes(os.urandom(3 * HUGE_BYTES))
    prepare(manifest, dtype, shared_memory / "again", recycle=shared_memory / "retired")
    wanted = PreparedFile.open(tmp_path / "form", verify=True)
    for name in ("new", "again"):
        found = PreparedFile.open(shared_memory / name, verify=True)
        for tensor in wanted.keys():  # noqa: SIM118
            np.testing.assert_array_equal(found.tensor(tensor), wanted.tensor(tensor))


def test_a_tensor_written_in_panels_in_shared_memory_is_the_same(
    tiny: Path, tmp_path: Path, shared_memory: Path, imported: Callable[[Path], Manifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    manifest = imported(tiny)
    prepare(manifest, "float32", tmp_path / "whole")
    monkeypatch.setattr("model_loader.recipe._PANEL_VALUES", 2 * 64 * 50)
    seen: list[Progress] = []
    prepare(manifest, "float32", shared_memory / "panels", seen.append, threads=2)
    whole, panels = (PreparedFile.open(f, verify=True) for f in (tmp_path / "whole", shared_memory / "panels"))
    assert panels.chunks() == whole.chunks()
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_a_form_in_small_pages_is_put_into_huge_ones_while_others_map_it(shared_memory: Path) -> None:
    path, content = shared_memory / "form", os.urandom(3 * HUGE_BYTES + 5000)
    path.write_bytes(content)
    with open(path, "rb") as file:
        mapped = map_file(file.fileno(), len(content))
    assert bytes(mapped) == content and huge_share(path) < 1.0
    made, whole = make_huge(path)
    assert whole == 3 * HUGE_BYTES
    assert bytes(mapped) == content == path.read_bytes()
    if made < whole:
        pytest.skip("no huge pages are to be had here")
    assert huge_share(path) == 1.0


def test_a_file_without_a_whole_huge_page_lacks_none(shared_memory: Path) -> None:
    path = shared_memory / "form"
    path.write_bytes(bytes(5000))
    assert huge_share(path) == 1.0 and make_huge(path) == (0, 0)
