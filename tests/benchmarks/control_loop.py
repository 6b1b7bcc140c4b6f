"""The control loop of a large cluster (1,000 functions, 200 slots, 2,000 replicas): what rest and changes cost.

The whole control plane in this process, over a stand-in of the API server that keeps calls, with slots and replicas in
another process that speak the real protocols without engines (`control_loop_slots`). First 1,000 `Function` objects are
found, then their replicas are started on slots that come for them, then nothing happens for a minute, then something
does: a request at zero, an edit, a lost pod, a dead replica, a function that needs slots of its own.
Limits: the API server's own time and the import of models are left out; on a busy machine times say little, counts do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from control_plane.backends.kubernetes.api import FUNCTIONS, PODS, SLOT_POOLS, ClusterApi, Object, Resource
from control_plane.functions import ImportState, Revision
from control_plane.settings import GatewaySettings, KubernetesSettings, Settings, SlotSettings
from control_plane.upkeep import KEEP_S, Upkeep
from model_loader.importer import import_model
from tests.benchmarks import report
from tests.benchmarks.writes import Writes
from tests.control_plane.backends.kubernetes.fake_cluster import FakeApi, running, slot_pool
from tests.control_plane.gateway.conftest import Plane, body, until
from tests.control_plane.gateway.fakes import FakeSlot
from tests.kubernetes.addresses import Addresses
from tests.support.checkpoints import make_tiny_llama

PLACES: Final = 11
"""Replicas a slot takes: one more than are there, so that there is room."""
CHANGE_S: Final = 0.1
CALL_S: Final = 0.05
REST_SHARE: Final = 0.1
LAG_S: Final = 0.05
ALLOWED: Final = frozenset({"gateways", "leases", "replica_accounts", "ledger", "load_observed"})
"""Tables that are written at rest: leases, what replicas have cost so far, and that load was watched."""


class Street:
    """The process of the slots, and what it has told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.told: list[dict[str, Any]] = []
        self._adding: dict[str, asyncio.Event] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while self._process.stdout is not None and (line := await self._process.stdout.readline()):
            told = json.loads(line)
            self.told.append(told)
            if "added" in told:
                self._adding.pop(told["added"]).set()

    async def add(self, name: str, address: str) -> None:
        added = self._adding[name] = asyncio.Event()
        self.say(add=[name, address])
        await added.wait()

    def say(self, **command: Any) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def count(self, word: str) -> int:
        return sum(word in each for each in self.told)

    async def starts(self, since: int, count: int, within_s: float = 60.0, function: str = "") -> list[float]:
        """When so many starts were asked for, of those told from `since` on."""

        def found() -> list[float]:
            return [
                each["at_s"] for each in self.told[since:] if "started" in each and function in ("", each["function"])
            ]

        await until(lambda: len(found()) >= count, within_s)
        return sorted(found())[:count]

    async def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._reading.cancel()


class Kubelet:
    """Brings every pod up as a slot of the street, at an address of its own."""

    def __init__(self, api: FakeApi, street: Street, addresses: Addresses) -> None:
        self._api, self._street, self._addresses = api, street, addresses
        self._tasks: set[asyncio.Task[None]] = set()
        self.created_s: list[float] = []
        api.on_change.append(self._changed)

    def _changed(self, resource: Resource, kind: str, pod: Object) -> None:
        if resource != PODS:
            return
        name = pod["metadata"]["name"]
        if kind == "ADDED":
            self.created_s.append(time.monotonic())
            self._spawn(self._bring_up(name))
        elif kind == "DELETED":
            self._street.say(remove=name)
        elif pod["metadata"].get("deletionTimestamp"):
            asyncio.get_running_loop().call_soon(self._api.remove, PODS, name)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up(self, name: str) -> None:
        address = self._addresses.pod()
        await self._street.add(name, address)
        pod = self._api.objects["pods"].get(name)
        if pod is not None:
            status = {**running(ready=True), "podIP": address}
            self._api.change(PODS, name, spec={**pod["spec"], "nodeName": f"node-{address}"}, status=status)


class Lag:
    """How long the event loop was away, at most."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            due_s = time.monotonic() + LAG_S
            await asyncio.sleep(LAG_S)
            self.worst_s = max(self.worst_s, time.monotonic() - due_s)

    def taken_s(self) -> float:
        worst_s, self.worst_s = self.worst_s, 0.0
        return worst_s

    def close(self) -> None:
        self._task.cancel()


class Place:
    def __init__(self, plane: Plane, api: FakeApi, street: Street, kubelet: Kubelet, writes: Writes) -> None:
        self.plane, self.api, self.street, self.kubelet, self.writes = plane, api, street, kubelet, writes
        self.lag = Lag()
        self.ticks = 0
        loop = plane.context.loop
        tick = loop._tick

        def counted(key: Any) -> None:
            self.ticks += 1
            tick(key)

        loop._tick = counted  # type: ignore[method-assign]

    @property
    def seats(self) -> int:
        return len(self.plane.context.seating._seats)

    def idle(self) -> bool:
        objects = self.plane.context.cluster.function_objects if self.plane.context.cluster is not None else None
        return objects is not None and not objects._marked and not objects._restated


def spec_of(model: str, number: int, sleeping: int, functions: int, replicas: int) -> dict[str, Any]:
    """`sleeping` functions are at zero; the others have all the replicas between them."""
    awake = functions - sleeping
    extra = replicas - awake * (replicas // awake)
    least = 0 if number >= awake else replicas // awake + (1 if number < extra else 0)
    return {"model": model, "scaling": {"min_replicas": least, "max_replicas": max(least + 1, 1)},
            "engine_options": {"kv_bytes": 1 << 20}}  # fmt: skip


@asynccontextmanager
async def cluster(folder: Path, slots: int, functions: int, replicas: int, sleeping: int) -> AsyncIterator[Place]:
    manifest = import_model(f"file://{make_tiny_llama(folder / 'tiny')}", folder / "models")
    uri, api, addresses, writes = f"file://{folder / 'tiny'}", FakeApi(), Addresses(), Writes()

    async def connect(settings: KubernetesSettings) -> Any:
        return api

    ClusterApi.connect = connect  # type: ignore[method-assign, assignment]
    writes.watch()
    (folder / "secret").write_text("a secret of thirty-two characters\n")
    settings = replace(
        Settings(data_dir=folder / "data"),
        kubernetes=KubernetesSettings(backend="kubernetes", release="rel"),
        slot=SlotSettings(agent_secret_file=str(folder / "secret")),
        gateway=GatewaySettings(url="http://127.0.0.1:9"),
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.benchmarks.control_loop_slots",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    street = Street(process)
    kubelet = Kubelet(api, street, addresses)
    for number in range(functions):
        spec = spec_of(uri, number, sleeping, functions, replicas)
        api.put(FUNCTIONS, {"metadata": {"name": f"f-{number}"}, "spec": spec})
    plane = Plane(settings, FakeSlot(), (uri, manifest.identity, str(manifest.path)))
    plane.backend = None  # type: ignore[assignment]
    try:
        await until(lambda: street.count("ready"), 60)
        await plane.start()
        imports(plane, str(manifest.path))
        upkeep = Upkeep(plane.context)
        upkeep.start()
        place = Place(plane, api, street, kubelet, writes)
        try:
            yield place
        finally:
            place.lag.close()
            await upkeep.close()
            await plane.stop()
    finally:
        await street.close()
        addresses.close()
        writes.close()


def imports(plane: Plane, manifest_path: str) -> None:
    """Every function has a checkpoint of its own, found at once."""
    importing = plane.context.importing

    async def imported(key: Any, revision: Revision) -> None:
        identity = hashlib.sha256(revision.function.encode()).hexdigest()
        await plane.context.functions.set_import(
            revision.function, revision.tenant, revision.revision, ImportState.READY,
            identity=identity, manifest_path=manifest_path,
        )  # fmt: skip

    importing._import = imported  # type: ignore[method-assign]
    importing.want = type(importing).want.__get__(importing)  # type: ignore[method-assign]
    importing.lead(importing.leads)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


# --- what is measured -------------------------------------------------------------------------------------------------


async def first_sync(place: Place, functions: int, slots: int) -> dict[str, Any]:
    """From objects in the cluster to functions, and to objects that say how these are."""
    context, begin_s, cpu_s = place.plane.context, time.monotonic(), time.process_time()
    await until(lambda: len(context.functions.list()) >= functions, 600)
    there_s = time.monotonic() - begin_s
    place.api.put(SLOT_POOLS, slot_pool(perNode=0, most=slots + 20, least=slots, replicas=PLACES))

    def said() -> bool:
        return place.idle() and all(
            (each.get("status") or {}).get("state") not in (None, "Importing")
            for each in place.api.objects["functions"].values()
        )

    while not said():  # noqa: ASYNC110
        await asyncio.sleep(LAG_S)
    return {
        "functions_s": there_s, "whole_s": time.monotonic() - begin_s, "cpu_s": time.process_time() - cpu_s,
        "statements_a_function": place.writes.statements / functions,
        "rows_read_a_function": place.writes.read / functions,
        "longest_block_s": place.lag.taken_s(),
    }  # fmt: skip


async def fill(place: Place, replicas: int, slots: int) -> dict[str, Any]:
    begin_s, cpu_s = time.monotonic(), time.process_time()
    await until(lambda: place.seats >= replicas and place.plane.context.fleet.in_sight, 600)
    await until(place.idle, 120)
    return {"whole_s": time.monotonic() - begin_s, "cpu_s": time.process_time() - cpu_s,
            "pods": len(place.api.objects["pods"]), "longest_block_s": place.lag.taken_s()}  # fmt: skip


async def rest(place: Place, seconds: float) -> dict[str, Any]:
    await asyncio.sleep(KEEP_S + 3.0)  # how long starts took is written down until then
    place.lag.taken_s()
    api, rows, ticks, told = place.api.calls.copy(), place.writes.rows.copy(), place.ticks, len(place.street.told)
    transactions, begin_s, cpu_s = place.plane.context.db.stats.commits, time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    passed_s, calls = time.monotonic() - begin_s, place.api.calls - api
    reads = {call: count for call, count in calls.items() if call.split()[0] in ("list", "watch", "get")}
    asked = Counter(each["asked"] for each in place.street.told[told:] if "asked" in each)
    return {
        "seconds": passed_s,
        "cpu_share": (time.process_time() - cpu_s) / passed_s,
        "api_writes": {call: count for call, count in calls.items() if call not in reads},
        "api_reads": reads,
        "rows_written": dict(place.writes.rows - rows),
        "transactions": place.plane.context.db.stats.commits - transactions,
        "functions_decided_a_second": (place.ticks - ticks) / passed_s,
        "asked_of_slots": dict(asked),
        "longest_block_s": place.lag.taken_s(),
        "resident_mib": resident_bytes() / 2**20,
    }  # fmt: skip


async def changes(place: Place, tries: int, sleeping: int, functions: int) -> dict[str, list[float]]:
    """Seconds from each change to what is done about it."""
    found: dict[str, list[float]] = {
        "request at zero -> start": [], "request -> pod create": [], "object edited -> start": [],
        "replica died -> start": [], "pod lost -> first start": [], "pod lost -> last start": [],
    }  # fmt: skip
    plane, street = place.plane, place.street
    for number in range(functions - sleeping, functions - sleeping + min(tries, sleeping)):
        since, begin_s = len(street.told), time.monotonic()
        async with plane.post(body(model=f"f-{number}")) as response:
            assert response.status == 200, await response.text()
        found["request at zero -> start"].append((await street.starts(since, 1, function=f"f-{number}"))[0] - begin_s)
    for number in range(tries):
        name = f"f-{number}"
        known = place.api.objects["functions"][name]["spec"]
        scaling = {**known["scaling"], "min_replicas": known["scaling"]["min_replicas"] + 1}
        since, begin_s = len(street.told), time.monotonic()
        place.api.change(FUNCTIONS, name, spec={**known, "scaling": scaling})
        found["object edited -> start"].append((await street.starts(since, 1, function=name))[0] - begin_s)
        await asyncio.sleep(0.2)
    await settled(place)
    for number in range(tries, 2 * tries):
        status = plane.context.fleet.living(("default", f"f-{number}"))[0]
        since = len(street.told)
        street.say(kill=status.replica_id)
        (at_s,) = await street.starts(since, 1, function=status.function)
        killed = next(each["at_s"] for each in street.told[since:] if each.get("killed") == status.replica_id)
        found["replica died -> start"].append(at_s - killed)
        await asyncio.sleep(0.2)
    await settled(place)
    for number in range(max(tries // 4, 2)):
        fleet = plane.context.fleet
        name = sorted(name for name in fleet.slots if fleet.count_on(name))[number]
        there = sum(each.state == "ready" for each in plane.context.fleet.on(name))
        since, begin_s = len(street.told), time.monotonic()
        place.api.remove(PODS, name)
        at_s = await street.starts(since, there)
        found["pod lost -> first start"].append(at_s[0] - begin_s)
        found["pod lost -> last start"].append(at_s[-1] - begin_s)
        await settled(place)
    for number in range(tries):
        await plane.deploy(f"own-{number}", pod={"slotPool": "default", "trustDomain": f"team-{number}"})
        await settled(place)
        place.kubelet.created_s.clear()
        begin_s = time.monotonic()
        async with plane.post(body(model=f"own-{number}")) as response:
            assert response.status == 200, await response.text()
        found["request -> pod create"].append(place.kubelet.created_s[0] - begin_s)
    return found


async def settled(place: Place) -> None:
    """What the last change has brought about is over."""
    fleet = place.plane.context.fleet
    await until(lambda: place.idle() and fleet.in_sight and all(s.state == "ready" for s in fleet.living()), 60)
    await asyncio.sleep(0.3)


async def measure(quick: bool) -> dict[str, Any]:
    functions, slots, replicas = (200, 40, 400) if quick else (1000, 200, 2000)
    tries, rest_s, sleeping = (5, 15.0, 20) if quick else (20, 60.0, 40)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        async with cluster(Path(name), slots, functions, replicas, sleeping) as place:
            found: dict[str, Any] = {"functions": functions, "slots": slots, "replicas": replicas}
            found["first_sync"] = await first_sync(place, functions, slots)
            print(found["first_sync"], flush=True)
            found["fill"] = await fill(place, replicas, slots)
            print(found["fill"], flush=True)
            found["rest"] = await rest(place, rest_s)
            print(found["rest"], flush=True)
            found["changes_s"] = await changes(place, tries, sleeping, functions)
            return found


def main(quick: bool) -> bool:
    found = asyncio.run(measure(quick))
    sync, filled, resting, changed = (found[part] for part in ("first_sync", "fill", "rest", "changes_s"))
    sizes = f"{found['functions']:,} functions, {found['slots']} slots, {found['replicas']:,} replicas"
    report.table(
        f"Beginning: {sizes}",
        ["", "s", "CPU s", "longest block of the event loop, s"],
        [["functions found as objects", sync["whole_s"], sync["cpu_s"], sync["longest_block_s"]],
         ["slots and replicas there", filled["whole_s"], filled["cpu_s"], filled["longest_block_s"]]],
    )  # fmt: skip
    report.table(
        "At rest",
        ["seconds", "of a core", "resident, MiB", "functions decided a second", "longest block, s", "transactions"],
        [[resting["seconds"], f"{resting['cpu_share']:.1%}", f"{resting['resident_mib']:.0f}",
          resting["functions_decided_a_second"], resting["longest_block_s"], resting["transactions"]]],
    )  # fmt: skip
    report.table(
        "From a change to what is done about it, ms",
        ["change", "tries", "median", "p95"],
        [[name, len(times), f"{1000 * report.median(times):.1f}", f"{1000 * report.percentile(times, 0.95):.1f}"]
         for name, times in changed.items()],
    )  # fmt: skip
    report.save("control_loop", found)
    others = {table: count for table, count in resting["rows_written"].items() if table not in ALLOWED}
    late = {name: report.median(times) for name, times in changed.items() if report.median(times) >= CHANGE_S}
    created_s = report.median(changed["request -> pod create"])
    held = [
        report.verdict("nothing is written to the API server at rest", not resting["api_writes"],
                       f"{resting['api_writes']}"),
        report.verdict("nothing but leases and accounts to the database", not others, f"{resting['rows_written']}"),
        report.verdict(f"under {REST_SHARE:.0%} of a core at rest", resting["cpu_share"] < REST_SHARE,
                       f"{resting['cpu_share']:.1%}"),
        report.verdict(f"a change is acted on within {CHANGE_S * 1000:.0f} ms", not late, f"late: {late}"),
        report.verdict(f"request to pod create under {CALL_S * 1000:.0f} ms", created_s < CALL_S,
                       f"{1000 * created_s:.1f} ms"),
    ]  # fmt: skip
    return all(held)


if __name__ == "__main__":
    raise SystemExit(not main("--quick" in sys.argv))
