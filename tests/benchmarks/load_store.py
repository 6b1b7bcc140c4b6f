"""Loading from SeaweedFS on this machine, beside boto3, obstore and Run:ai's streamer; its work is in every figure."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from model_loader.manifest import Manifest
from model_loader.objects import open_store
from model_loader.ranges.stored import StoredSource
from tests.benchmarks import report
from tests.benchmarks.load_ways import Bench, load, rate, shards, size, theirs
from tests.support.seaweed import ADMIN, BUCKET, Seaweed, boto

STORE_SHARE = 0.90


def from_store(bench: Bench, manifest: Manifest) -> tuple[dict[str, Any], list[bool]]:
    paths, nbytes = shards(manifest), size(manifest)
    os.environ.update(ADMIN.environ())
    with Seaweed(bench.folder / "seaweed") as server:
        client = boto(server.endpoint, max_pool_connections=16)
        for path in paths:
            client.upload_file(str(path), BUCKET, f"model/{path.name}")
        store = open_store(server.uri("model"))
        source = StoredSource(store, {str(path): path.name for path in paths})
        seconds: dict[str, list[float]] = {"stoker, verified": []}
        _, _, form = load(bench, manifest, sources=[source])
        for _ in range(bench.rounds):
            took, _, form = load(bench, manifest, recycle=form, sources=[source])
            seconds["stoker, verified"].append(took)
        form.unlink()
        store.close()
        buffer = memoryview(bytearray(nbytes))
        parts = _parts(paths)

        def boto_part(part: tuple[str, int, int, int]) -> None:
            name, begin, end, at = part
            body = client.get_object(Bucket=BUCKET, Key=f"model/{name}", Range=f"bytes={begin}-{end - 1}")["Body"]
            while (count := body.readinto(buffer[at:])) and at < at + count:
                at += count

        with ThreadPoolExecutor(8) as pool:
            seconds["boto3, 8 threads"] = _timed(bench, lambda: list(pool.map(boto_part, parts)))
            with contextlib.suppress(ImportError):
                import obstore
                from obstore.store import S3Store

                remote = S3Store(
                    BUCKET, endpoint=server.endpoint, region="us-east-1", access_key_id=ADMIN.access_key,
                    secret_access_key=ADMIN.secret_key, virtual_hosted_style_request=False,
                    client_options={"allow_http": True},
                )  # fmt: skip

                def obstore_part(part: tuple[str, int, int, int]) -> None:
                    name, begin, end, at = part
                    buffer[at : at + end - begin] = memoryview(
                        obstore.get_range(remote, f"model/{name}", start=begin, end=end)
                    )

                seconds["obstore, 8 threads"] = _timed(bench, lambda: list(pool.map(obstore_part, parts)))
        buffer.release()
        env = {**ADMIN.environ(), "AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1",
               "RUNAI_STREAMER_S3_ENDPOINT": server.endpoint,
               "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}  # fmt: skip
        try:
            uris = [f"s3://{BUCKET}/model/{path.name}" for path in paths]
            seconds["runai"] = theirs(bench, "runai", uris, "fresh", env)
        except (LookupError, subprocess.TimeoutExpired) as error:
            report.console.print(f"not measured: {error}")
    speeds = {way: rate(nbytes, took) for way, took in seconds.items()}
    report.table("From SeaweedFS on this machine, GB/s", ["way", "GB/s"], list(speeds.items()))
    mine = speeds["stoker, verified"]
    best = max(speed for way, speed in speeds.items() if way != "stoker, verified")
    holds = report.verdict(
        f"store: at least {STORE_SHARE:.0%} of the best", mine >= STORE_SHARE * best, f"{mine / best:.0%}"
    )
    return {"gb_s": speeds, "share": mine / best}, [holds]


def _parts(paths: Sequence[Path], part_bytes: int = 16 * 1024 * 1024) -> list[tuple[str, int, int, int]]:
    """(name, begin, end, place) of every part of every file."""
    parts: list[tuple[str, int, int, int]] = []
    at = 0
    for path in paths:
        nbytes = path.stat().st_size
        parts += [(path.name, b, min(b + part_bytes, nbytes), at + b) for b in range(0, nbytes, part_bytes)]
        at += nbytes
    return parts


def _timed(bench: Bench, work: Callable[[], object]) -> list[float]:
    work()  # memory and connections are there from then on
    seconds = []
    for _ in range(bench.rounds):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return seconds
