"""A prepared form while it arrives: who waits sees groups as they land, and why the rest never will."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model_loader.errors import FormatError, IntegrityError, SourceUnavailable
from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.prepared_layout import TensorPlan
from model_loader.prepared_writer import PreparedWriter
from model_loader.progress import Progress
from model_loader.recipe import prepare
from tests.support.checkpoints import make_tiny_llama

VALUES = np.arange(30_000, dtype=np.float32)
PLANS = [TensorPlan("first", "float32", VALUES.shape, 0), TensorPlan("second", "float32", VALUES.shape, 1)]


def writer(path: Path, **options: Path) -> PreparedWriter:
    return PreparedWriter(path, "i", "r", "float32", PLANS, groups=("one", "two"), **options)


def test_a_group_can_be_used_before_the_next_has_come(tmp_path: Path) -> None:
    with writer(tmp_path / "form") as making:
        form = PreparedFile.open_arriving(making.temporary)
        assert form.board is not None
        assert form.groups == ("one", "two")
        assert form.board.landed_ns(0) == 0
        making.write(making.place("first"), VALUES)
        making.landed(0)
        form.wait(0)
        np.testing.assert_array_equal(form.tensor("first"), VALUES)
        assert form.board.landed_ns(1) == 0
        with pytest.raises(FormatError, match="never completed"):
            PreparedFile.open(making.temporary, verify=False)
        making.write(making.place("second"), VALUES)
        making.landed(1)
        making.commit()
    form.wait(1)
    assert form.board.is_complete
    assert form.board.landed_ns(0) < form.board.landed_ns(1)
    np.testing.assert_array_equal(form.tensor("second"), VALUES)
    assert PreparedFile.open(tmp_path / "form", verify=True).board is None


def test_a_waiter_is_woken_by_what_it_waits_for(tmp_path: Path) -> None:
    waits, woken = threading.Event(), threading.Event()
    with writer(tmp_path / "form") as making:
        form = PreparedFile.open_arriving(making.temporary)

        def wait() -> None:
            form.wait(1, waits.set)
            woken.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert waits.wait(30)
        making.landed(0)
        assert not woken.is_set()
        making.landed(1)
        assert woken.wait(30)
        waiting.join()


def test_the_loaders_failure_reaches_who_waits_with_its_kind_and_words(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError), writer(tmp_path / "form") as making:
        form = PreparedFile.open_arriving(making.temporary)
        making.landed(0)
        raise IntegrityError("model.safetensors: bytes 0 to 4194304 are not as they were")
    form.wait(0)
    with pytest.raises(IntegrityError, match="bytes 0 to 4194304"):
        form.wait(1)
    assert list(tmp_path.iterdir()) == []


def test_the_loaders_death_is_seen_by_who_waits(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, time\n"
        "from tests.model_loader.test_arriving import writer\n"
        "with writer(pathlib.Path(sys.argv[1])) as making:\n"
        "    making.landed(0)\n"
        "    print(making.temporary, flush=True)\n"
        "    time.sleep(600)\n"
    )
    loader = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "form")], stdout=subprocess.PIPE, text=True)
    try:
        assert loader.stdout is not None
        form = PreparedFile.open_arriving(Path(loader.stdout.readline().strip()))
        form.wait(0)
        with pytest.raises(SourceUnavailable, match="gone"):
            form.wait(1, lambda: os.kill(loader.pid, signal.SIGKILL))
    finally:
        loader.kill()
        loader.wait()
        if loader.stdout is not None:
            loader.stdout.close()


def test_a_loader_from_which_nothing_comes_is_given_up(tmp_path: Path) -> None:
    with writer(tmp_path / "form") as making:
        form = PreparedFile.open_arriving(making.temporary)
        assert form.board is not None
        with pytest.raises(SourceUnavailable, match="nothing of"):
            form.board.wait(0, stalled_s=0.01)


def test_memory_of_a_retired_form_is_written_over_and_shows_nothing_of_it(tmp_path: Path) -> None:
    old = tmp_path / "old"
    with writer(old) as making:
        for name in ("first", "second"):
            making.write(making.place(name), VALUES)
        making.commit()
    inode = old.stat().st_ino
    with writer(tmp_path / "new", recycle=old) as making:
        assert not old.exists()
        form = PreparedFile.open_arriving(making.temporary)
        assert form.board is not None
        assert [form.board.landed_ns(group) for group in (0, 1)] == [0, 0]
        for name in ("first", "second"):
            making.write(making.place(name), -VALUES)
        making.commit()
    assert (tmp_path / "new").stat().st_ino == inode
    np.testing.assert_array_equal(PreparedFile.open(tmp_path / "new", verify=True).tensor("second"), -VALUES)


@pytest.mark.parametrize("kept", [0, 5000, 1 << 20])
def test_a_retired_file_of_another_size_or_none_at_all_does_as_well(tmp_path: Path, kept: int) -> None:
    if kept:
        (tmp_path / "old").write_bytes(b"\xff" * kept)
    with writer(tmp_path / "new", recycle=tmp_path / "old") as making:
        for name in ("first", "second"):
            making.write(making.place(name), VALUES)
        making.commit()
    form = PreparedFile.open(tmp_path / "new", verify=True)
    np.testing.assert_array_equal(form.tensor("first"), VALUES)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_recipe_publishes_its_name_first_and_then_every_group(
    tmp_path: Path, imported: Callable[[Path], Manifest], dtype: str
) -> None:
    manifest = imported(make_tiny_llama(tmp_path / "model", dtype="bfloat16"))
    forms: list[PreparedFile] = []

    def progress(seen: Progress) -> None:
        if seen.stage == "arriving":
            forms.append(PreparedFile.open_arriving(Path(seen.path)))

    prepare(manifest, dtype, tmp_path / "form", progress)
    (form,) = forms
    assert form.groups == ("embedding", "layer 0", "layer 1", "norm and head")
    for group in range(4):
        form.wait(group)
    done = PreparedFile.open(tmp_path / "form", verify=True)
    names = done.keys()
    assert "embed" in names
    for name in names:
        np.testing.assert_array_equal(form.tensor(name), done.tensor(name))


def test_a_checkpoint_lands_straight_in_retired_memory_and_is_the_same(
    tmp_path: Path, imported: Callable[[Path], Manifest]
) -> None:
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 4, "layers": 3, "vocab": 4096, "dtype": "bfloat16"}
    manifest = imported(make_tiny_llama(tmp_path / "model", **sizes))
    other = imported(make_tiny_llama(tmp_path / "other", seed=1, **sizes))
    prepare(manifest, "bfloat16", tmp_path / "whole")
    prepare(other, "bfloat16", tmp_path / "retired")
    inode = (tmp_path / "retired").stat().st_ino
    prepare(manifest, "bfloat16", tmp_path / "again", recycle=tmp_path / "retired")
    whole, again = (PreparedFile.open(tmp_path / name, verify=True) for name in ("whole", "again"))
    assert (tmp_path / "again").stat().st_ino == inode
    for name in whole.keys():  # noqa: SIM118
        np.testing.assert_array_equal(again.tensor(name), whole.tensor(name), name)
