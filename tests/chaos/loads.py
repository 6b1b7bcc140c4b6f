"""Random faults over imports, loads and evictions of two slots that share a models directory.

A step meddles with something (kills, bad bytes, short or missing files, a full disk, peers that die, peers and a store
behind a bad network, two at once), puts it right again and asks for the form once more; then what must always hold is
looked at. The seed gives the steps again. Limits: one step at a time; what happens at once is inside a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from function_runtime.protocol import peer_token
from model_loader.forms.head import form_name
from model_loader.forms.kept import StoredForms
from model_loader.forms.loading import NAME_AT_WORK, RATES_NAME, keep_form
from model_loader.forms.order import FormOrder
from model_loader.importer import import_model
from model_loader.llama_layout import recipe_name
from model_loader.manifest import Manifest
from model_loader.objects.location import TOKEN_VARIABLE
from model_loader.pool import pool_key
from model_loader.prepared import PreparedFile
from model_loader.recipe import prepare
from tests.support.checkpoints import make_tiny_llama
from tests.support.faulty_proxy import FaultyProxy
from tests.support.replica_client import AgentError, AgentProcess, wait_for
from tests.support.served_store import TOKEN, ServedStore

DTYPE: Final = "float32"
DISK_BYTES: Final = 64 << 20
FULL_BYTES: Final = 200_000
SHAPE: Final = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2}
SETTLE_S: Final = 30.0
PATIENCE_S: Final = 600.0  # at a low priority beside much else an import took more than two minutes


@dataclass
class Found:
    """What came of a run."""

    steps: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Forms whose bytes are not what they must be."""
    stuck: list[str] = field(default_factory=list)
    """Leases nobody has any more, entries that never settle."""
    leaked: list[str] = field(default_factory=list)
    """Files and processes that nobody owns."""
    unnamed: list[str] = field(default_factory=list)
    """Failures that do not say what failed."""
    failures: int = 0
    """Loads that were refused while something was wrong."""

    @property
    def problems(self) -> list[str]:
        return [*self.wrong, *self.stuck, *self.leaked, *self.unnamed]


class Loads:
    """Two agents, two checkpoints. A context manager."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.choose = folder, random.Random(seed)
        self.found = Found()
        self._stack = contextlib.ExitStack()
        sources = [make_tiny_llama(folder / f"tiny-{n}", seed=n, **SHAPE) for n in (1, 2)]
        self.models = folder / "models"
        self.manifests = [import_model(f"file://{source}", self.models) for source in sources]
        self.right = [self._right(manifest, number) for number, manifest in enumerate(self.manifests)]
        self.agents: list[AgentProcess] = []

    def _right(self, manifest: Manifest, number: int) -> dict[str, bytes]:
        path = self.folder / f"right-{number}.prepared"
        prepare(manifest, DTYPE, path)
        return contents(path)

    def __enter__(self) -> Loads:
        self.stored = self._stack.enter_context(ServedStore(self.folder / "objects"))
        self.network = self._stack.enter_context(FaultyProxy(self.stored.port))
        uri = f"http+stoker://127.0.0.1:{self.network.port}"
        options = ("--disk-bytes", str(DISK_BYTES), "--orphan-s", "3600", "--form-store", uri)
        for number in (0, 1):
            directory = self.folder / f"slot-{number}"
            agent = AgentProcess(directory, *options, env={TOKEN_VARIABLE: TOKEN})
            self.agents.append(self._stack.enter_context(agent))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- what is asked ------------------------------------------------------------------------------------------

    def warm(self, slot: int, model: int, *, peers: bool = False, by_way_of: str = "") -> str:
        """Has the form loaded. Empty, or the error it was refused with. `by_way_of`: where the peer is reached."""
        agent, other = self.agents[slot], self.agents[1 - slot]
        url = by_way_of or f"http://{other.info.host}:{other.info.port}"
        body: dict[str, Any] = {"manifest_path": str(self.manifests[model].path), "dtype": DTYPE}
        if peers:
            body["peers"] = [{"url": url, "token": peer_token(other.info.token)}]
        try:
            agent.call("POST", "/v1/pool/warm", body)
        except AgentError as error:
            return error.body
        except (OSError, Exception) as error:
            return f"connection: {error!r}"
        return ""

    def evict(self, slot: int, model: int) -> None:
        with contextlib.suppress(AgentError):
            self.agents[slot].call("DELETE", f"/v1/pool/{self.key(model)}")

    def key(self, model: int) -> str:
        return pool_key(self.manifests[model].identity, DTYPE)

    def must_load(self, slot: int, model: int, *, peers: bool = False) -> None:
        said = self.warm(slot, model, peers=peers)
        if said:
            self.found.stuck.append(f"slot {slot}, model {model}: nothing is wrong any more, and still: {said[:300]}")

    def refused(self, said: str, *names: str) -> None:
        """A load met something wrong: it has to say what."""
        if not said:
            return
        self.found.failures += 1
        if not any(name in said for name in names):
            self.found.unnamed.append(f"{said[:300]} names none of {names}")

    def prefer(self, slot: int, kind: str) -> None:
        """As if the slot had measured that this way is the quickest."""
        rates = dict.fromkeys(("make", "copy as is", "disk", "peer", "store"), 1000.0)
        rates |= {kind: 1e12, **({"copy as is": 1e12} if kind == "make" else {})}
        (self.agents[slot].pool_directory / RATES_NAME).write_text(json.dumps(rates))

    def forget_kept(self, slot: int, model: int) -> None:
        """The disk tier and the object store have nothing of the form."""
        shutil.rmtree(self.agents[slot].directory / "chunks", ignore_errors=True)
        name = form_name(self.manifests[model].identity, recipe_name(DTYPE))
        for part in ("head", "body"):
            self.stored.directory.delete(f"forms/{name}/{part}")

    def source(self, model: int) -> Path:
        return Path(self.manifests[model].files[0].path)

    # --- what must hold -----------------------------------------------------------------------------------------

    def look(self) -> None:
        for slot, agent in enumerate(self.agents):
            loaders = self._settle(slot, agent)
            state = agent.state()
            self.found.stuck += [
                f"slot {slot}: {entry.key} is held by {entry.holders} and is {entry.state}"
                for entry in state.pool
                if entry.holders or entry.state not in ("ready", "absent")
            ]
            self.found.leaked += [f"slot {slot}: process {pid} still loads" for pid in loaders]
            known = {f"{entry.key}.prepared": entry for entry in state.pool if entry.state == "ready"}
            for path in agent.pool_directory.iterdir():
                if path.name.startswith(".") and not path.name.endswith(".tmp"):
                    continue
                if path.name not in known:
                    self.found.leaked.append(f"slot {slot}: {path.name} belongs to no entry")
                    continue
                model = [self.key(number) for number in (0, 1)].index(known[path.name].key)
                if contents(path) != self.right[model]:
                    self.found.wrong.append(f"slot {slot}: {path.name} is not what it must be")
            self.found.leaked += [f"slot {slot}: {path}" for path in (agent.directory / "chunks").glob("*/.*.tmp")]
        self.found.leaked += [str(path) for path in self.models.rglob("*.tmp")]

    def _settle(self, slot: int, agent: AgentProcess) -> list[int]:
        """Processes that still load after everything had time to end."""

        def loaders() -> list[int]:
            return [process.pid for process in agent.family() if process.name() == NAME_AT_WORK]

        def settled() -> bool:
            with contextlib.suppress(psutil.Error):
                busy = any(entry.holders or entry.state == "loading" for entry in agent.state().pool)
                return not busy and not loaders()
            return False

        with contextlib.suppress(AssertionError, TimeoutError):
            wait_for(settled, SETTLE_S)
        with contextlib.suppress(psutil.Error):
            return loaders()
        return []

    # --- steps --------------------------------------------------------------------------------------------------

    def run(self, faults: int, on_step: Callable[[str], None] = lambda _: None) -> Found:
        for slot in (0, 1):
            for model in (0, 1):
                self.must_load(slot, model)
        steps = list(STEPS.items())
        for number in range(faults):
            name, step = steps[number % len(steps)] if number < len(steps) else self.choose.choice(steps)
            slot, model = self.choose.randrange(2), self.choose.randrange(2)
            said = f"{number}: {name}, slot {slot}, model {model}"
            before = len(self.found.problems)
            step(self, slot, model)
            self.look()
            self.found.steps.append(said)
            on_step(said + "".join(f"\n    {problem}" for problem in self.found.problems[before:]))
        return self.found


def contents(path: Path) -> dict[str, bytes]:
    form = PreparedFile.open(path, verify=True)
    return {name: bytes(form.raw(name)) for name in form.keys()}  # noqa: SIM118


def kill_import(loads: Loads, slot: int, model: int) -> None:
    """A new copy of a checkpoint, whose import is killed; run again, it comes to the same identity."""
    copy = loads.folder / f"copy-{secrets.token_hex(4)}"
    shutil.copytree(loads.source(model).parent, copy)
    command = [sys.executable, "-m", "model_loader.importer", f"file://{copy}", "--models-dir", str(loads.models)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        process.wait(loads.choose.uniform(0.1, 1.5))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    again = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE_S)
    told = json.loads(again.stdout.splitlines()[-1])
    if told.get("identity") != loads.manifests[model].identity:
        loads.found.wrong.append(f"the import came to {told}")
    shutil.rmtree(copy)


def kill_load(loads: Loads, slot: int, model: int) -> None:
    loads.evict(slot, model)
    with asking(loads, slot, model) as said:
        deadline_s = time.monotonic() + loads.choose.uniform(0.2, 1.5)
        while time.monotonic() < deadline_s:
            for process in loads.agents[slot].family():
                with contextlib.suppress(psutil.Error):
                    if process.name() == NAME_AT_WORK and loads.choose.random() < 0.2:
                        process.kill()
    loads.refused(said[0], "prepare_failed", "ended with status")
    loads.must_load(slot, model)


def kill_agent(loads: Loads, slot: int, model: int) -> None:
    """In the middle of a load, or with nothing to do; the next agent takes over what is whole."""
    agent = loads.agents[slot]
    if loads.choose.random() < 0.7:
        loads.evict(slot, model)
        with asking(loads, slot, model):
            time.sleep(loads.choose.uniform(0.0, 1.0))
            agent.process.kill()
            agent.process.wait()
    else:
        agent.process.kill()
        agent.process.wait()
    wait_for(lambda: not agent.family(), SETTLE_S)
    agent.start()
    loads.must_load(slot, model)


def bad_source(loads: Loads, slot: int, model: int) -> None:
    """The file is not what was imported: flipped, short, with a tail of zeros, swapped, or gone."""
    path = loads.source(model)
    content = path.read_bytes()
    kind = loads.choose.choice(["flipped", "short", "zero tail", "swapped", "missing", "rewritten while it is read"])
    loads.evict(slot, model)
    loads.prefer(slot, "make")
    loads.forget_kept(slot, model)
    try:
        if kind == "missing":
            path.rename(path.with_suffix(".away"))
            said = loads.warm(slot, model)
            path.with_suffix(".away").rename(path)
        elif kind == "rewritten while it is read":
            with asking(loads, slot, model) as answers:
                for _ in range(5):
                    path.write_bytes(altered(content, loads.choose))
                    time.sleep(loads.choose.uniform(0.0, 0.2))
                path.write_bytes(content)
            said = answers[0]
        else:
            changed = {
                "flipped": altered(content, loads.choose),
                "short": content[: len(content) // 2],
                "zero tail": content[:-60_000] + bytes(60_000),
                "swapped": loads.source(1 - model).read_bytes(),
            }[kind]
            path.write_bytes(changed)
            said = loads.warm(slot, model)
            if not said:
                loads.found.wrong.append(f"a file that was {kind} was loaded")
    finally:
        if not path.exists():
            path.with_suffix(".away").rename(path)
        path.write_bytes(content)
    loads.refused(said, path.name)
    loads.must_load(slot, model)


def bad_source_of_a_form_others_have(loads: Loads, slot: int, model: int) -> None:
    """The file is not what was imported, and the other slot's pool has the form: that costs making it, not the load."""
    path = loads.source(model)
    content = path.read_bytes()
    loads.must_load(1 - slot, model)
    loads.evict(slot, model)
    loads.prefer(slot, "make")
    loads.forget_kept(slot, model)
    kind = loads.choose.choice(["flipped", "short", "missing"])
    try:
        if kind == "missing":
            path.unlink()
        else:
            path.write_bytes(altered(content, loads.choose) if kind == "flipped" else content[: len(content) // 2])
        said = loads.warm(slot, model, peers=True)
    finally:
        path.write_bytes(content)
    if said:
        loads.found.stuck.append(f"a file that was {kind} cost a load though a peer had the form: {said[:300]}")
    loads.must_load(slot, model)


def dying_peer(loads: Loads, slot: int, model: int) -> None:
    """The slot that the form is copied from dies under it."""
    other = loads.agents[1 - slot]
    loads.must_load(1 - slot, model)
    loads.evict(slot, model)
    loads.prefer(slot, "peer")
    with asking(loads, slot, model, peers=True) as said:
        time.sleep(loads.choose.uniform(0.0, 1.2))
        other.process.kill()
        other.process.wait()
    if said[0]:
        loads.found.stuck.append(f"a peer's death cost a load: {said[0][:300]}")
    wait_for(lambda: not other.family(), SETTLE_S)
    other.start()
    loads.prefer(slot, "make")


def peer_behind_a_bad_network(loads: Loads, slot: int, model: int) -> None:
    """Ranges of the form come late, cut, changed, with an error instead, or not at all."""
    loads.must_load(1 - slot, model)
    loads.evict(slot, model)
    shutil.rmtree(loads.agents[slot].directory / "chunks", ignore_errors=True)
    loads.prefer(slot, "peer")
    kind = loads.choose.choice(["reset", "cut", "flip", "unavailable", "slow", "late"])
    share = loads.choose.choice([0.2, 0.6, 1.0])
    with FaultyProxy(loads.agents[1 - slot].info.port) as proxy:
        proxy.set(seed=loads.choose.randrange(1 << 31), **_bad_network(kind, share))
        said = loads.warm(slot, model, peers=True, by_way_of=proxy.url)
    if said:
        loads.found.stuck.append(f"a bad network to a peer ({kind}, {share}) cost a load: {said[:300]}")
    loads.prefer(slot, "make")
    loads.must_load(slot, model)


def store_behind_a_bad_network(loads: Loads, slot: int, model: int) -> None:
    """The form is in the object store: its ranges come late, cut, changed, refused, or its bytes are not what they
    were."""
    agent = loads.agents[slot]
    loads.must_load(slot, model)
    path = agent.pool_directory / f"{loads.key(model)}.prepared"
    StoredForms(loads.stored.directory).keep(PreparedFile.open(path, verify=True))
    loads.evict(slot, model)
    shutil.rmtree(agent.directory / "chunks", ignore_errors=True)
    loads.prefer(slot, "store")
    kind = loads.choose.choice(["reset", "cut", "flip", "unavailable", "slow", "late", "changed", "missing"])
    share = loads.choose.choice([0.2, 0.6, 1.0])
    name = form_name(loads.manifests[model].identity, recipe_name(DTYPE))
    if kind == "changed":
        body = loads.stored.directory.get(f"forms/{name}/body")
        loads.stored.directory.put(f"forms/{name}/body", altered(body, loads.choose))
    elif kind == "missing":
        loads.stored.directory.delete(f"forms/{name}/body")
    else:
        loads.network.set(seed=loads.choose.randrange(1 << 31), **_bad_network(kind, share))
    said = loads.warm(slot, model)
    loads.network.set()
    if said:
        loads.found.stuck.append(f"an object store that was {kind} ({share}) cost a load: {said[:300]}")
    for part in ("head", "body"):
        loads.stored.directory.delete(f"forms/{name}/{part}")
    loads.prefer(slot, "make")
    loads.must_load(slot, model)


def _bad_network(kind: str, share: float) -> dict[str, float]:
    """What `FaultyProxy` is to do; `share` of the requests meet it, or all of them."""
    return {"slow": {"bytes_per_s": 4e6}, "late": {"delay_s": 0.3}}.get(kind, {kind: share})


def kill_eviction(loads: Loads, slot: int, model: int) -> None:
    """The agent dies while it lets a form go; the next one finds the form, or nothing of it."""
    agent = loads.agents[slot]
    loads.must_load(slot, model)

    def evict() -> None:
        with contextlib.suppress(Exception):
            loads.evict(slot, model)

    thread = threading.Thread(target=evict)
    thread.start()
    time.sleep(loads.choose.uniform(0.0, 0.01))
    agent.process.kill()
    agent.process.wait()
    thread.join(SETTLE_S)
    wait_for(lambda: not agent.family(), SETTLE_S)
    agent.start()
    loads.must_load(slot, model)


def rotten_disk(loads: Loads, slot: int, model: int) -> None:
    """A chunk of the disk tier that was changed, cut, or removed."""
    agent = loads.agents[slot]
    loads.must_load(slot, model)
    path = agent.pool_directory / f"{loads.key(model)}.prepared"
    order = FormOrder(
        str(loads.manifests[model].path), DTYPE, str(path), disk=str(agent.directory / "chunks"), disk_bytes=DISK_BYTES
    )
    loads.prefer(slot, "disk")
    keep_form(order, 1e9)
    chunks = sorted((agent.directory / "chunks").glob("*/*.chunk"))
    if not chunks:
        loads.found.stuck.append(f"slot {slot}: nothing was kept on disk")
        return
    chunk = loads.choose.choice(chunks)
    kind = loads.choose.choice(["flipped", "cut", "removed", "whole"])
    if kind == "removed":
        chunk.unlink()
    elif kind == "cut":
        os.truncate(chunk, chunk.stat().st_size // 2)
    elif kind == "flipped":
        chunk.write_bytes(altered(chunk.read_bytes(), loads.choose))
    loads.evict(slot, model)
    loads.must_load(slot, model)
    loads.prefer(slot, "make")


def full_disk(loads: Loads, slot: int, model: int) -> None:
    """No file may grow beyond a little: what a full disk is to whoever writes."""
    agent = loads.agents[slot]
    loads.evict(slot, model)
    loads.prefer(slot, "make")
    before = resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE)

    def limit(most: tuple[int, int]) -> None:
        """Of the agent and all that came of it. Whatever is born meanwhile has its parent's limit, so that a look which
        finds nobody new ends it."""
        done: set[int] = set()
        while pids := {agent.process.pid, *(process.pid for process in agent.family())} - done:
            for pid in sorted(pids):
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, most)
            done |= pids

    limit((FULL_BYTES, before[1]))
    try:
        said = loads.warm(slot, model)
    finally:
        limit(before)
    if not said:
        loads.found.wrong.append("a load came to an end on a full disk")
    loads.refused(said, "no space left", "disk_full")
    loads.must_load(slot, model)


def several_at_once(loads: Loads, slot: int, model: int) -> None:
    """Two loads of one form, one of another, and evictions in between."""
    loads.evict(slot, model)
    with asking(loads, slot, model) as first, asking(loads, slot, model) as second, asking(loads, slot, 1 - model):
        for _ in range(loads.choose.randrange(6)):
            time.sleep(loads.choose.uniform(0.0, 0.3))
            loads.evict(slot, loads.choose.randrange(2))
    for said in (*first, *second):
        if said:
            loads.found.stuck.append(f"a load beside others was refused: {said[:300]}")
    loads.must_load(slot, model)


STEPS: Final[dict[str, Callable[[Loads, int, int], None]]] = {
    "kill -9 of an import": kill_import,
    "kill -9 of a load": kill_load,
    "kill -9 of an agent": kill_agent,
    "a source that is not what it was": bad_source,
    "a source that is not what it was, of a form others have": bad_source_of_a_form_others_have,
    "a peer that dies": dying_peer,
    "a peer behind a bad network": peer_behind_a_bad_network,
    "an object store behind a bad network": store_behind_a_bad_network,
    "kill -9 in an eviction": kill_eviction,
    "a rotten disk tier": rotten_disk,
    "a full disk": full_disk,
    "several at once": several_at_once,
}


@contextlib.contextmanager
def asking(loads: Loads, slot: int, model: int, *, peers: bool = False) -> Iterator[list[str]]:
    """A load beside what happens in the context; its answer is in the list afterwards."""
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(loads.warm(slot, model, peers=peers)))
    thread.start()
    try:
        yield answers
    finally:
        thread.join(PATIENCE_S)
        if not answers:
            answers.append("")
            loads.found.stuck.append(f"slot {slot}, model {model}: a load never answered")


def altered(content: bytes, choose: random.Random) -> bytes:
    """One bit of it, in its second half, where the tensors are."""
    changed = bytearray(content)
    changed[choose.randrange(len(content) // 2, len(content))] ^= 1 << choose.randrange(8)
    return bytes(changed)


__all__ = ["STEPS", "Found", "Loads"]
