"""A whole service with an object store that is away, and with one behind S3."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.seaweed import ADMIN, READER, Credentials, Seaweed, free_ports
from tests.support.service import HttpError, Service

pytestmark = pytest.mark.e2e

BODY = {"prompt": "hello", "max_tokens": 4, "seed": 1}


def service_with(folder: Path, uri: str, who: Credentials) -> Service:
    # Chunks go out at once: on a quick machine a tiny model is done before the usual half second is over.
    env = {"STOKER_STUB_TOKEN_S": "0.001", "STOKER_KV_LINGER_S": "0.01", **who.environ()}
    return Service(folder / "data", env=env, args=("--store", uri))


def checked(service: Service) -> dict[str, Any]:
    """The store as the gateway sees it after its first check."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        store: dict[str, Any] = service.call("GET", "/health/ready")["object_store"]
        if store["state"] != "checking":
            return store
        time.sleep(0.02)
    raise AssertionError("the store was not checked")


def ps(service: Service) -> str:
    command = [sys.executable, "-m", "control_plane.cli.main", "ps", "--data-dir", str(service.data_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=service.env).stdout


def test_with_the_store_away_only_those_who_need_it_are_refused(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    uri = f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}&region=us-east-1&path_style=1"
    checkpoint = f"file://{make_tiny_llama(tmp_path / 'tiny')}"
    with service_with(tmp_path, uri, ADMIN) as service:
        assert checked(service)["problem"] == "unreachable"
        service.deploy("plain", checkpoint, engine="stub")
        service.deploy("needs", checkpoint, engine="stub", kv_store="required")
        answer = service.call("POST", "/v1/completions", {"model": "plain", **BODY})
        assert answer["usage"]["completion_tokens"] == 4
        with pytest.raises(HttpError, match=r"object_store_unavailable") as refused:
            service.call("POST", "/v1/completions", {"model": "needs", **BODY})
        assert refused.value.status == 503 and "Connection refused" in refused.value.body
        told = ps(service)
        assert "object store is unusable" in told and "(unreachable)" in told
        assert "(kv_store: required): needs\n" in told and "Run without it" in told and told.rstrip().endswith("plain")
        assert "The object store cannot be used (unreachable)" in service.tail()
        assert "stoker_object_store_usable 0.0" in service.call("GET", "/metrics")


@pytest.mark.parametrize(("who", "problem"), [(ADMIN, None), (READER, "no_permission")])
def test_the_first_check_tells_whether_a_bucket_can_be_used(
    tmp_path: Path, seaweed: Seaweed, who: Credentials, problem: str | None
) -> None:
    with service_with(tmp_path, seaweed.uri(f"e2e-{os.getpid()}"), who) as service:
        assert checked(service)["problem"] == problem
        assert ("object store is unusable" in ps(service)) == (problem is not None)


def test_a_store_that_no_uri_can_name_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    service = service_with(tmp_path, "s3://bucket?regoin=x", ADMIN)
    try:
        with pytest.raises(RuntimeError, match="regoin is not known"):
            service.start()
    finally:
        service.close()


def test_a_request_survives_its_replica_with_its_kv_in_a_bucket(tmp_path: Path, seaweed: Seaweed) -> None:
    prefix = f"e2e-kill-{os.getpid()}"
    body = {"model": "tiny", "prompt": "hello " * 40, "max_tokens": 160, "ignore_eos": True, "temperature": 0}
    with service_with(tmp_path, seaweed.uri(prefix), ADMIN) as service:
        service.deploy("tiny", f"file://{make_tiny_llama(tmp_path / 'tiny')}", scaling={"keep_alive": 60})
        alone = service.call("POST", "/v1/completions", body)["choices"][0]["text"]
        text, killed = "", False
        for place, event in service.events("/v1/completions", {**body, "stream": True}):
            text += "".join(choice["text"] for choice in event.get("choices", ()))
            if place >= 100 and not killed:
                killed = service.kill("replica")
        assert killed and text == alone
        assert written(service) > 0


def written(service: Service) -> float:
    """Bytes that the function's replicas have stored, by the gateway's metrics."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        for line in service.call("GET", "/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            if name == 'stoker_object_store_bytes_total{function="tiny",kind="write"}' and float(value):
                return float(value)
        time.sleep(0.1)
    return 0.0
