import os
from pathlib import Path

import numpy as np
import pytest

from model_loader.errors import FormatError, IntegrityError, LoaderError, OutOfSpace, SourceMissing
from model_loader.prepared import PreparedFile
from model_loader.prepared_layout import TensorPlan
from model_loader.prepared_writer import PreparedWriter, write_fully, write_prepared


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    tensors = [
        ("small", "float32", random.standard_normal((3, 5)).astype(np.float32)),
        ("large", "float32", random.standard_normal((200, 200)).astype(np.float32)),
        ("half", "bfloat16", random.integers(0, 60000, (7, 9)).astype(np.uint16)),
    ]
    target = tmp_path / "x.prepared"
    write_prepared(target, "a" * 64, "llama-1/float32", "float32", tensors)
    return target


def test_tensors_come_back_as_read_only_views_of_one_mapping(path: Path) -> None:
    prepared = PreparedFile.open(path, verify=True)
    assert prepared.keys() == ("small", "large", "half")
    assert prepared.identity == "a" * 64
    assert prepared.recipe == "llama-1/float32"
    large = prepared.tensor("large")
    assert large.shape == (200, 200)
    assert large.dtype == np.float32
    assert not large.flags.writeable
    assert large.ctypes.data % 4096 == 0
    assert prepared.tensor("small").ctypes.data % 64 == 0
    half = prepared.tensor("half")
    assert half.dtype == np.uint16
    assert prepared.info("half").dtype == "bfloat16"
    del prepared
    assert large.sum() == large.sum()


def test_an_unknown_tensor_is_named(path: Path) -> None:
    with pytest.raises(FormatError, match="no tensor other"):
        PreparedFile.open(path, verify=False).tensor("other")


@pytest.mark.parametrize("at", ["preamble", "small", "large", "half", "table"])
def test_one_altered_byte_is_found(path: Path, at: str) -> None:
    prepared = PreparedFile.open(path, verify=True)
    offsets = {"preamble": 17, "table": prepared.nbytes - 20}
    offset = offsets[at] if at in offsets else prepared.info(at).offset + 1
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    with pytest.raises((IntegrityError, FormatError)):
        PreparedFile.open(path, verify=True)


@pytest.mark.parametrize("kept", [0, 10, 4095, 4096, 10_000, -1])
def test_a_short_file_is_refused(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FormatError):
        PreparedFile.open(path, verify=False)


def test_a_file_of_full_length_with_a_zero_tail_is_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:60_000] + bytes(len(content) - 60_000))
    with pytest.raises(LoaderError):
        PreparedFile.open(path, verify=False)


def test_nothing_appears_without_commit(tmp_path: Path) -> None:
    target = tmp_path / "x.prepared"
    with (
        pytest.raises(RuntimeError, match="stop"),
        PreparedWriter(target, "a", "r", "float32", [TensorPlan("t", "float32", (4,))]) as writer,
    ):
        writer.write(writer.place("t"), np.zeros(4, np.float32))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(LoaderError, match="cannot write"),
        PreparedWriter(tmp_path / "no" / "x", "a", "r", "float32", []),
    ):
        pass
    with pytest.raises(SourceMissing):
        PreparedFile.open(tmp_path / "absent", verify=False)


def test_a_full_device_is_out_of_space(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    handle = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OutOfSpace, match="no space left"):
            write_fully(handle, 0, b"x" * 100, "the checkpoint")
    finally:
        os.close(handle)
