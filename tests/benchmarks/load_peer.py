"""Loading from another slot's pool over loopback, beside a plain download of the same ranges from the same agent."""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
from typing import Any

from function_runtime.protocol import peer_token
from model_loader.forms.loading import RATES_NAME
from model_loader.manifest import Manifest
from model_loader.pool import pool_key
from model_loader.ranges.peer import RANGE_BYTES, THREADS, PeerAddress
from tests.benchmarks import report
from tests.benchmarks.load_ways import Bench, Loader, rate
from tests.support.replica_client import AgentProcess

PEER_SHARE = 0.80
DTYPE = "bfloat16"


def from_peer(bench: Bench, manifest: Manifest) -> tuple[dict[str, Any], list[bool]]:
    key, rates = pool_key(manifest.identity, DTYPE), bench.pool / RATES_NAME
    plain: list[float] = []
    mine: dict[str, list[float]] = {"fresh": [], "reused": []}
    with AgentProcess(bench.folder / "peer-slot") as agent:
        agent.call("POST", "/v1/pool/warm", {"manifest_path": str(manifest.path), "dtype": DTYPE})
        nbytes = (agent.pool_directory / f"{key}.prepared").stat().st_size
        address = PeerAddress(f"http://{agent.info.host}:{agent.info.port}", peer_token(agent.info.token))
        before = rates.read_bytes() if rates.exists() else None
        for number in range(bench.rounds + 1):
            took = download(agent.info.host, agent.info.port, address.token, f"/v1/pool/{key}/bytes", nbytes)
            plain += [took] if number else []
            form = None
            for memory in ("fresh", "reused"):
                # This machine's own disk would be quicker: here it is the peer that is measured.
                rates.write_text(json.dumps({"peer": 1e12}))
                loader, out = Loader(), bench.pool / f"{secrets.token_hex(8)}.prepared"
                took = loader.load(manifest, out, form, peers=(address,), pool_key=key)[0]
                if loader.origin != "peer":
                    raise RuntimeError(f"the form came from {loader.origin}")
                mine[memory] += [took] if number else []
                form = out
            if form is not None:
                form.unlink()
        rates.unlink() if before is None else rates.write_bytes(before)
    speeds = {"plain download, 4 connections": rate(nbytes, plain)}
    speeds |= {f"stoker, verified, {memory} memory": rate(nbytes, took) for memory, took in mine.items()}
    report.table("From another slot's pool, GB/s", ["way", "GB/s"], list(speeds.items()))
    share = rate(nbytes, mine["reused"]) / rate(nbytes, plain)
    holds = report.verdict(f"peer: at least {PEER_SHARE:.0%} of a plain download", share >= PEER_SHARE, f"{share:.0%}")
    return {"gb_s": speeds, "share": share}, [holds]


def download(host: str, port: int, token: str, path: str, nbytes: int) -> float:
    """Seconds; each connection reads into a buffer of its own."""
    places = iter(range(0, nbytes, RANGE_BYTES))
    lock = threading.Lock()

    def work() -> None:
        connection = http.client.HTTPConnection(host, port, timeout=60, blocksize=1 << 20)
        buffer = memoryview(bytearray(RANGE_BYTES))
        while True:
            with lock:
                at = next(places, None)
            if at is None:
                connection.close()
                return
            last = min(at + RANGE_BYTES, nbytes) - 1
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}", "Range": f"bytes={at}-{last}"})
            answer, got = connection.getresponse(), 0
            while count := answer.readinto(buffer[got:]):
                got += count
            if got != last - at + 1:
                raise RuntimeError(f"{got} bytes came of {last - at + 1}")

    workers = [threading.Thread(target=work) for _ in range(THREADS)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin
