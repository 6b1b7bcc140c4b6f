"""Whose limit counts: the machine's, or that of any control group above."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_loader.memory_limit import read_memory
from model_loader.pool_room import Room, default_budget, is_memory

GIB = 1 << 30


def machine(root: Path, cgroup: str) -> tuple[Path, Path]:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text("MemTotal:       67108864 kB\nMemFree: 1 kB\nMemAvailable:   33554432 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, groups


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = read_memory(*machine(tmp_path, "0::/\n"))
    assert (found.limit_bytes, found.available_bytes) == (64 * GIB, 32 * GIB)


def test_a_pod_s_limit_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/kubepods/pod1/container\n")
    write(groups / "kubepods/pod1/container", memory__max="max\n", memory__current=f"{GIB}\n")
    write(
        groups / "kubepods/pod1",
        memory__max=f"{8 * GIB}\n",
        memory__current=f"{6 * GIB}\n",
        memory__stat=f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nshmem {4 * GIB}\n",
    )
    found = read_memory(proc, groups)
    assert (found.limit_bytes, found.available_bytes) == (8 * GIB, 4 * GIB)


def test_version_one_groups_are_read_and_their_no_limit_is_none(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "9:name=systemd:/x\n4:memory:/pod\n0::/\n")
    write(groups / "memory/pod", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes=f"{GIB}\n")
    assert read_memory(proc, groups).limit_bytes == 64 * GIB
    write(
        groups / "memory/pod",
        memory__limit_in_bytes=f"{2 * GIB}\n",
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
    )
    found = read_memory(proc, groups)
    assert (found.limit_bytes, found.available_bytes) == (2 * GIB, 3 * GIB // 2)


def test_where_nothing_can_be_read_nothing_limits(tmp_path: Path) -> None:
    assert read_memory(tmp_path / "none", tmp_path / "none").limit_bytes >= 1 << 60


@pytest.mark.skipif(not is_memory(Path("/dev/shm")), reason="no tmpfs at /dev/shm")
def test_a_pool_in_memory_takes_at_most_half_of_the_limit(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/pod\n")
    write(groups / "pod", memory__max=f"{GIB}\n", memory__current=f"{GIB // 4}\n")
    memory = read_memory(proc, groups)
    assert default_budget(Path("/dev/shm"), lambda: memory) == GIB // 2
    room = Room(Path("/dev/shm"), GIB, lambda: memory)
    assert room.shortage(GIB // 4, 0, []) == ""
    assert "memory are available" in room.shortage(GIB * 3 // 4, 0, [])


def test_what_other_loads_have_reserved_and_not_written_is_not_free(tmp_path: Path) -> None:
    room = Room(tmp_path, 1 << 60)
    free = room_free(tmp_path)
    assert room.shortage(1 << 20, 0, []) == ""
    assert "are free in" in room.shortage(1 << 20, 0, [(tmp_path / "key.prepared", free)])


def room_free(path: Path) -> int:
    import os

    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
