"""The warm pool from outside: prepared ahead, forecast, let go."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from function_runtime.protocol import EngineOptions, ReplicaState, peer_token
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from tests.support.checkpoints import make_tiny_llama
from tests.support.replica_client import AgentError, AgentProcess, stub_spec


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return import_model(f"file://{make_tiny_llama(tmp_path / 'tiny')}", tmp_path / "models")


def warm(agent: AgentProcess, manifest: Manifest) -> Any:
    body = {"manifest_path": str(manifest.path), "dtype": "float32"}
    return json.loads(agent.call("POST", "/v1/pool/warm", body))


def test_a_form_is_made_ahead_forecast_and_let_go(agent: AgentProcess, manifest: Manifest) -> None:
    made = warm(agent, manifest)
    assert made["tier"] == "disk" and warm(agent, manifest)["tier"] == "pool"
    (entry,) = agent.state().pool
    assert (entry.identity, entry.dtype, entry.nbytes) == (manifest.identity, "float32", made["nbytes"])
    assert entry.reload_s > 0 and entry.chance is None
    assert re.fullmatch(r"made: [0-9]+ bytes read, [0-9]+ MB/s; [0-9]+ chunks verified", entry.load)
    agent.call("POST", "/v1/pool/forecast", {"chances": {manifest.identity: 0.25}, "holds_s": 60})
    assert agent.state().pool[0].chance == 0.25
    assert json.loads(agent.call("DELETE", f"/v1/pool/{entry.key}"))["nbytes"] == made["nbytes"]
    assert agent.state().pool == () and not Path(made["path"]).exists()


def test_a_form_in_use_stays_until_its_holder_is_gone_whichever_way(agent: AgentProcess, manifest: Manifest) -> None:
    spec = msgspec.structs.replace(
        stub_spec(),
        manifest_path=str(manifest.path),
        identity=manifest.identity,
        options=EngineOptions(kv_bytes=1 << 22, max_requests=2, threads=1),
    )
    status = agent.ready(spec)
    (entry,) = agent.state().pool
    with pytest.raises(AgentError, match=f"used by {spec.replica_id}"):
        agent.call("DELETE", f"/v1/pool/{entry.key}")
    os.kill(status.pid, signal.SIGKILL)
    agent.until(spec.replica_id, ReplicaState.FAILED)
    assert agent.state().pool[0].holders == ()
    agent.call("DELETE", f"/v1/pool/{entry.key}")


@pytest.mark.parametrize(
    "method, path, body, said",
    [
        ("DELETE", "/v1/pool/0123", None, "holds nothing"),
        ("POST", "/v1/pool/forecast", {"chances": {"x": 2.0}, "holds_s": 60}, "from 0 to 1"),
        ("POST", "/v1/pool/forecast", {"chances": {"x": 0.5}, "holds_s": -1}, "holds_s"),
        ("POST", "/v1/pool/forecast", {"chances": {"x": "likely"}, "holds_s": 1}, "chances"),
        ("POST", "/v1/pool/warm", {"manifest_path": "/nowhere", "dtype": "float32"}, "/nowhere"),
    ],
)
def test_bad_wishes_are_refused_with_what_is_wrong(
    agent: AgentProcess, method: str, path: str, body: object, said: str
) -> None:
    with pytest.raises(AgentError, match=said) as refused:
        agent.call(method, path, body)
    assert refused.value.status in (400, 422)


# --- read by another slot ---------------------------------------------------------------------------------------


def read(agent: AgentProcess, path: str, token: str, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://{agent.info.host}:{agent.info.port}{path}", headers={"Authorization": f"Bearer {token}", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_another_slot_reads_a_form_by_ranges_and_can_do_nothing_else(agent: AgentProcess, manifest: Manifest) -> None:
    made = warm(agent, manifest)
    content = Path(made["path"]).read_bytes()
    (entry,) = agent.state().pool
    token = peer_token(agent.info.token)
    status, told = read(agent, f"/v1/pool/{entry.key}", token)
    assert status == 200 and json.loads(told)["nbytes"] == len(content)
    assert read(agent, f"/v1/pool/{entry.key}/bytes", token) == (200, content)
    assert read(agent, f"/v1/pool/{entry.key}/bytes", token, Range="bytes=100-299") == (206, content[100:300])
    assert read(agent, f"/v1/pool/{entry.key}/bytes", token, Range=f"bytes={len(content)}-")[0] == 416
    assert read(agent, "/v1/pool/0123/bytes", token)[0] == 422
    for path in ("/v1/state", "/v1/events", "/v1/replicas/x"):
        assert read(agent, path, token)[0] == 401
    for method, path in (("DELETE", f"/v1/pool/{entry.key}"), ("POST", "/v1/pool/warm"), ("POST", "/v1/shutdown")):
        with pytest.raises(AgentError) as refused:
            agent.call(method, path, {} if method == "POST" else None, token=token)
        assert refused.value.status == 401
    for wrong in ("", token[:-1], agent.info.token[:-1]):
        assert read(agent, f"/v1/pool/{entry.key}/bytes", wrong)[0] == 401
    assert agent.state().pool[0].holders == ()
