"""An agent with its slot, and the smallest gateway: what tests of the runtime drive it with, without a control plane.

`AgentProcess` starts `python -m function_runtime.agent` in a directory of its own and leaves nothing behind;
`ReplicaLink` speaks the gateway's side of the protocol over a blocking socket.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import psutil

from function_runtime.agent.loaders import MODULE as LOADER_MODULE
from function_runtime.protocol import (
    AgentInfo,
    Attach,
    EngineOptions,
    Failed,
    Finished,
    FrameBuffer,
    Hello,
    Message,
    Park,
    Parked,
    Progress,
    ReplicaSpec,
    ReplicaState,
    ReplicaStatus,
    Sampling,
    Settled,
    SlotEvent,
    SlotState,
    Submit,
    TokenEvent,
    Tokens,
    Unknown,
    Welcome,
    Work,
    decode_replica,
    encode,
)
from tests.support.patience import PATIENCE_S, NotInTime

T = TypeVar("T")


def wait_for(probe: Callable[[], T], within_s: float = PATIENCE_S, what: str = "the condition") -> T:
    """Until `probe` gives something true; for what no event tells a test."""
    deadline_s = time.monotonic() + within_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise NotInTime(f"{what} did not come about within {within_s:g} s")
        time.sleep(0.005)


class AgentError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status, self.body = status, body


class AgentProcess:
    """One agent; `with` ends it and checks that no process is left."""

    def __init__(self, directory: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.pool_directory = Path(f"/dev/shm/stoker-test-{secrets.token_hex(6)}")
        self.arguments = arguments
        self.env = {**os.environ, **(env or {})}
        self.info: AgentInfo
        self.process: subprocess.Popen[bytes]
        self._events: threading.Thread | None = None

    def __enter__(self) -> AgentProcess:
        self.start()
        return self

    def start(self, within_s: float = PATIENCE_S) -> AgentProcess:
        self.directory.mkdir(parents=True, exist_ok=True)
        info_path = self.directory / "agent.json"
        info_path.unlink(missing_ok=True)
        with (self.directory / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "function_runtime.agent", "--slot-dir", str(self.directory)),
                    *("--slot-id", "slot-0", "--pool-dir", str(self.pool_directory), *self.arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.env,
            )
        wait_for(lambda: info_path.exists() or self.process.poll() is not None, within_s, "agent.json")
        if self.process.poll() is not None:
            raise AssertionError(f"the agent ended: {self.log()}")
        self.info = msgspec.json.decode(info_path.read_bytes(), type=AgentInfo)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        left = self.family()
        deadline_s = time.monotonic() + 2.0
        while left and time.monotonic() < deadline_s:
            time.sleep(0.01)
            left = self.family()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.pool_directory.exists():
            for path in sorted(self.pool_directory.rglob("*"), reverse=True):
                path.unlink() if not path.is_dir() else path.rmdir()
            self.pool_directory.rmdir()
        if left:
            raise AssertionError(f"left behind: {left}; {self.log()}")

    def log(self) -> str:
        return (self.directory / "agent.log").read_text(errors="replace")[-4000:]

    def serving(self) -> list[psutil.Process]:
        """The family without loaders, of which one waits from some seconds on."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if LOADER_MODULE not in process.cmdline():
                    found.append(process)
        return found

    def family(self) -> list[psutil.Process]:
        """Living processes that name this slot's directory, or its pool's, on their command line."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                arguments = process.cmdline()
                named = process.pid != os.getpid() and any(
                    place == argument or argument.startswith(f"{place}/")
                    for argument in arguments
                    for place in (str(self.directory), str(self.pool_directory))
                )
                if named and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # --- HTTP -----------------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: object = None, token: str | None = None) -> bytes:
        connection = http.client.HTTPConnection(self.info.host, self.info.port, timeout=60)
        try:
            headers = {"Authorization": f"Bearer {self.info.token if token is None else token}"}
            connection.request(method, path, msgspec.json.encode(body) if body is not None else None, headers)
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise AgentError(response.status, data.decode())
            return data
        finally:
            connection.close()

    def state(self) -> SlotState:
        return msgspec.json.decode(self.call("GET", "/v1/state"), type=SlotState)

    def replica(self, replica_id: str) -> ReplicaStatus:
        return msgspec.json.decode(self.call("GET", f"/v1/replicas/{replica_id}"), type=ReplicaStatus)

    def start_replica(self, spec: ReplicaSpec) -> ReplicaStatus:
        return msgspec.json.decode(self.call("POST", "/v1/replicas", spec), type=ReplicaStatus)

    def end_replica(self, replica_id: str, grace_s: float = 5.0, reason: str = "test") -> ReplicaStatus:
        path = f"/v1/replicas/{replica_id}?grace_s={grace_s}&reason={quote(reason)}"
        return msgspec.json.decode(self.call("DELETE", path), type=ReplicaStatus)

    def events(self) -> Iterator[SlotEvent]:
        """The event stream; ends with the connection."""
        connection = http.client.HTTPConnection(self.info.host, self.info.port, timeout=60)
        try:
            connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {self.info.token}"})
            response = connection.getresponse()
            while line := response.readline():
                yield msgspec.json.decode(line, type=SlotEvent)
        finally:
            connection.close()

    def until(self, replica_id: str, *states: ReplicaState, within_s: float = PATIENCE_S) -> ReplicaStatus:
        """Follows the events until the replica is in one of the states."""
        deadline_s = time.monotonic() + within_s
        last: ReplicaStatus | None = None
        for event in self.events():
            statuses = event.state.replicas if event.state else (event.replica,) if event.replica else ()
            for status in statuses:
                if status.replica_id == replica_id:
                    last = status
                    if status.state in states:
                        return status
            if time.monotonic() > deadline_s:
                break
        raise NotInTime(f"{replica_id} is not {states} but {last}; {self.log()}")

    def ready(self, spec: ReplicaSpec, within_s: float = 60.0) -> ReplicaStatus:
        self.start_replica(spec)
        final = (ReplicaState.READY, ReplicaState.FAILED, ReplicaState.ENDED)
        status = self.until(spec.replica_id, *final, within_s=within_s)
        if status.state is not ReplicaState.READY:
            raise AssertionError(f"{status.state}: {status.error}; {self.log()}")
        return status

    def connect(self, status: ReplicaStatus) -> ReplicaLink:
        return ReplicaLink(status.host, status.port, status.token)


def new_replica_id() -> str:
    return f"rep-{secrets.token_hex(6)}"


def stub_spec(env: dict[str, str] | None = None, **options: Any) -> ReplicaSpec:
    return ReplicaSpec(
        replica_id=new_replica_id(),
        function="echo",
        revision=1,
        tenant="default",
        manifest_path="",
        identity="0" * 64,
        options=EngineOptions(engine="stub", **options),
        env=env or {},
    )


def work(
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5), *, max_tokens: int = 8, seed: int = 7, epoch: int = 1, **fields: Any
) -> Work:
    sampling = {name: fields.pop(name) for name in list(fields) if name in Sampling.__struct_fields__}
    return Work(
        request_id=fields.pop("request_id", f"cmpl-{secrets.token_hex(16)}"),
        epoch=epoch,
        tenant="default",
        kv_scope=fields.pop("kv_scope", "scope-a"),
        prompt=prompt,
        sampling=Sampling(seed=seed, max_tokens=max_tokens, **sampling),
        **fields,
    )


class ReplicaLink:
    """A gateway's connection to a replica. `said` holds every message but heartbeats."""

    def __init__(self, host: str, port: int, token: str, *, hello: bool = True) -> None:
        self.socket = socket.create_connection((host, port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = FrameBuffer()
        self._waiting: list[Message] = []
        self.said: list[Message] = []
        self.progress: list[Progress] = []
        if hello:
            self.send(Hello(token=token, gateway="gw-test"))
            self.welcome = self.next(Welcome)

    def __enter__(self) -> ReplicaLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, message: Message) -> None:
        self.socket.sendall(encode(message))

    def receive(self) -> Message:
        """The next message of any kind. Raises `EOFError` when the replica is gone."""
        while not self._waiting:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._waiting += [decode_replica(body) for body in self._buffer.feed(data)]
        message = self._waiting.pop(0)
        (self.progress if isinstance(message, Progress) else self.said).append(message)  # type: ignore[arg-type]
        return message

    def next(self, kind: type[T]) -> T:
        """The next message of a kind; others before it are kept in `said` only."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message

    def submit(self, request: Work) -> Work:
        self.send(Submit(work=request))
        return request

    def attach(self, request: Work, after_seq: int) -> None:
        self.send(Attach(request_id=request.request_id, epoch=request.epoch, after_seq=after_seq))

    def park(self, request: Work, reason: str = "a test") -> None:
        self.send(Park(request_id=request.request_id, epoch=request.epoch, reason=reason))

    def settle(self, request: Work) -> None:
        self.send(Settled(request_id=request.request_id, epoch=request.epoch))

    def outcome(self, request: Work) -> Any:
        """Reads until the request's `Finished`, `Failed`, `Parked` or `Unknown`."""
        while True:
            message = self.receive()
            if isinstance(message, Finished | Failed | Parked | Unknown) and message.request_id == request.request_id:
                return message

    def tokens(self, request: Work) -> list[tuple[int, TokenEvent]]:
        """(seq, event) of everything said about a request so far, in the order it came."""
        found = []
        for message in self.said:
            if isinstance(message, Tokens) and message.request_id == request.request_id:
                found += [(message.first_seq + index, event) for index, event in enumerate(message.events)]
        return found


def pretty(status: ReplicaStatus) -> str:
    return json.dumps(msgspec.to_builtins(status), indent=1)
