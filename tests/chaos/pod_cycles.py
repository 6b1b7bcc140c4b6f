"""0 -> 1 -> 0 over slots that are pods, under load and faults; used by the benchmark.

A cycle: two tenants at zero are called by several readers at once; while they read, faults drawn from one seed hit the
cluster (pods deleted, evicted, killed for memory; watches cut, versions expired; calls of the API refused, lost, cut)
and the control plane itself, whose successor takes the lead; each answer is compared with the undisturbed one; then
nothing may be left, neither a replica nor a pod. Limits: the stub engine, since what is tried is who runs where.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from control_plane.client import Client, Endpoint
from tests.chaos.books import Books
from tests.chaos.readers import Reader, Usual
from tests.kubernetes.client import suppress_api_error
from tests.kubernetes.kubelet.worker import PodWorker
from tests.kubernetes.town import POOL, Town, town
from tests.support.checkpoints import make_tiny_llama

TOKENS: Final = 80
TOKEN_S: Final = 0.015
"""An answer takes longer than a fault needs to be brought about, on a busy machine, too."""
READERS: Final = 2
"""Of each tenant."""
TENANTS: Final = {"default": "mine", "other": "theirs"}
WITHIN_S: Final = 240.0
LOOK_S: Final = 0.05


@dataclass
class Found:
    """What came of a run; every list is to be empty."""

    cycles: int = 0
    slots: int = 0
    replicas: int = 0
    answers: int = 0
    resumes: int = 0
    """By readers, whose control plane was gone."""
    moved: int = 0
    """Answers that more than one replica worked on."""
    faults: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    lost: list[str] = field(default_factory=list)
    """Answers that never came, or not as the undisturbed run gave them."""
    orphans: list[str] = field(default_factory=list)
    """Pods, replicas and processes that nobody needs any more."""
    doubled: list[str] = field(default_factory=list)
    """Replicas that ran in two slots."""
    shared: list[str] = field(default_factory=list)
    """Slots that ran the code of two tenants."""
    books: list[str] = field(default_factory=list)
    """What does not add up in journal and ledger."""
    zero_s: list[float] = field(default_factory=list)
    """From the last answer to no pod."""

    @property
    def problems(self) -> list[str]:
        return [*self.lost, *self.orphans, *self.doubled, *self.shared, *self.books]


class Tenancy:
    """Who ran where, by what every agent left in its slot: a log for each replica it started. Nothing is missed, as a
    look now and then would, and a replica that its control plane has forgotten counts, too."""

    def __init__(self, place: Town) -> None:
        self._place = place
        self._slots: dict[str, set[str]] = {}
        place.cluster.kubelet.on_end = self._pod_ended

    def _pod_ended(self, worker: PodWorker) -> None:
        if "slot" in worker.volumes.places:
            logs = (worker.volumes.places["slot"][0] / "replicas").glob("*.log")
            self._slots[f"{worker.name}/{worker.uid}"] = {path.stem for path in logs}

    @property
    def replicas(self) -> int:
        return sum(map(len, self._slots.values()))

    def judge(self, found: Found) -> None:
        text = "".join(path.read_text() for path in self._place.service.data_dir.glob("logs/control.log*"))
        functions = dict(re.findall(r"event=replica state=\S+ replica=(\S+) function=(\S+)", text))
        slots: defaultdict[str, list[str]] = defaultdict(list)
        for slot, replicas in self._slots.items():
            for each in replicas:
                slots[each].append(slot)
            found.orphans += [f"{each} in {slot} is nobody's" for each in replicas - functions.keys()]
            codes = {functions[each] for each in replicas & functions.keys()}
            if len(codes) > 1:
                found.shared.append(f"{slot} ran {sorted(codes)}")
        found.doubled += [f"{name} ran in {sorted(at)}" for name, at in slots.items() if len(at) > 1]
        found.replicas, found.slots = self.replicas, len(self._slots)


class Cycles:
    """A service under fire. A context manager."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.choose = random.Random(seed)
        self.found = Found()
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._usual: dict[str, Usual] = {}

    def __enter__(self) -> Cycles:
        checkpoint = f"file://{make_tiny_llama(self._folder / 'tiny')}"
        # Of a pod that is told to go, some answers end within the grace, and others go on elsewhere.
        pool = {**POOL, "most": 6, "graceSeconds": 0.3}
        # What an API server that misbehaves costs is waited for by the next cycle, and not by an operator's patience.
        env = {"STOKER_TROUBLE_S": "30", "STOKER_SLOT_HOLD_S": "0.1"}
        self.place = self._stack.enter_context(town(self._folder, pool, env))
        self.place.cluster.kubelet.image_environment["STOKER_STUB_TOKEN_S"] = str(TOKEN_S)
        self._tenancy = Tenancy(self.place)
        service = self.place.service
        other = service.call("POST", "/api/v1/keys", {"name": "other", "tenant": "other", "role": "admin"})["key"]
        self._keys = {"default": service.key, "other": other}
        for tenant, function in TENANTS.items():
            spec = {"name": function, "model": checkpoint, "engine": "stub", "pod": {"trustDomain": tenant}}
            # What is learned of the rhythm of the cycles would keep a replica for the next one.
            spec["scaling"] = {"keep_alive": 0, "mode": "advisory"}
            with service.open("PUT", f"/api/v1/functions/{function}", spec, authorization=self._bearer(tenant)):
                pass
            self._wait_imported(tenant, function)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _bearer(self, tenant: str) -> str:
        return f"Bearer {self._keys[tenant]}"

    def _wait_imported(self, tenant: str, function: str) -> None:
        path, by = f"/api/v1/functions/{function}/status", self._bearer(tenant)

        def imported() -> bool:
            state = self.place.service.call("GET", path, authorization=by)["import"]["state"]
            assert state != "failed"
            return bool(state == "ready")

        self.place.cluster.wait(imported, f"{function} imported")

    def _read(self, tenant: str) -> Reader:
        client = Client(lambda: Endpoint(self.place.service.url, self._keys[tenant]), give_up_s=WITHIN_S)
        body = {"model": TENANTS[tenant], "prompt": "hello", "max_tokens": TOKENS, "seed": 11}
        reader = Reader(client, body | {"stream_options": {"include_usage": True}})
        reader.start()
        return reader

    # --- a cycle ------------------------------------------------------------------------------------------------

    def run(self, cycles: int, on_cycle: Callable[[str], None] = lambda _: None) -> Found:
        found = self.found
        for tenant in TENANTS:
            reader = self._read(tenant)
            reader.join(WITHIN_S)
            if reader.answer is None:
                raise RuntimeError(f"the undisturbed run failed: {reader.error}; {self.place.service.tail()}")
            self._usual[tenant] = Usual(reader.answer, len(reader.arrivals_s), 0.0)
        self._wait_zero("the undisturbed runs")
        # A server that was given keeps to itself when it fails.
        names = [name for name in FAULTS if not (self.place.cluster.is_given and name in OF_THE_SERVER)]
        for number in range(cycles):
            # Each fault comes first in one cycle of the first few; what else happens is drawn.
            drawn = [names[number % len(names)], *self.choose.sample(names, self.choose.randrange(3))]
            before = len(found.problems)
            self._cycle(number, drawn)
            found.cycles += 1
            on_cycle(f"{number}: {', '.join(drawn)}" + "".join(f"\n    {each}" for each in found.problems[before:]))
        self._end()
        return found

    def _cycle(self, number: int, drawn: list[str]) -> None:
        readers = [(tenant, self._read(tenant)) for tenant in TENANTS for _ in range(READERS)]
        for name in drawn:
            self._wait_moment(readers)
            FAULTS[name](self)
            self.found.faults[name] += 1
        for tenant, reader in readers:
            reader.join(WITHIN_S)
            who = f"cycle {number}, {TENANTS[tenant]}, {reader.request_id or 'no id'}"
            if reader.answer is None:
                self.found.lost.append(f"{who}: {reader.error or 'still reading'}")
            elif reader.answer != self._usual[tenant].answer or reader.seqs != sorted(set(reader.seqs)):
                self.found.lost.append(f"{who}: another answer, {reader.answer.tokens} tokens, events {reader.seqs}")
            self.found.answers += 1
            self.found.resumes += reader.resumes
        if not self.place.cluster.is_given:
            self.place.cluster.faults.clear()
        begin_s = time.monotonic()
        self._wait_zero(f"cycle {number}")
        self.found.zero_s.append(time.monotonic() - begin_s)

    def _wait_moment(self, readers: list[tuple[str, Reader]]) -> None:
        """Some faults come while slots do, and some in the middle of an answer, however quick the machine is."""
        share, (tenant, reader) = self.choose.uniform(-0.5, 0.9), self.choose.choice(readers)
        if share < 0:
            time.sleep(-share)
        else:
            reader.wait_share(share, self._usual[tenant], WITHIN_S)

    def _wait_zero(self, what: str) -> None:
        try:
            self.place.cluster.wait(lambda: self.place.pods() == [], "no pod", 150, LOOK_S)
        except AssertionError:
            left = [(each["metadata"]["name"], each["status"].get("phase")) for each in self.place.pods()]
            self.found.orphans.append(f"{what}: pods {left} are left; {self.place.service.replicas()}")
        running = self.place.cluster.kubelet.running_pods
        if running and not self.place.pods():
            self.found.orphans.append(f"{what}: {running} still run")

    def _end(self) -> None:
        service, found = self.place.service, self.found
        service.wait_zero()
        self.place.cluster.kubelet.wait_idle()
        self._tenancy.judge(found)
        books = Books(service.data_dir / "stoker.db")
        with contextlib.suppress(AssertionError):
            unclosed = "SELECT 1 FROM replica_accounts WHERE closed_us IS NULL"
            self.place.cluster.wait(lambda: not books.rows(unclosed), "closed accounts", 120)
        found.moved = sum(count > 1 for count in Counter(turn.request_id for turn in books.turns()).values())
        found.books += [*books.log_faults(), *books.ledger_faults()]
        found.books += [f"{name} is {each.state}" for name, each in books.ends().items() if each.state != "done"]
        agents = [process.pid for process in psutil.process_iter() if _is_agent(process, self._folder)]
        found.orphans += [f"the agent {pid} still runs" for pid in agents]

    # --- faults -------------------------------------------------------------------------------------------------

    def one_pod(self) -> str | None:
        pods = [each for each in self.place.pods() if "deletionTimestamp" not in each["metadata"]]
        return str(self.choose.choice(pods)["metadata"]["name"]) if pods else None

    def new_control_plane(self) -> None:
        self.place.service.kill("gateway")
        self.place.service.start(ready_within_s=180.0)


def _is_agent(process: psutil.Process, folder: Path) -> bool:
    """A process of a pod of this folder: it sees its volumes, or has them open."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.name() in ("stoker-agent", "stoker-stub"):
            mounts = Path(f"/proc/{process.pid}/mountinfo").read_text()
            return str(folder) in mounts or any(str(folder) in each.path for each in process.open_files())
    return False


@contextlib.contextmanager
def _gone_already() -> Iterator[None]:
    """The pod ended by itself in between."""
    with suppress_api_error(404, 409), contextlib.suppress(KeyError, AssertionError):
        yield


def _with_pod(act: Callable[[Town, str], Any]) -> Callable[[Cycles], None]:
    def fault(cycles: Cycles) -> None:
        pod = cycles.one_pod()
        if pod is not None:
            with _gone_already():
                act(cycles.place, pod)

    return fault


def _with_calls(verb: str, resource: str, outcome: int | str, times: int, **more: Any) -> Callable[[Cycles], None]:
    def fault(cycles: Cycles) -> None:
        cycles.place.cluster.fail(verb, resource, outcome, times, user="rel-stoker", **more)

    return fault


FAULTS: Final[dict[str, Callable[[Cycles], None]]] = {
    "a pod deleted": _with_pod(lambda place, pod: place.cluster.api.delete("pods", pod, "default")),
    "a pod evicted": _with_pod(lambda place, pod: place.cluster.api.evict(pod)),
    "a pod killed for memory": _with_pod(lambda place, pod: place.cluster.kubelet.oom_kill(pod)),
    "a pod put out by its node": _with_pod(lambda place, pod: place.cluster.kubelet.evict(pod)),
    "watches cut": lambda cycles: (cycles.place.cluster.cut_watches(), None)[1],
    "versions expired": lambda cycles: (cycles.place.cluster.expire_versions(), None)[1],
    "creates refused": _with_calls("create", "pods", 429, 2, retry_after_s=1),
    "creates that fail": _with_calls("create", "pods", 500, 2),
    "creates whose answer is lost": _with_calls("create", "pods", "reset", 1, lost=True),
    "deletes that fail": _with_calls("delete", "pods", 500, 2),
    "patches that conflict": _with_calls("patch", "*", 409, 3),
    "calls cut": _with_calls("*", "*", "reset", 4),
    "another control plane": Cycles.new_control_plane,
}

OF_THE_SERVER: Final = frozenset(name for name in FAULTS if name.split()[0] in ("watches", "versions", "creates",
                                  "deletes", "patches", "calls"))  # fmt: skip

__all__ = ["FAULTS", "Cycles", "Found"]
