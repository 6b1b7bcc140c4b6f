"""Checkpoints at the speed of the hardware: page cache, disk, object store, beside what else loads safetensors.

"Loaded" means that every byte is read and verified and lies in memory that a replica can map; Stoker's time is that of
`prepare` until everything has landed, the list of chunks that is made afterwards beside it. Peers verify nothing. Each
way loads the same files with as many threads as the machine has, into fresh and into reused memory. Then: a second
replica's map, peak memory, and zero to the first token while loading. `make bench-load`; `--quick` takes 0.5 GB. With
the files at hand (`STOKER_BENCH_FILES`) the whole takes a quarter of an hour.
Limits: whatever else runs on the machine slows all sides; figures are medians of their rounds.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from model_loader.manifest import Manifest
from tests.benchmarks import load_files, load_peer, load_store, load_token, report
from tests.benchmarks.load_roofline import only_copied
from tests.benchmarks.load_ways import Bench, drop, load, ours, plain_read, rate, shards, size, theirs, warm

PLAIN_SHARE, PEER_RATIO, FLOOR_SHARE, DISK_SHARE = 0.60, 2.0, 0.75, 0.90
MAP_S, MAP_BYTES, BESIDE_BYTES = 0.05, 10_000_000, 256 * 1024 * 1024
PEER_WAYS = ("safetensors", "runai", "fastsafetensors")
LOOK_S = 0.005
LARGE_BYTES = 1_500_000_000
"""Above, peers load once: the slowest takes seconds a gigabyte."""
FEW_ROUNDS = 3
"""Of what takes long."""
MEMORY = Path("/dev/shm")
BARE, DIGESTED = "a bare copy", "a copy and its digests"


def from_page_cache(
    bench: Bench, name: str, manifest: Manifest, *, judged: bool = True
) -> tuple[dict[str, Any], list[bool]]:
    paths, nbytes = shards(manifest), size(manifest)
    drop(paths)  # as reading leaves it, in large pieces, and not as it was written
    warm(paths)
    found: dict[str, Any] = {"nbytes": nbytes, "shards": len(paths)}
    plain: list[float] = []
    mine = ours(bench, manifest, lambda: plain.append(plain_read(paths, 2)))  # in turn: what else goes on meets both
    speeds: dict[str, dict[str, float]] = {"plain pread, 2 threads": {"reused": rate(nbytes, plain)}}
    speeds["stoker, verified"] = {kind: rate(nbytes, mine[kind]) for kind in ("fresh", "reused")}
    found["seal_s"] = report.median(mine["seal"])
    for way in PEER_WAYS:
        for memory in ("fresh", "reused"):
            try:
                took = theirs(bench, way, [*map(str, paths)], memory, rounds=1 if nbytes > LARGE_BYTES else 0)
                speeds.setdefault(way, {})[memory] = rate(nbytes, took)
            except (LookupError, subprocess.TimeoutExpired) as error:
                report.console.print(f"not measured: {error}")
    for way, how in ((BARE, "bare"), (DIGESTED, "digested")):
        for memory in ("fresh", "reused"):
            speeds.setdefault(way, {})[memory] = rate(nbytes, only_copied(paths, bench.rounds, how, memory, bench.pool))
    report.table(
        f"Page cache to loaded, {name}, GB/s",
        ["way", "fresh memory", "reused memory"],
        [[way, s.get("fresh", float("nan")), s.get("reused", float("nan"))] for way, s in speeds.items()],
    )
    report.console.print(f"the list of chunks, made when everything has landed: {found['seal_s']:.3f} s")
    reused, pure = speeds["stoker, verified"]["reused"], speeds["plain pread, 2 threads"]["reused"]
    found |= {"gb_s": speeds, "share_of_plain": reused / pure}
    held = [
        report.verdict(
            f"{name}: at least {PLAIN_SHARE:.0%} of plain reads", reused >= PLAIN_SHARE * pure, f"{reused / pure:.0%}"
        )
    ]
    for memory in ("fresh", "reused"):
        best = max((speeds.get(way, {}).get(memory, 0.0) for way in PEER_WAYS), default=0.0)
        if best:
            found[f"times_best_peer_{memory}"] = speeds["stoker, verified"][memory] / best
            held.append(
                beside_peers(
                    f"{name}, {memory} memory", speeds["stoker, verified"][memory], best, speeds[DIGESTED][memory]
                )
            )
    return found, held if judged else []


def beside_peers(name: str, mine: float, best: float, floor: float) -> bool:
    """Twice the best peer; where a copy with digests and nothing else does not reach that, so near to it as may be
    asked."""
    told = f"{mine / best:.2f}; a copy with digests and nothing else reaches {floor / best:.2f}"
    holds = report.verdict(f"{name}: at least {PEER_RATIO:g} times the best peer", mine >= PEER_RATIO * best, told)
    if holds or floor >= PEER_RATIO * best:
        return holds
    return report.verdict(
        f"{name}: that is out of reach; at least {FLOOR_SHARE:.0%} of what is not", mine >= FLOOR_SHARE * floor,
        f"{mine / floor:.0%}",
    )  # fmt: skip


def from_disk(bench: Bench, manifest: Manifest) -> tuple[dict[str, Any], list[bool]]:
    """With the page cache dropped, beside fio's sequential read, or the fastest plain O_DIRECT read."""
    paths, nbytes = shards(manifest), size(manifest)

    def cold() -> None:
        drop(paths)

    direct: dict[str, float] = {}
    for threads in (1, 2, 4):
        seconds = []
        for _ in range(bench.rounds):
            cold()
            seconds.append(plain_read(paths, threads, os.O_DIRECT))
        direct[f"O_DIRECT, {threads} threads"] = rate(nbytes, seconds)
    if (fio := shutil.which("fio")) is not None:
        cold()
        direct["fio"] = fio_rate(fio, paths)
    cold()
    load(bench, manifest)[2].unlink()  # it finds out which way is faster here
    mine = ours(bench, manifest, cold)
    speed = rate(nbytes, mine["reused"])
    best = direct.get("fio") or max(direct.values())
    report.table("From disk, cache dropped, GB/s", ["way", "GB/s"], [*direct.items(), ("stoker, verified", speed)])
    remembered = bench.pool / ".cold-reads.json"
    if remembered.exists():
        report.console.print(f"cold reads here: {remembered.read_text()}")
    holds = report.verdict(
        f"disk: at least {DISK_SHARE:.0%} of sequential reads", speed >= DISK_SHARE * best, f"{speed / best:.0%}"
    )
    return {"gb_s": {**direct, "stoker": speed}, "share": speed / best}, [holds]


def fio_rate(fio: str, paths: Sequence[Path]) -> float:
    names = ":".join(str(path).replace(":", r"\:") for path in paths)
    command = [fio, "--name=r", f"--filename={names}", "--readonly", "--rw=read", "--bs=4M", "--direct=1",
               "--ioengine=psync", "--numjobs=1", "--output-format=json"]  # fmt: skip
    told = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return float(told["jobs"][0]["read"]["bw_bytes"]) / 1e9


def peak_memory(bench: Bench, manifest: Manifest) -> tuple[dict[str, Any], list[bool]]:
    """Of a load in a process of its own: the form, and what that process held beside it. Pages of the page cache that
    it maps are counted apart: they are the kernel's, and go when memory is short."""
    out = bench.pool / "peak.prepared"
    command = [sys.executable, "-m", "model_loader.recipe", str(manifest.path), "--dtype", "bfloat16"]
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
    source_bytes, peak, cached = size(manifest), 0, 0
    while process.poll() is None:
        held = resident(process.pid)
        # Of files it maps what is more than the source is code.
        code = held["RssFile"] - min(held["RssFile"], source_bytes)
        peak, cached = max(peak, held["RssAnon"] + code), max(cached, held["RssFile"])
        time.sleep(LOOK_S)
    if process.returncode:
        raise RuntimeError(f"the load ended with {process.returncode}")
    form_bytes = out.stat().st_blocks * 512
    beside = form_bytes + peak - source_bytes
    out.unlink()
    holds = report.verdict(
        "peak memory: the checkpoint and at most 256 MB", beside <= BESIDE_BYTES,
        f"{form_bytes / 1e6:.0f} MB of form + {peak / 1e6:.0f} MB of process = checkpoint + {beside / 1e6:.0f} MB; "
        f"{cached / 1e6:.0f} MB of the page cache mapped",
    )  # fmt: skip
    return {"form_bytes": form_bytes, "process_bytes": peak, "beside_bytes": beside, "mapped_bytes": cached}, [holds]


def resident(pid: int) -> dict[str, int]:
    """Resident bytes of a process by kind; none once it is gone."""
    found = dict.fromkeys(("RssAnon", "RssFile", "RssShmem"), 0)
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    return found


def second_replica(bench: Bench, manifest: Manifest) -> tuple[dict[str, Any], list[bool]]:
    """Another process maps a form that is in the pool already; then it goes over the bytes once."""
    _, _, form = load(bench, manifest)
    code = (
        "import sys, time, json, pathlib, torch\n"
        "from function_runtime.engine.weights import map_weights\n"
        "def smaps():\n"
        "    rows = [l.split() for l in open('/proc/self/smaps_rollup')][1:]\n"
        "    held = {r[0]: int(r[1]) * 1024 for r in rows}\n"
        "    tables = next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmPTE'))\n"
        "    return held['Private_Clean:'] + held['Private_Dirty:'], tables\n"
        "torch.zeros(1) + 1\n"
        "before, tables = smaps()\n"
        "begin = time.perf_counter()\n"
        "weights = map_weights(pathlib.Path(sys.argv[1]), torch.device('cpu')).tensors\n"
        "mapped = time.perf_counter() - begin\n"
        "after, _ = smaps()\n"
        "begin = time.perf_counter()\n"
        "total = sum(int(w.reshape(-1).view(torch.uint8)[::4096].sum()) if w.is_contiguous() else "
        "int(w.t().reshape(-1).view(torch.uint8)[::4096].sum()) for w in weights.values())\n"
        "first = time.perf_counter() - begin\n"
        "last, grown = smaps()\n"
        "print(json.dumps({'map_s': mapped, 'unique_bytes': max(after, last) - before, 'first_pass_s': first, "
        "'page_table_bytes': grown - tables}))\n"
    )
    holder = Path(form)
    keep = os.open(holder, os.O_RDONLY)  # the first replica
    first = mmap.mmap(keep, 0, prot=mmap.PROT_READ)
    for at in range(0, len(first), 4096):
        first[at]
    told = json.loads(
        subprocess.run([sys.executable, "-c", code, str(form)], check=True, capture_output=True, text=True).stdout
    )
    first.close()
    os.close(keep)
    form.unlink()
    detail = f"{told['map_s'] * 1e3:.1f} ms, {told['unique_bytes'] / 1e6:.1f} MB, page tables "
    detail += f"{told['page_table_bytes'] / 1e6:.1f} MB, first pass {told['first_pass_s']:.3f} s"
    holds = told["map_s"] <= MAP_S and told["unique_bytes"] < MAP_BYTES
    return told, [report.verdict("second replica: mapped in 50 ms, under 10 MB of its own", holds, detail)]


def is_small(manifest: Manifest) -> bool:
    return size(manifest) <= 1.5 * LARGE_BYTES


@contextlib.contextmanager
def pool_folder() -> Iterator[Path]:
    folder = MEMORY / f"stoker-bench-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(quick: bool) -> bool:
    kept = os.environ.get("STOKER_BENCH_FILES")
    sizes = [(0.5, 2)] if quick else [(2.0, 1), (2.0, 8), (6.0, 1), (6.0, 8)]
    results: dict[str, Any] = {"quick": quick}
    held: list[bool] = []
    with contextlib.ExitStack() as stack:
        folder = Path(kept) if kept else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, stack.enter_context(pool_folder()), 2 if quick else 5)
        few = Bench(folder, bench.pool, min(bench.rounds, FEW_ROUNDS))

        def take(name: str, found: tuple[dict[str, Any], list[bool]]) -> None:
            results[name] = found[0]
            held.extend(found[1])

        smol = load_files.imported(load_files.smollm2(folder), folder)
        # Over in a tenth of a second, threads and opening of files included: shown, and held to nothing.
        results["SmolLM2"], _ = from_page_cache(bench, "SmolLM2, bfloat16", smol, judged=False)
        for gigabytes, count in sizes:
            name = f"{gigabytes:g} GB, {count} shard{'s' * (count > 1)}"
            manifest = load_files.imported(load_files.random_model(folder, gigabytes, count), folder)
            take(name, from_page_cache(bench if is_small(manifest) else few, name, manifest))
        take("second replica", second_replica(few, manifest))
        take("peak memory", peak_memory(few, manifest))
        manifest = load_files.imported(load_files.random_model(folder, *sizes[0]), folder)
        take("disk", from_disk(few, manifest))
        take("peer", load_peer.from_peer(bench, manifest))
        take("first token", load_token.first_token(bench, manifest))
        try:
            take("store", load_store.from_store(few, manifest))
        except (ImportError, RuntimeError) as error:
            report.console.print(f"the object store is left out: {error}")
    report.verdicts()
    report.save("load_checkpoint", {**results, "verdicts": report.VERDICTS})
    return all(held)


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
