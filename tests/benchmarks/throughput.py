"""Output tokens/s on SmolLM2 in float32 at 1, 8 and 32 requests at once, peers in the same run on the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks import load, peers, report
from tests.support.service import Service
from tests.support.smollm2 import gguf as gguf_file

AT_ONCE = (1, 8, 32)


def measure(url: str, model: str, key: str, repeats: int) -> dict[int, dict[str, float]]:
    load.at_once(url, model, 2, tokens=8, key=key, salt=9)
    found: dict[int, dict[str, float]] = {}
    for n in AT_ONCE:
        runs = [
            load.at_once(url, model, n, key=key, salt=attempt + 10 * n) for attempt in range(repeats if n < 32 else 2)
        ]
        found[n] = {name: report.median([run[name] for run in runs]) for name in runs[0]}
    return found


def transformers_static(gguf: Path) -> dict[int, dict[str, float]]:
    script = Path(__file__).with_name("transformers_batch.py")
    command = [str(peers.python() or sys.executable), str(script), str(gguf), "batch", *map(str, AT_ONCE)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return {row["at_once"]: row for row in rows}


def main(quick: bool) -> bool:
    gguf, found, missing = gguf_file(), {}, []
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        with Service(Path(folder) / "data") as service:
            service.deploy("smol", f"file://{gguf}", scaling={"keep_alive": 600, "max_concurrency": 32})
            found["stoker"] = measure(service.url, "smol", service.key, 1 if quick else 3)
        found["transformers, static batch"] = transformers_static(gguf)
        if not quick:
            found |= servers(gguf, Path(folder), missing)
    ours, theirs = found["stoker"], found["transformers, static batch"]
    columns = ["server", *[f"{n} at once, tokens/s" for n in AT_ONCE], "ratio stoker / it", "median s to first token"]
    rows = []
    for name, by_n in found.items():
        ratios = " ".join(f"{ours[n]['output_tokens_per_s'] / by_n[n]['output_tokens_per_s']:.2f}" for n in AT_ONCE)
        firsts = " ".join(f"{by_n[n].get('median_first_token_s', float('nan')):.2f}" for n in AT_ONCE)
        rows.append([name, *[f"{by_n[n]['output_tokens_per_s']:.1f}" for n in AT_ONCE], ratios, firsts])
    report.table("117-token prompts, 64-token answers, prefill included", columns, rows)
    for line in missing:
        report.console.print(f"not measured: {line}")
    holds = all(ours[n]["output_tokens_per_s"] > theirs[n]["output_tokens_per_s"] for n in AT_ONCE)
    report.save("throughput", {"servers": found, "not_measured": missing})
    return report.verdict("throughput ahead of transformers' static batch at 1, 8 and 32", holds, "see the table")


def servers(gguf: Path, folder: Path, missing: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        with peers.llama(gguf) as peer:
            peer.wait_ready()
            found["llama.cpp (computes on Q4_1)"] = measure(peer.url, "x", "none", 2)
    except (LookupError, RuntimeError, OSError) as error:
        missing.append(str(error))
    interpreter = peers.python()
    try:
        if interpreter is None:
            raise LookupError("vLLM for CPU is not installed")
        script = Path(__file__).with_name("transformers_batch.py")
        subprocess.run([str(interpreter), str(script), str(gguf), "write", str(folder / "hf")], check=True)
        with peers.vllm_server(folder / "hf") as peer:
            ready_s = peer.wait_ready()
            found["vLLM for CPU, eager"] = measure(peer.url, "peer", "none", 2)
            report.console.print(f"vLLM for CPU, eager: ready after {ready_s:.1f} s")
    except (LookupError, RuntimeError, OSError) as error:
        missing.append(str(error))
    return found


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
