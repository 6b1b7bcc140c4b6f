"""Compiled code comes back where it fits exactly, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def note(*files: Path) -> bytes:
    """As Triton writes it beside the files of a kernel."""
    return json.dumps({"child_paths": {file.name: str(file) for file in files}}).encode()


def test_notes_of_where_files_lie_name_the_place_they_were_unpacked_to(tmp_path: Path, store: DirectoryStore) -> None:
    first = Artifacts(KEY, tmp_path / "slot-0", store)
    for name, data in FILES.items():
        compile_into(first, name, data)
    kernel = first.directory / "triton" / "AB"
    compile_into(first, "triton/AB/__grp__kernel.json", note(kernel / "kernel.cubin", kernel / "kernel.json"))
    compile_into(first, "triton/AB/__grp__half.json", note(kernel / "kernel.cubin", kernel / "half.json"))
    compile_into(first, "triton/AB/__grp__no.json", b"[1")
    assert first.keep() > 0
    assert str(tmp_path).encode() not in store.get(first.object_key)
    second = Artifacts(KEY, tmp_path / "slot-1", store)
    assert (second.restore().files, second.keep()) == (len(FILES) + 1, 0)
    there = second.directory / "triton" / "AB"
    told = json.loads((there / "__grp__kernel.json").read_bytes())["child_paths"]
    assert told == {name: str(there / name) for name in ("kernel.cubin", "kernel.json")}
    second.directory.parent.rename(tmp_path / "moved")
    moved = Artifacts(KEY, tmp_path / "moved", store)
    compile_into(moved, "triton/AB/__grp__half.json", note(kernel / "kernel.cubin", kernel / "half.json"))
    assert (moved.restore().tier, moved.restore().files) == ("disk", len(FILES) + 1)
    there = moved.directory / "triton" / "AB"
    told = json.loads((there / "__grp__kernel.json").read_bytes())["child_paths"]
    assert told == {name: str(there / name) for name in ("kernel.cubin", "kernel.json")}


@pytest.mark.parametrize(
    "said", [b"[1", b"[]", b"{}", note(Path("/etc/passwd")), note(Path("kernel.cubin"), Path("x"))]
)
def test_a_note_of_files_that_are_not_in_the_archive_is_refused(
    tmp_path: Path, store: DirectoryStore, said: bytes
) -> None:
    artifacts = Artifacts(KEY, tmp_path / "slot", store)
    store.put(artifacts.object_key, pack(KEY, {**FILES, "triton/AB/__grp__kernel.json": said}))
    found = artifacts.restore()
    assert found.tier == "none" and "__grp__kernel.json in an archive of artifacts" in found.detail
    assert not artifacts.directory.exists()


_COMPILE_TWICE = """
import json, os, shutil, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from function_runtime.artifacts import ArtifactKey, Artifacts
from function_runtime.engine.attention.kernels import reduce_kernel
from model_loader.objects import DirectoryStore

root = Path(sys.argv[1])
hits, binaries, places = [], [], []
triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
types = {"partial": "*fp32", "maxima": "*fp32", "sums": "*fp32", "mixed": "*bf16", "splits": "i32"}
for slot in ("slot-0", "slot-1"):
    artifacts = Artifacts(ArtifactKey("c" * 64, "sm_90", ()), root / slot, DirectoryStore(root / "objects"))
    tier = artifacts.restore().tier
    os.environ.update(artifacts.environment())
    signature = {**types, "SIZE": "constexpr", "SPLITS": "constexpr"}
    source = ASTSource(reduce_kernel, signature, constexprs={"SIZE": 64, "SPLITS": 2})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    binaries.append(kernel.asm["cubin"])
    places += {str(Path(path).relative_to(root)).split("/")[0] for path in kernel.metadata_group.values()}
    artifacts.keep()
    shutil.rmtree(root / slot)
print(json.dumps({"hits": hits, "tier": tier, "places": places, "same": binaries[0] == binaries[1]}))
"""


def test_a_kernel_that_one_slot_compiled_for_a_gpu_is_not_compiled_by_the_next(tmp_path: Path) -> None:
    """The engine's own, by the very compiler, which needs no GPU."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    said = subprocess.run(
        [sys.executable, "-c", _COMPILE_TWICE, str(tmp_path)],
        stdout=subprocess.PIPE, check=True, timeout=240, env=environment,
    )  # fmt: skip
    told = json.loads(said.stdout.splitlines()[-1])
    assert told == {"hits": [False, True], "tier": "store", "places": ["slot-0", "slot-1"], "same": True}


def test_a_store_that_is_down_costs_compiling_and_not_the_start(tmp_path: Path, store: DirectoryStore) -> None:
    class Down(DirectoryStore):
        def get(self, key: str, offset: int = 0, length: int | None = None, *, within_s: float | None = None) -> bytes:
            raise StoreUnavailable("the store is down")

    found = Artifacts(KEY, tmp_path / "slot", Down(tmp_path / "down")).restore()
    assert (found.tier, found.detail) == ("none", "not restored: the store is down")
    assert Artifacts(KEY, tmp_path / "slot", None).restore().tier == "none"
