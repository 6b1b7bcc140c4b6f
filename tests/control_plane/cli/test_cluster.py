"""`stoker --context`: kubectl finds the service and forwards to it; what it cannot find is told with what to do."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.cluster import Cluster
from control_plane.cli.failure import CommandError
from control_plane.resumption import Unreachable
from tests.control_plane.cli.conftest import run
from tests.support.service import Service

_KUBECTL = """#!{python}
import json, os, sys, time
told = json.load(open({told!r}))
arguments = sys.argv[1:]
with open({calls!r}, "a") as file:
    file.write(json.dumps(arguments) + "\\n")
if "port-forward" in arguments:
    if told["port"] is None:
        sys.exit("error: unable to forward port because pod is not running. Current status=Pending")
    print(f"Forwarding from 127.0.0.1:{{told['port']}} -> 8080", flush=True)
    time.sleep(600)
elif "services" in arguments:
    print(json.dumps({{"items": told["services"]}}))
elif told["secret"] is None:
    sys.exit('Error from server (Forbidden): secrets is forbidden')
else:
    print(json.dumps({{"data": told["secret"]}}))
"""


def service_object(release: str = "demo", **annotations: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"{release}-stoker",
            "namespace": "ml",
            "labels": {"app.kubernetes.io/instance": release},
            "annotations": {"stoker.dev/admin-key-secret": f"{release}-stoker-admin"},
        },
        "spec": {"ports": [{"port": 80}]},
    }


Tell = Callable[..., None]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """A kubectl that answers as it is told; its calls are in `calls`."""
    told, calls, binary = tmp_path / "told.json", tmp_path / "calls", tmp_path / "bin" / "kubectl"
    binary.parent.mkdir()
    binary.write_text(_KUBECTL.format(python=sys.executable, told=str(told), calls=str(calls)))
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    for name in ("STOKER_URL", "STOKER_API_KEY", "STOKER_DATA_DIR", "STOKER_CONTEXT"):
        # Set, then deleted: whatever the command line sets is undone with the test.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    for name in ("STOKER_CONTEXT_NAMESPACE", "STOKER_CONTEXT_RELEASE"):
        monkeypatch.setenv(name, "")

    def tell(port: int | None = 1, services: Any = None, secret: Any = None) -> None:
        told.write_text(json.dumps({"port": port, "services": services or [], "secret": secret}))

    tell(services=[service_object()], secret={"admin-key": base64.b64encode(b"key\n").decode()})
    return tell


def calls(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def test_a_command_talks_to_the_service_of_a_cluster(kubectl: Tell, service: Service, tmp_path: Path) -> None:
    key = base64.b64encode((service.data_dir / "admin.key").read_bytes()).decode()
    kubectl(port=service.port, services=[service_object()], secret={"admin-key": key})
    done = run("--context", "prod", "-n", "ml", "ls", "--json")
    assert done.status == 0, done.err
    assert done.json["object"] == "list"
    found, secret, forward = calls(tmp_path)
    assert found[:5] == ["--context", "prod", "--namespace", "ml", "get"]
    assert secret[-3:] == ["demo-stoker-admin", "-o", "json"]
    assert forward[4:] == ["port-forward", "service/demo-stoker", ":80", "--address", "127.0.0.1"]


def test_a_forward_that_ended_is_made_again(kubectl: Tell, tmp_path: Path) -> None:
    cluster = Cluster("prod")
    assert cluster.endpoint().url == "http://127.0.0.1:1"
    assert cluster.endpoint().api_key == "key"
    kubectl(port=2)
    forward = cluster._forward
    assert forward is not None
    os.kill(forward.pid, signal.SIGKILL)
    forward.wait(10)
    assert cluster.endpoint().url == "http://127.0.0.1:2"
    assert sum("port-forward" in each for each in calls(tmp_path)) == 2
    cluster.close()


def test_a_key_of_the_users_own_needs_no_secret(kubectl: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl(services=[service_object()], secret=None)
    with pytest.raises(CommandError, match="secrets is forbidden"):
        Cluster("prod").endpoint()
    monkeypatch.setenv("STOKER_API_KEY", "mine")
    cluster = Cluster("prod")
    assert cluster.endpoint().api_key == "mine"
    cluster.close()


def test_none_and_several_are_told_with_the_option_that_helps(kubectl: Tell) -> None:
    kubectl(services=[{"metadata": {"name": "other"}}])
    with pytest.raises(CommandError, match="there is no Stoker") as none:
        Cluster("prod").endpoint()
    assert "--namespace" in none.value.hint
    kubectl(services=[service_object("a"), service_object("b")])
    with pytest.raises(CommandError, match="several in context prod, namespace ml: a, b") as several:
        Cluster("prod", "ml").endpoint()
    assert "--release" in several.value.hint


def test_a_pod_that_does_not_run_is_unreachable_in_kubectls_words(kubectl: Tell) -> None:
    kubectl(port=None, services=[service_object()], secret={"admin-key": ""})
    with pytest.raises(Unreachable, match="pod is not running"):
        Cluster("prod").endpoint()
