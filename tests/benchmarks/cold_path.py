"""The whole cold path: no slot, nothing on disk, weights and a running request's KV from one SeaweedFS by one link.

A model is imported from the store; a request streams, then its slot is killed and everything it had is removed (pool,
disk tier, fetched files, compiled kernels), and the link becomes slow. A new agent, a new replica, the weights and the
request's next token follow by themselves: seconds to it by stage, in three ways that are told apart by one thing only.
`chosen`: the plan decides between loading and recomputing; `loaded`: it is told to read whatever is stored;
`recomputed`: the stored KV is deleted at the kill. `python -m tests.benchmarks cold_path`.
Limits: one machine, whose new agent imports torch on it; each way is a service of its own, one after the other.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from control_plane.client import Client, Endpoint
from tests.benchmarks import report
from tests.support.faulty_proxy import FaultyProxy
from tests.support.seaweed import ADMIN, BUCKET, Seaweed, boto
from tests.support.service import Service
from tests.support.smollm2 import gguf

LINKS_MB_S: Final = (100.0, 6.0)
"""Of which one makes loading the quicker way and the other recomputing."""
CONTEXTS: Final = (512, 2048)
CUT_AFTER_TOKENS: Final = 24
MAX_TOKENS: Final = 1000
"""More than are generated before the slot is killed; what is left is cancelled."""
KV_BYTES: Final = 46_080
"""Of a token of SmolLM2 in float32."""
PAUSE_US: Final = 500_000
"""A new replica's first token comes after more than this without one."""
COMMITTED_S: Final = 1.0
"""After KV is in the store, until the journal knows of it."""
WAYS: Final = ("chosen", "loaded", "recomputed")
KEPT: Final = "stoker"
WORSE_AT_MOST: Final = 1.10
GIVE_UP_S: Final = 300.0
READY_S: Final = 120.0


def leave_nothing(service: Service) -> None:
    """Removes what a new slot would not have, and kills the agent, its replica with it; in this order, so that no agent
    that follows finds anything to take over."""
    pools = service.pool_directories()
    for folder in (*pools, service.data_dir / "models" / "sources", *service.data_dir.glob("slots/*/artifacts")):
        for path in folder.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)
    # What it measured is of the slot that is gone, too.
    for folder in (*service.data_dir.glob("slots/*/chunks"), *service.data_dir.glob("slots/*/speeds")):
        shutil.rmtree(folder, ignore_errors=True)
    service.kill("agent")


def stored_kv(client: Any) -> Iterator[tuple[str, int]]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{KEPT}/kv/"):
        yield from ((found["Key"], found["Size"]) for found in page.get("Contents", ()))


def kv_bytes(client: Any) -> int:
    return sum(nbytes for _, nbytes in stored_kv(client))


def forget_kv(client: Any) -> None:
    for key, _ in list(stored_kv(client)):
        client.delete_object(Bucket=BUCKET, Key=key)


def one(service: Service, s3: Any, proxy: FaultyProxy, link_mb_s: float, context: int, way: str) -> dict[str, Any]:
    client = Client(lambda: Endpoint(service.url, service.key), give_up_s=GIVE_UP_S)
    prompt = f"{time.time_ns()} is where it begins:" + " the" * context
    body = {"model": "smol", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    path, stored_before, killed_us, next_us, last_us = "/v1/completions", kv_bytes(s3), 0, 0, 0
    stream = client.stream(path, body)
    told: dict[str, Any] = {}
    for event in stream:
        if not event.carries_tokens:
            continue
        at_us, before_us = now_us(), last_us
        last_us = at_us
        if killed_us and at_us - before_us < PAUSE_US:
            continue  # asked about each of what the old replica had said, the service would answer for seconds
        if killed_us:
            told = service.call("GET", f"/api/v1/why/{stream.request_id}")
            # What the old replica had said is delivered after its end, too.
            if told["epoch"] > 1 and stream.cursor > told["attempts"][-1]["after_seq"]:
                next_us = at_us
                break
        elif stream.cursor > CUT_AFTER_TOKENS and kv_bytes(s3) - stored_before >= context * KV_BYTES:
            time.sleep(COMMITTED_S)
            proxy.set(bytes_per_s=link_mb_s * 1e6)
            killed_us = now_us()
            leave_nothing(service)
            if way == "recomputed":
                forget_kv(s3)
    proxy.set()
    if not next_us:
        raise RuntimeError(f"the request was not resumed: {told.get('timeline')}")
    client.cancel(path, stream.request_id or "")
    told = service.call("GET", f"/api/v1/why/{stream.request_id}")
    attempt = told["attempts"][-1]
    newest = next(each for each in service.replicas(live=False) if each["replica_id"] == attempt["replica_id"])
    stages = {stage["name"]: stage for stage in newest["stages"]}
    # Handed out as soon as it could be mapped, or only when it was whole.
    weights = stages.get("arrive") or stages["prepare"]
    if weights["tier"] != "store":
        raise RuntimeError(f"the weights came from the {weights['tier']}: something was left")
    return {
        "link_mb_s": link_mb_s,
        "context": told["input_tokens"],
        "way": way,
        "next_token_s": (next_us - killed_us) / 1e6,
        "slot_s": (newest["created_us"] - killed_us) / 1e6,
        "stages_s": {name: stage["duration_us"] / 1e6 for name, stage in stages.items()},
        "weights_there_s": (weights["start_us"] + weights["duration_us"] - killed_us) / 1e6,
        "weights": weights["detail"],
        "assigned_s": (attempt["assigned_us"] - killed_us) / 1e6,
        "kv_s": (attempt["load_us"] or 0) / 1e6,
        "loaded_tokens": attempt["loaded_tokens"] or 0,
        "recomputed_tokens": attempt["recomputed_tokens"] or 0,
        "plan": attempt["detail"] or "",
        "stages": newest["stages"],
    }


def tell(row: dict[str, Any]) -> None:
    report.console.print(
        f"{row['link_mb_s']:g} MB/s, {row['context']} tokens, {row['way']}: {row['next_token_s']:.2f} s; weights at "
        f"{row['weights_there_s']:.2f} s ({row['weights']}); KV of {row['loaded_tokens']} tokens loaded, "
        f"{row['recomputed_tokens']} recomputed; {row['plan'][:120]}", markup=False, highlight=False,
    )  # fmt: skip


def now_us() -> int:
    return time.time_ns() // 1000


def measure(links: tuple[float, ...], contexts: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-bench-")))
        weed = stack.enter_context(Seaweed(folder / "weed"))
        proxy = stack.enter_context(FaultyProxy(weed.port))
        s3 = boto(weed.endpoint)
        s3.upload_file(str(gguf()), BUCKET, "model/model.gguf")
        for way in WAYS:
            env = {**ADMIN.environ(), "STOKER_STORE": weed.uri(KEPT, endpoint=proxy.url), "STOKER_KEEP_FORMS": "0"}
            env |= {"STOKER_KV_LOAD": "always"} if way == "loaded" else {}
            with contextlib.closing(Service(folder / way, env=env)) as service:
                service.start(READY_S)
                options = {"prefix_cache": False, "max_context_tokens": 4096}
                model = weed.uri("model/model.gguf", endpoint=proxy.url)
                service.deploy("smol", model, scaling={"keep_alive": 600}, engine_options=options)
                for _ in range(rounds):
                    for link in links:
                        for context in contexts:
                            results.append(one(service, s3, proxy, link, context, way))
                            tell(results[-1])
    return results


def main(quick: bool) -> bool:
    links, contexts, rounds = (LINKS_MB_S[:1], CONTEXTS[:1], 1) if quick else (LINKS_MB_S, CONTEXTS, 2)
    results = measure(links, contexts, rounds)
    cells = list(dict.fromkeys((row["link_mb_s"], row["context"] // 256) for row in results))
    names = list(dict.fromkeys(name for row in results for name in row["stages_s"]))
    rows: list[list[Any]] = []
    worse: list[str] = []
    for link, size in cells:
        seconds: dict[str, float] = {}
        for way in WAYS:
            same = [r for r in results if (r["link_mb_s"], r["context"] // 256, r["way"]) == (link, size, way)]
            seconds[way] = report.median(row["next_token_s"] for row in same)
            last = same[-1]
            rows.append([
                f"{link:g} MB/s", last["context"], way, seconds[way],
                *(report.median(row[name] for row in same) for name in ("slot_s", "weights_there_s", "kv_s")),
                last["loaded_tokens"], last["recomputed_tokens"],
                *(report.median(row["stages_s"].get(name, 0.0) for row in same) for name in names),
            ])  # fmt: skip
        if seconds["chosen"] > WORSE_AT_MOST * min(seconds["loaded"], seconds["recomputed"]):
            worse.append(f"{link:g} MB/s, {rows[-1][1]} tokens: {seconds}")
    columns = ["link", "context", "KV", "s to next token", "slot s", "weights there at s", "KV s", "loaded"]
    report.table("From no slot to the next token, everything from one store", [*columns, "recomputed", *names], rows)
    report.save("cold_path", {"results": results})
    return report.verdict("what was chosen is within 10 % of the better of the two", not worse, "; ".join(worse))


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
