"""Several copies of the control plane as the chart installs them: a Deployment over PostgreSQL, in the tests' cluster.

    with copies(folder) as place:      # installed and ready
        place.call(place.leader(), "PUT", ...)

Limits: the bucket's place is taken by a volume that many nodes mount; PostgreSQL listens on a Unix socket.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from control_plane.client import Client, Endpoint
from tests.chaos.readers import Reader
from tests.kubernetes import tools
from tests.kubernetes.cluster import TestCluster
from tests.kubernetes.town import CHART
from tests.support.checkpoints import make_tiny_llama
from tests.support.postgres import PostgresServer

SPACE: Final = "copies"
RELEASE: Final = "demo"
LEASE: Final = f"{RELEASE}-control-loop"
VALUES: Final[dict[str, Any]] = {
    "image": {"repository": "stoker", "tag": "today"},
    "database": {"existingSecret": "database"},
    "objectStore": {"existingClaim": "objects"},
    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {}},
    "allowedModels": ["file://*"],
    "preStopSeconds": 1,
    "drainSeconds": 1,
    "settings": {"STOKER_LEASE_S": "3", "STOKER_SLOT_HOLD_S": "60"},
    "slots": {
        "mode": "pods",
        "pools": {"default": {"most": 6, "pool": "64Mi", "disk": "0", "perNode": 0, "graceSeconds": 1,
                              "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}}}},
    },
}  # fmt: skip
EARLIER: Final = "086b41e"
"""Commit of the version before this one: raised when there is a newer one, and with every version that breaks."""
PACKAGES: Final = ("autoscaler", "control_plane", "function_runtime", "model_loader")
_CLAIM: Final = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: objects}
spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}
"""


class Copies:
    def __init__(self, cluster: TestCluster, folder: Path, database: PostgresServer) -> None:
        self.cluster, self.folder = cluster, folder
        self._database = database
        self.key = ""

    # --- helm ---

    def helm(self, *arguments: str, **values: Any) -> None:
        """`values`: over `VALUES`; none where the release's own are to be kept."""
        given = ("--values", "-") if values else ()
        done = subprocess.run(
            [tools.helm(), "--namespace", SPACE, *arguments, *given], input=json.dumps(values), capture_output=True,
            text=True, timeout=400, check=False, env=self.cluster.environment(),
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stderr}\n{self.told()}"

    def told(self) -> str:
        """What the copies last said."""
        names = [each["metadata"]["name"] for each in self.cluster.api.list("pods", SPACE)]
        return "\n".join(f"--- {name}\n{self.cluster.kubelet.log(name, SPACE)[-2000:]}" for name in names)

    # --- who is there ---

    def pods(self, component: str) -> list[dict[str, Any]]:
        return self.cluster.api.list("pods", SPACE, f"app.kubernetes.io/component={component}")

    def gateways(self) -> list[str]:
        """Names of the copies that are ready and to stay."""
        return sorted(
            each["metadata"]["name"]
            for each in self.pods("control-plane")
            if "deletionTimestamp" not in each["metadata"] and is_ready(each)
        )

    def slots(self) -> dict[str, str]:
        """UIDs of the slots' pods that are to stay, by name."""
        living = [each["metadata"] for each in self.pods("slot") if "deletionTimestamp" not in each["metadata"]]
        return {each["name"]: each["uid"] for each in living}

    def url(self, pod: str) -> str:
        return f"http://{self.cluster.api.get('pods', pod, SPACE)['status']['podIP']}:8080"

    def leader(self) -> str:
        """By the lease in the database, which decides; empty while nobody leads."""
        sql = "SELECT gateways.url FROM leases JOIN gateways ON gateways.id = leases.holder WHERE leases.name = 'loop'"
        found = self._database.fetch(sql, "stoker")
        urls = {self.url(each["metadata"]["name"]): each["metadata"]["name"]
                for each in self.pods("control-plane") if each["status"].get("podIP")}  # fmt: skip
        return urls.get(found[0][0], "") if found else ""

    def holder(self) -> str:
        """By the Lease, for operators."""
        return str(self.cluster.api.get("leases", LEASE, SPACE)["spec"]["holderIdentity"])

    def other(self, than: str) -> str:
        return next(each for each in self.gateways() if each != than)

    def settled(self) -> str:
        """The leader, once two copies are ready and database and Lease agree on it."""

        def agreed() -> str:
            # What costs least is asked first: a look into the database is a connection.
            there = self.gateways()
            holder = self.holder() if len(there) == 2 else ""
            return holder if holder in there and self.leader() == holder else ""

        return str(self.cluster.wait(agreed, "two copies that agree on who leads", 180))

    def pid(self, pod: str) -> int:
        return self.cluster.kubelet.pids(pod, SPACE)["stoker"]

    # --- HTTP ---

    def call(self, pod: str, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url(pod) + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=180) as answer:
            return json.loads(answer.read())

    def deploy(self, at: str, name: str, model: str, **fields: Any) -> None:
        """Through one copy; returns when every copy can serve it."""
        self.call(at, "PUT", f"/api/v1/functions/{name}", {"name": name, "model": model, "engine": "stub", **fields})
        path = f"/api/v1/functions/{name}/status"

        def known(each: str) -> bool:
            with contextlib.suppress(urllib.error.HTTPError):  # not yet
                return bool(self.call(each, "GET", path)["import"]["state"] == "ready")
            return False

        self.cluster.wait(lambda: all(known(each) for each in self.gateways()), f"{name} known at every copy")

    def read(self, *pods: str, model: str, tokens: int) -> Reader:
        """A stream, begun at the first of these copies; whoever answers is asked for the rest."""
        client = Client([Endpoint(self.url(each), self.key) for each in pods], give_up_s=90)
        reader = Reader(client, stream_body(model, tokens))
        reader.start()
        return reader


def stream_body(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": tokens, "seed": 11,
            "stream_options": {"include_usage": True}}  # fmt: skip


def earlier_code(folder: Path) -> Path:
    """What control plane, agents and replicas were one version ago, as a folder for PYTHONPATH."""
    folder.mkdir()
    command = ["git", "archive", EARLIER, "--", *PACKAGES]
    packed = subprocess.run(command, cwd=CHART.parents[1], capture_output=True, timeout=180, check=False)
    if packed.returncode != 0:
        pytest.skip(f"the commit {EARLIER} is not in this checkout: {packed.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def wait_events(reader: Reader, count: int) -> None:
    with reader.moved:
        assert reader.moved.wait_for(lambda: len(reader.arrivals_s) >= count or reader.error is not None, 180)
    assert reader.error is None, reader.error


@contextlib.contextmanager
def copies(**more: Any) -> Iterator[Copies]:
    """`more`: values over `VALUES`. Ends with a look at what was denied: nothing is to be."""
    # Neither below /tmp nor /dev/shm, over which pods have volumes of their own.
    folder = Path(tempfile.mkdtemp(prefix="stoker-test-copies-", dir="/var/tmp"))
    (folder / "database").mkdir()
    make_tiny_llama(folder / "tiny")
    for path in (folder, folder / "tiny"):
        path.chmod(0o755)
    database = PostgresServer(folder / "database")
    try:
        database.create()
        database.start()
        database.run("CREATE DATABASE stoker")
        with TestCluster(folder / "cluster") as cluster:
            cluster.create_namespace(SPACE, **{"pod-security.kubernetes.io/enforce": "restricted"})
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "database"}}
            cluster.api.apply({**secret, "stringData": {"url": database.url("stoker")}}, SPACE)
            cluster.apply(_CLAIM, SPACE)
            place = Copies(cluster, folder, database)
            place.helm("install", RELEASE, str(CHART), "--wait", "--timeout", "5m", **VALUES, **more)
            kept = cluster.api.get("secrets", f"{RELEASE}-stoker-admin", SPACE)
            place.key = base64.b64decode(kept["data"]["admin-key"]).decode()
            yield place
            assert [str(each) for each in cluster.denied] == [], "what is done is what the Role allows"
    finally:
        database.stop()
        shutil.rmtree(folder, ignore_errors=True)
