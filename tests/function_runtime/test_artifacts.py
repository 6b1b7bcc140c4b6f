"""Compiled code comes back where it fits exactly, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from function_runtime.artifacts import ArtifactKey, Artifacts, pack, unpack
from model_loader.errors import FormatError, IntegrityError, StoreUnavailable
from model_loader.objects import DirectoryStore

KEY = ArtifactKey("c" * 64, "NVIDIA H200 9.0", (("torch", "2.13.0"), ("triton", "3.5"), ("driver", "570")))
OTHERS = (
    ArtifactKey("d" * 64, KEY.device, KEY.versions),
    ArtifactKey(KEY.checkpoint, "NVIDIA H100 9.0", KEY.versions),
    ArtifactKey(KEY.checkpoint, KEY.device, (("torch", "2.14.0"), *KEY.versions[1:])),
    ArtifactKey(KEY.checkpoint, KEY.device, KEY.versions[:2]),
)
FILES = {"triton/AB/kernel.cubin": b"machine code", "triton/AB/kernel.json": b"{}", "inductor/x/y.so": bytes(1000)}


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "objects")


def compile_into(artifacts: Artifacts, name: str, data: bytes) -> None:
    path = artifacts.directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_what_one_slot_compiled_another_has_before_its_first_request(tmp_path: Path, store: DirectoryStore) -> None:
    first = Artifacts(KEY, tmp_path / "slot-0", store)
    assert first.restore().tier == "none"
    for name, data in FILES.items():
        compile_into(first, name, data)
    compile_into(first, "triton/AB/tmp.pid_7_x/kernel.cubin", b"half")
    assert first.keep() > 0
    assert first.keep() == 0
    second = Artifacts(KEY, tmp_path / "slot-1", store)
    found = second.restore()
    assert (found.tier, found.files) == ("store", len(FILES))
    read = {name: (second.directory / name).read_bytes() for name in FILES}
    assert read == FILES
    assert second.keep() == 0
    assert Artifacts(KEY, tmp_path / "slot-1", store).restore().tier == "disk"
    assert second.environment()["TRITON_CACHE_DIR"] == str(second.directory / "triton")
    compile_into(second, "triton/CD/new.cubin", b"more")
    assert second.keep() > 0
    assert Artifacts(KEY, tmp_path / "slot-2", store).restore().files == len(FILES) + 1


@pytest.mark.parametrize("other", OTHERS)
def test_nothing_is_taken_across_a_mismatch(tmp_path: Path, store: DirectoryStore, other: ArtifactKey) -> None:
    first = Artifacts(KEY, tmp_path / "slot-0", store)
    compile_into(first, "triton/AB/kernel.cubin", b"machine code")
    first.keep()
    mine = Artifacts(other, tmp_path / "slot-1", store)
    assert mine.object_key != first.object_key
    assert mine.restore().tier == "none"
    store.put(mine.object_key, store.get(first.object_key))
    found = mine.restore()
    assert found.tier == "none" and "is of" in found.detail
    assert not mine.directory.exists()


@given(at=st.integers(min_value=0), bit=st.integers(0, 7))
def test_no_changed_byte_is_unpacked(at: int, bit: int) -> None:
    archive = bytearray(pack(KEY, FILES))
    archive[at % len(archive)] ^= 1 << bit
    with pytest.raises((FormatError, IntegrityError)):
        unpack(KEY, bytes(archive))


@pytest.mark.parametrize("cut", [0, 7, 47, 60, -1])
def test_no_part_of_an_archive_is_unpacked(cut: int) -> None:
    with pytest.raises((FormatError, IntegrityError)):
        unpack(KEY, pack(KEY, FILES)[:cut])
    with pytest.raises(IntegrityError, match="too many"):
        unpack(KEY, pack(KEY, FILES) + b"x")


@pytest.mark.parametrize(
    "name", ["../x", "triton/../../x", "/etc/x", "elsewhere/x", "triton", "triton//x", "triton/\0"]
)
def test_a_name_that_leaves_the_directory_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match="names a file"):
        unpack(KEY, pack(KEY, {name: b"x"}))


def test_a_store_that_is_down_costs_compiling_and_not_the_start(tmp_path: Path, store: DirectoryStore) -> None:
    class Down(DirectoryStore):
        def get(self, key: str, offset: int = 0, length: int | None = None, *, within_s: float | None = None) -> bytes:
            raise StoreUnavailable("the store is down")

    found = Artifacts(KEY, tmp_path / "slot", Down(tmp_path / "down")).restore()
    assert (found.tier, found.detail) == ("none", "not restored: the store is down")
    assert Artifacts(KEY, tmp_path / "slot", None).restore().tier == "none"
