"""What the control plane costs: start, memory, and latency added to a stub engine at 50 requests a second.

The same open-loop load goes three ways to the same stub replica: through the gateway (keys, queue, journal, ledger),
through a bare HTTP relay that does nothing but pass tokens on, and straight over the replica's own protocol. What the
gateway adds is its difference to the relay, at the median and the 95th percentile; the difference to no HTTP at all is
printed beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from function_runtime import protocol
from tests.benchmarks import report
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

RATE, TOKENS = 50.0, 16


async def open_loop(seconds: float, one: Callable[[int], Awaitable[float]]) -> list[float]:
    """Sends at a fixed rate however slow the answers; each latency counts from when it should have been sent."""
    begin, tasks = time.perf_counter(), []

    async def timed(number: int, due_s: float) -> float:
        await one(number)
        return time.perf_counter() - due_s

    for number in range(int(seconds * RATE)):
        due_s = begin + number / RATE
        await asyncio.sleep(max(due_s - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(timed(number, due_s)))
    return list(await asyncio.gather(*tasks))


async def over_http(port: int, key: str, seconds: float) -> list[float]:
    """Over kept connections, with as little of a client as the straight load has: the server is what is measured."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one(number: int) -> float:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        body = {"model": "stub", "prompt": f"request number {number}", "max_tokens": TOKENS, "stream": True}
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            part = await reader.read(1 << 16)
            if not part:
                raise RuntimeError(f"the gateway closed the connection after {data[-300:]!r}")
            data += part
        if not data.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in data:
            raise RuntimeError(f"not a whole stream: {data[:300]!r}")
        idle.append((reader, writer))
        return 0.0

    try:
        return await open_loop(seconds, one)
    finally:
        for _, writer in idle:
            writer.close()


async def straight(port: int, token: str, seconds: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(protocol.encode(protocol.Hello(token=token, gateway="gw-bench")))
    waiting: dict[str, asyncio.Future[None]] = {}

    async def read() -> None:
        frames = protocol.FrameBuffer()
        while data := await reader.read(1 << 16):
            for body in frames.feed(data):
                message = protocol.decode_replica(body)
                if isinstance(message, protocol.Finished):
                    waiting.pop(message.request_id).set_result(None)
                    writer.write(protocol.encode(protocol.Settled(message.request_id, message.epoch)))

    task = asyncio.create_task(read())

    async def one(number: int) -> float:
        request_id = f"cmpl-bench-{number}"
        waiting[request_id] = asyncio.get_running_loop().create_future()
        sampling = protocol.Sampling(seed=number, max_tokens=TOKENS)
        work = protocol.Work(request_id, 1, "default", "", tuple(range(8)), sampling, write_kv=False)
        writer.write(protocol.encode(protocol.Submit(work)))
        await waiting[request_id]
        return 0.0

    try:
        return await open_loop(seconds, one)
    finally:
        task.cancel()
        writer.close()


@contextmanager
def bare_relay(port: int, token: str) -> Iterator[int]:
    """The port of a relay to the same replica."""
    script = Path(__file__).with_name("bare_relay.py")
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(port), token, str(TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as relay:
        try:
            if relay.stdout is None or not (line := relay.stdout.readline()):
                raise RuntimeError("the bare relay did not start")
            yield int(line)
        finally:
            relay.kill()


def without_torch() -> bool:
    code = "import control_plane.app, sys; print('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def start_times(folder: Path, tries: int) -> list[float]:
    seconds = []
    for attempt in range(tries):
        service = Service(folder / f"start-{attempt}")
        seconds.append(service.start())
        service.close()
    return seconds


def main(quick: bool) -> bool:
    rounds, seconds = (3, 2.5) if quick else (8, 5.0)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        folder = Path(name)
        ready_s = report.median(start_times(folder, 3 if quick else 5))
        checkpoint = make_tiny_llama(folder / "tiny")
        env = {"STOKER_STUB_TOKEN_S": "0.002"}
        with Service(folder / "data", env=env) as service:
            service.deploy(
                "stub",
                f"file://{checkpoint}",
                engine="stub",
                scaling={"min_replicas": 1, "keep_alive": 600, "target_concurrency": 64, "max_concurrency": 64},
            )
            service.call("POST", "/v1/completions", {"model": "stub", "prompt": "wake", "max_tokens": 1})
            plane = psutil.Process(service.process.pid if service.process else 0)
            replica = service.replicas()[0]
            token = stub_token(service, replica["replica_id"])
            via: list[float] = []
            direct: list[float] = []
            relayed: list[float] = []
            cpu_s = wall_s = 0.0
            with bare_relay(replica["port"], token) as relay_port:
                asyncio.run(over_http(service.port, service.key, 2.0))
                asyncio.run(over_http(relay_port, "none", 2.0))
                # In turns, so that a machine whose speed drifts slows all three alike.
                for _ in range(rounds):
                    before, begin = plane.cpu_times(), time.perf_counter()
                    via += asyncio.run(over_http(service.port, service.key, seconds))
                    after, wall_s = plane.cpu_times(), wall_s + time.perf_counter() - begin
                    cpu_s += (after.user - before.user) + (after.system - before.system)
                    relayed += asyncio.run(over_http(relay_port, "none", seconds))
                    direct += asyncio.run(straight(replica["port"], token, seconds))
            rss_mib = plane.memory_info().rss / 2**20
    results: dict[str, Any] = {
        "ready_s": ready_s,
        "resident_mib": rss_mib,
        "imports_torch": not without_torch(),
        "gateway_median_ms": report.median(via) * 1e3,
        "gateway_p95_ms": report.percentile(via, 0.95) * 1e3,
        "relay_median_ms": report.median(relayed) * 1e3,
        "relay_p95_ms": report.percentile(relayed, 0.95) * 1e3,
        "no_http_median_ms": report.median(direct) * 1e3,
        "no_http_p95_ms": report.percentile(direct, 0.95) * 1e3,
        "cpu_ms_per_request": cpu_s / len(via) * 1e3,
        "cpu_us_per_token": cpu_s / (len(via) * TOKENS) * 1e6,
        "cpu_share": cpu_s / wall_s,
        "requests": len(via),
    }
    results["added_median_ms"] = results["gateway_median_ms"] - results["relay_median_ms"]
    results["added_p95_ms"] = results["gateway_p95_ms"] - results["relay_p95_ms"]
    results["added_to_no_http_median_ms"] = results["gateway_median_ms"] - results["no_http_median_ms"]
    report.table(
        "Control plane, stub engine at 50 requests/s", ["figure", "value"], [[k, v] for k, v in results.items()]
    )
    report.save("control", results)
    return all(
        [
            report.verdict("no torch in the control plane", not results["imports_torch"], ""),
            report.verdict("ready within 1 s", ready_s <= 1.0, f"{ready_s:.2f} s"),
            report.verdict("under 120 MiB resident", rss_mib < 120, f"{rss_mib:.0f} MiB"),
            report.verdict(
                "adds at most 3 ms (median)", results["added_median_ms"] <= 3, f"{results['added_median_ms']:.2f}"
            ),
            report.verdict("adds at most 10 ms (p95)", results["added_p95_ms"] <= 10, f"{results['added_p95_ms']:.2f}"),
        ]
    )


def stub_token(service: Service, replica_id: str) -> str:
    """The replica's own token, from the agent: the control plane's API does not show it."""
    info = json.loads((service.data_dir / "slots" / "0" / "agent.json").read_text())
    import urllib.request

    request = urllib.request.Request(
        f"http://{info['host']}:{info['port']}/v1/state", headers={"authorization": f"Bearer {info['token']}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        state = json.load(answer)
    return str(next(r["token"] for r in state["replicas"] if r["replica_id"] == replica_id))


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
