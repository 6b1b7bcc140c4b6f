"""From zero to the first token over HTTP: warm worker, empty pool, no worker at all; llama.cpp and transformers beside.

The prompt has five tokens and the weights are in the page cache. Every start is split by stage as Stoker itself records
it; the floor is what the stages of reading the weights once and importing torch cost on this machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks import load, peers, report
from tests.support.service import Service
from tests.support.smollm2 import gguf as gguf_file


def import_torch_s(tries: int) -> float:
    def once() -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        return time.perf_counter() - begin

    return report.median([once() for _ in range(tries)])


def stages(service: Service, function: str) -> dict[str, float]:
    """Seconds by stage of the newest start of a function, and of its first request."""
    newest = max(
        (r for r in service.replicas(live=False) if r["function"] == function), key=lambda r: r.get("created_us", 0)
    )
    return {stage["name"]: stage.get("duration_us", 0) / 1e6 for stage in newest.get("stages", [])}


def one(service: Service) -> float:
    return load.stream(service.url, "smol", load.SHORT_PROMPT, 8, service.key).first_token_s


def warm_worker(service: Service, tries: int) -> tuple[list[float], dict[str, float]]:
    seconds, split = [], []
    for attempt in range(tries + 1):
        service.wait_zero()
        service.wait_warm()
        time.sleep(0.3)
        took = one(service)
        if attempt:  # the first start made the prepared form and paged the weights in
            seconds.append(took)
            split.append(stages(service, "smol"))
    names = dict.fromkeys(name for row in split for name in row)
    return seconds, {name: report.median([row.get(name, 0.0) for row in split]) for name in names}


def empty_pool(service: Service, tries: int) -> list[float]:
    seconds = []
    for _ in range(tries):
        service.wait_zero()
        service.close()
        for directory in service.pool_directories():
            shutil.rmtree(directory)
        service.start()
        service.wait_warm()
        seconds.append(one(service))
    return seconds


def no_worker(folder: Path, gguf: Path, tries: int) -> list[float]:
    """No template either: the request itself starts it, `import torch` included; the prepared form is in the pool."""
    seconds = []
    with Service(folder / "none", env={"STOKER_WARM_WORKERS": "0"}) as service:
        service.deploy("smol", f"file://{gguf}", scaling={"keep_alive": 0.2})
        for attempt in range(tries + 1):
            service.wait_zero()
            service.kill("agent")  # the next agent starts no template before it needs one
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                slots = service.call("GET", "/api/v1/slots")["data"]
                if slots and not slots[0].get("template_ready") and slots[0].get("connected", True):
                    break
                time.sleep(0.05)
            time.sleep(1.0)
            took = one(service)
            if attempt:
                seconds.append(took)
    return seconds


def llama_cold(gguf: Path, tries: int) -> list[float]:
    seconds = []
    for _ in range(tries):
        with peers.llama(gguf) as peer:
            ready_s = peer.wait_ready()
            seconds.append(ready_s + load.stream(peer.url, "x", load.SHORT_PROMPT, 8).first_token_s)
    return seconds


def transformers_cold(gguf: Path) -> float:
    command = [
        str(peers.python() or sys.executable),
        str(Path(__file__).with_name("transformers_batch.py")),
        str(gguf),
        "cold",
    ]
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def main(quick: bool) -> bool:
    gguf, tries = gguf_file(), 3 if quick else 10
    gguf.read_bytes()
    torch_s = import_torch_s(3 if quick else 5)
    found: dict[str, Any] = {"import_torch_s": torch_s}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        folder = Path(name)
        with Service(folder / "data") as service:
            service.deploy("smol", f"file://{gguf}", scaling={"keep_alive": 0.2})
            warm, split = warm_worker(service, tries)
            found["empty_pool_s"] = report.median(empty_pool(service, 2 if quick else 3))
        found["warm_worker_s"], found["warm_worker_all_s"], found["warm_worker_stages_s"] = (
            report.median(warm),
            warm,
            split,
        )
        found["no_worker_s"] = report.median(no_worker(folder, gguf, 2 if quick else 5))
    try:
        found["llama_cpp_s"] = report.median(llama_cold(gguf, 2 if quick else 5))
    except (LookupError, RuntimeError, OSError) as error:
        report.console.print(f"not measured: {error}")
    found["transformers_s"] = transformers_cold(gguf)
    rows = [[name, found[name]] for name in found if isinstance(found[name], float)]
    report.table("From zero to the first token, five-token prompt", ["start", "median s"], rows)
    report.table("Warm worker, by stage", ["stage", "median s"], [[n, s] for n, s in split.items()])
    report.console.print(json.dumps({"floor: one pass over the float32 weights, s": weight_pass_s()}))
    report.save("cold", found)
    held = [
        report.verdict("warm worker at most 0.25 s", found["warm_worker_s"] <= 0.25, f"{found['warm_worker_s']:.3f} s")
    ]
    if "llama_cpp_s" in found:
        share = found["warm_worker_s"] / found["llama_cpp_s"]
        held.append(report.verdict("at most 0.4 of llama.cpp's start", share <= 0.4, f"{share:.2f}"))
    more = found["no_worker_s"] - torch_s
    held.append(report.verdict("without a worker at most import torch + 0.5 s", more <= 0.5, f"+{more:.3f} s"))
    return all(held)


def weight_pass_s() -> float:
    """Seconds to read 540 MB of float32 (SmolLM2's weights) once from memory with numpy."""
    import numpy

    array = numpy.ones(135_000_000, dtype=numpy.float32)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        array.sum()
        times.append(time.perf_counter() - begin)
    return report.median(times)


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
