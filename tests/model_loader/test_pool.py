import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_loader.errors import FormatError, IntegrityError, OutOfSpace
from model_loader.importer import import_model
from model_loader.llama_layout import prepared_bytes
from model_loader.load_order import LoadOrder, LoadOutcome
from model_loader.manifest import Manifest
from model_loader.pool import WarmPool, pool_key
from model_loader.pool_room import Room
from model_loader.pool_state import TRANSITIONS, EntryState, IllegalTransition, transition
from model_loader.prepared import PreparedFile
from model_loader.progress import Progress
from model_loader.ranges.peer import PeerAddress
from model_loader.recipe import prepare
from tests.support.checkpoints import make_tiny_llama

OUTCOME = LoadOutcome("make", 1.0, {"disk": 1000}, chunks=1)


class Preparing:
    """Runs the recipe in a thread, counts, and can be made to wait or fail."""

    def __init__(self) -> None:
        self.calls = 0
        self.orders: list[LoadOrder] = []
        self.failure: BaseException | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()

    async def __call__(self, order: LoadOrder) -> LoadOutcome:
        self.calls += 1
        self.orders.append(order)
        self.started.set()
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        order.progress(Progress("prepare", 1, 2))
        await asyncio.to_thread(prepare, Manifest.load(order.manifest_path), order.dtype, order.out)
        return OUTCOME


@pytest.fixture
def preparing() -> Preparing:
    return Preparing()


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    root = tmp_path_factory.mktemp("pool")
    return [
        import_model(f"file://{make_tiny_llama(root / str(seed), seed=seed)}", root / "models") for seed in range(3)
    ]


@pytest.fixture
def pool(tmp_path: Path, preparing: Preparing) -> WarmPool:
    return WarmPool(tmp_path / "pool", 1 << 30, preparing)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the loop's next turn
        await asyncio.sleep(0)


def states(pool: WarmPool) -> dict[str, EntryState]:
    return {entry.key: entry.state for entry in pool.entries()}


async def test_one_preparation_serves_all_who_wait(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest]
) -> None:
    seen: list[list[Progress]] = [[], [], []]
    preparing.gate.clear()
    asking = [
        asyncio.create_task(pool.acquire(manifests[0].path, "float32", f"rep-{n}", seen[n].append)) for n in range(3)
    ]
    await until(lambda: bool(pool.entries()) and len(pool.entries()[0].holders) == 3)
    preparing.gate.set()
    leases = await asyncio.gather(*asking)
    assert preparing.calls == 1
    assert {lease.tier for lease in leases} == {"disk"}
    assert len({lease.path for lease in leases}) == 1
    assert all(told for told in seen)
    again = await pool.acquire(manifests[0].path, "float32", "rep-9")
    assert again.tier == "pool"
    assert again.nbytes == again.path.stat().st_size == pool.used_bytes
    assert pool.entries()[0].holders == ("rep-0", "rep-1", "rep-2", "rep-9")
    assert PreparedFile.open(again.path, verify=True).identity == manifests[0].identity


async def test_dtype_and_identity_are_part_of_the_key(pool: WarmPool, manifests: list[Manifest]) -> None:
    for manifest, dtype in ((manifests[0], "float32"), (manifests[0], "bfloat16"), (manifests[1], "float32")):
        lease = await pool.acquire(manifest.path, dtype, "r")
        assert lease.key == pool_key(manifest.identity, dtype)
    assert len(states(pool)) == 3
    with pytest.raises(FormatError, match="int3"):
        await pool.acquire(manifests[0].path, "int3", "r")


async def test_a_failure_reaches_all_who_wait_and_is_not_retried_until_asked(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest]
) -> None:
    preparing.failure = IntegrityError("swapped")
    preparing.gate.clear()
    asking = [asyncio.create_task(pool.acquire(manifests[0].path, "float32", f"r{n}")) for n in range(3)]
    await until(lambda: bool(pool.entries()) and len(pool.entries()[0].holders) == 3)
    preparing.gate.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert [str(result) for result in results] == ["swapped"] * 3
    assert preparing.calls == 1
    entry = pool.entries()[0]
    assert (entry.state, entry.error, entry.holders, entry.nbytes) == (EntryState.ABSENT, "swapped", (), 0)
    preparing.failure = None
    assert (await pool.acquire(manifests[0].path, "float32", "r")).tier == "disk"
    assert pool.entries()[0].error == ""


async def test_a_preparation_goes_on_when_whoever_asked_is_gone(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest]
) -> None:
    preparing.gate.clear()
    asking = asyncio.create_task(pool.acquire(manifests[0].path, "float32", "gone"))
    await preparing.started.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert pool.entries()[0].holders == ()
    assert pool.used_bytes > 0
    preparing.gate.set()
    lease = await pool.acquire(manifests[0].path, "float32", "next")
    assert preparing.calls == 1
    assert lease.path.exists()


async def test_the_least_recently_used_entry_that_nobody_holds_is_evicted(
    tmp_path: Path, preparing: Preparing, manifests: list[Manifest]
) -> None:
    room = 2 * prepared_bytes(manifests[0].config, "float32")
    pool = WarmPool(tmp_path / "pool", room, preparing)
    first = await pool.acquire(manifests[0].path, "float32", "a")
    second = await pool.acquire(manifests[1].path, "float32", "b")
    pool.release("a")
    pool.release("b")
    await pool.acquire(manifests[0].path, "float32", "a")
    pool.release("a")
    await pool.acquire(manifests[2].path, "float32", "c")
    assert first.path.exists()
    assert not second.path.exists()
    assert pool.used_bytes <= room


async def test_what_is_held_is_never_evicted(tmp_path: Path, preparing: Preparing, manifests: list[Manifest]) -> None:
    pool = WarmPool(tmp_path / "pool", prepared_bytes(manifests[0].config, "float32") + 1000, preparing)
    lease = await pool.acquire(manifests[0].path, "float32", "a")
    with pytest.raises(OutOfSpace, match="in use by running replicas"):
        await pool.acquire(manifests[1].path, "float32", "b")
    assert lease.path.exists()
    assert not await pool.evict(lease.key)
    pool.release("a")
    assert (await pool.acquire(manifests[1].path, "float32", "b")).path.exists()
    assert not lease.path.exists()


async def test_a_model_larger_than_the_pool_is_refused_with_both_numbers(
    tmp_path: Path, preparing: Preparing, manifests: list[Manifest]
) -> None:
    pool = WarmPool(tmp_path / "pool", 1000, preparing)
    with pytest.raises(OutOfSpace, match="the pool may hold 1000"):
        await pool.acquire(manifests[0].path, "float32", "a")
    assert preparing.calls == 0
    assert pool.used_bytes == 0


@pytest.mark.parametrize("damage", ["removed", "replaced", "cut"])
async def test_a_file_that_changed_under_the_pool_is_prepared_again(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest], damage: str
) -> None:
    lease = await pool.acquire(manifests[0].path, "float32", "a")
    if damage == "removed":
        lease.path.unlink()
    elif damage == "replaced":
        (lease.path.parent / "x").write_bytes(lease.path.read_bytes())
        os.replace(lease.path.parent / "x", lease.path)
    else:
        os.truncate(lease.path, 5000)
    again = await pool.acquire(manifests[0].path, "float32", "b")
    assert again.tier == "disk"
    assert preparing.calls == 2
    PreparedFile.open(again.path, verify=True)


async def test_a_new_agent_takes_over_what_is_good_and_removes_what_is_not(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest], tmp_path: Path
) -> None:
    leases = [await pool.acquire(m.path, "float32", "a") for m in manifests]
    content = bytearray(leases[1].path.read_bytes())
    content[50_000] ^= 1
    leases[1].path.write_bytes(content)
    os.truncate(leases[2].path, leases[2].nbytes - 1)
    half = pool.directory / f".{leases[0].path.name}.123.abcd.tmp"
    half.write_bytes(b"half")
    wrong = pool.directory / f"{'0' * 16}.prepared"
    wrong.write_bytes(leases[0].path.read_bytes())
    foreign = pool.directory / "notes.txt"
    foreign.write_bytes(b"mine")
    successor = WarmPool(pool.directory, 1 << 30, preparing)
    entries = {entry.key: entry for entry in await successor.scan()}
    assert entries[leases[0].key].state is EntryState.READY
    assert entries[leases[0].key].identity == manifests[0].identity
    assert "xxh3-128" in entries[leases[1].key].error
    assert "truncated" in entries[leases[2].key].error
    assert {p.name for p in pool.directory.iterdir()} == {leases[0].path.name, "notes.txt"}
    assert successor.hold(leases[0].key, "rep-old")
    assert not successor.hold(leases[1].key, "rep-old")
    assert (await successor.acquire(manifests[0].path, "float32", "b")).tier == "pool"
    assert (await successor.acquire(manifests[1].path, "float32", "b")).tier == "disk"


async def test_closing_stops_preparations_and_keeps_the_files(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest]
) -> None:
    lease = await pool.acquire(manifests[0].path, "float32", "a")
    preparing.gate.clear()
    preparing.started.clear()
    waiting = asyncio.create_task(pool.acquire(manifests[1].path, "float32", "b"))
    await preparing.started.wait()
    await pool.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert lease.path.exists()


# --- the recipe as a process ------------------------------------------------------------------------------------


class Killed(Exception):
    pass


async def run_recipe(order: LoadOrder) -> LoadOutcome:
    where = (str(order.manifest_path), "--dtype", order.dtype, "--out", str(order.out))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "model_loader.recipe", *where),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise Killed(f"signal {-(process.returncode or 0)}")
    event = json.loads(output.splitlines()[-2])
    order.progress(Progress(event["stage"], event["done_bytes"], event["total_bytes"]))
    return OUTCOME


async def test_the_recipe_runs_as_a_process_and_tells_its_progress(manifests: list[Manifest], tmp_path: Path) -> None:
    seen: list[Progress] = []
    await run_recipe(LoadOrder(manifests[0].path, "float32", tmp_path / "out", seen.append))
    assert seen[-1].done_bytes == seen[-1].total_bytes
    PreparedFile.open(tmp_path / "out", verify=True)


def children() -> list[int]:
    """Recipes that run below this process."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        pids = [int(pid) for pid in file.read().split()]
    return [pid for pid in pids if b"model_loader.recipe" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def kill_child(signal_number: int) -> None:
    """Kills the recipe as soon as it exists."""
    await until(lambda: bool(children()))
    os.kill(children()[0], signal_number)


async def test_a_killed_preparation_is_lost_and_may_be_tried_again(manifests: list[Manifest], tmp_path: Path) -> None:
    pool = WarmPool(tmp_path / "pool", 1 << 30, run_recipe)
    asking = asyncio.create_task(pool.acquire(manifests[0].path, "float32", "a"))
    await kill_child(signal.SIGKILL)
    with pytest.raises(Killed, match="signal 9"):
        await asking
    assert list(pool.directory.iterdir()) == []
    assert (await pool.acquire(manifests[0].path, "float32", "a")).tier == "disk"


async def test_cancelling_ends_the_process(manifests: list[Manifest], tmp_path: Path) -> None:
    running: Awaitable[None] = asyncio.ensure_future(
        run_recipe(LoadOrder(manifests[0].path, "float32", tmp_path / "out", lambda _: None))
    )
    await until(lambda: bool(children()))
    running.cancel()  # type: ignore[attr-defined]
    with pytest.raises(asyncio.CancelledError):
        await running
    assert children() == []


# --- states -----------------------------------------------------------------------------------------------------


@given(moves=st.lists(st.sampled_from(list(EntryState)), max_size=20))
def test_only_the_moves_of_the_table_are_made(moves: list[EntryState]) -> None:
    state = EntryState.ABSENT
    for to in moves:
        if to in TRANSITIONS[state]:
            state = transition(state, to)
            assert state is to
        else:
            with pytest.raises(IllegalTransition):
                transition(state, to)


def test_nothing_is_ready_that_was_not_loaded_and_nothing_bad_becomes_ready() -> None:
    assert [s for s, to in TRANSITIONS.items() if EntryState.READY in to] == [EntryState.LOADING]
    assert TRANSITIONS[EntryState.QUARANTINED] == {EntryState.ABSENT}


# --- what goes first --------------------------------------------------------------------------------------------


async def test_a_forecast_keeps_what_will_be_wanted_and_lapses(
    tmp_path: Path, preparing: Preparing, manifests: list[Manifest]
) -> None:
    room = 2 * prepared_bytes(manifests[0].config, "float32")
    pool = WarmPool(tmp_path / "pool", room, preparing)
    first = await pool.acquire(manifests[0].path, "float32", "a")
    second = await pool.acquire(manifests[1].path, "float32", "b")
    pool.release("a")
    pool.release("b")
    pool.expect({manifests[0].identity: 0.9, manifests[1].identity: 0.0}, 60.0)
    assert {entry.identity: entry.chance for entry in pool.entries()} == {
        manifests[0].identity: 0.9,
        manifests[1].identity: 0.0,
    }
    await pool.acquire(manifests[2].path, "float32", "c")
    assert first.path.exists()
    assert not second.path.exists()
    pool.release("c")
    pool.expect({manifests[0].identity: 0.9}, 0.0)
    assert all(entry.chance is None for entry in pool.entries())
    await pool.acquire(manifests[1].path, "float32", "b")
    assert not first.path.exists()
    with pytest.raises(FormatError, match="from 0 to 1"):
        pool.expect({"x": 1.5}, 60.0)


async def test_a_pool_whose_budget_shrank_keeps_the_new_one(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest]
) -> None:
    leases = [await pool.acquire(m.path, "float32", "a") for m in manifests]
    successor = WarmPool(pool.directory, leases[0].nbytes * 2, preparing)
    await successor.scan()
    assert sum(lease.path.exists() for lease in leases) == 2
    assert successor.used_bytes <= successor.budget_bytes


async def test_memory_that_is_not_there_is_refused_before_anything_is_written(
    tmp_path: Path, preparing: Preparing, manifests: list[Manifest]
) -> None:
    class Full(Room):
        def shortage(self, needed_bytes: int, used_bytes: int, coming: object, recycled_bytes: int = 0) -> str:
            return "7 bytes of memory are available"

    pool = WarmPool(tmp_path / "pool", 1 << 30, preparing, Full(tmp_path, 1 << 30))
    with pytest.raises(OutOfSpace, match="7 bytes of memory are available"):
        await pool.acquire(manifests[0].path, "float32", "a")
    assert preparing.calls == 0
    assert list(pool.directory.iterdir()) == []


async def test_the_memory_of_what_had_to_go_is_offered_to_what_comes(
    tmp_path: Path, preparing: Preparing, manifests: list[Manifest]
) -> None:
    pool = WarmPool(tmp_path / "pool", prepared_bytes(manifests[0].config, "float32") + 4096, preparing)
    first = await pool.acquire(manifests[0].path, "float32", "a")
    content, inode = first.path.read_bytes(), first.path.stat().st_ino
    pool.release("a")
    preparing.gate.clear()
    preparing.started.clear()
    peers = (PeerAddress("http://127.0.0.1:1", "t"),)
    asking = asyncio.create_task(pool.acquire(manifests[1].path, "float32", "b", peers=peers))
    await preparing.started.wait()
    order = preparing.orders[-1]
    assert order.peers == peers and preparing.orders[0].recycle is None
    assert order.recycle is not None and order.recycle.read_bytes() == content
    assert order.recycle.stat().st_ino == inode and not first.path.exists()
    preparing.gate.set()
    await asking
    assert not order.recycle.exists()
    assert [path.suffix for path in pool.directory.iterdir()] == [".prepared"]


async def test_what_is_kept_for_its_memory_goes_with_a_load_that_fails(
    tmp_path: Path, preparing: Preparing, manifests: list[Manifest]
) -> None:
    pool = WarmPool(tmp_path / "pool", prepared_bytes(manifests[0].config, "float32") + 4096, preparing)
    await pool.acquire(manifests[0].path, "float32", "a")
    pool.release("a")
    preparing.failure = IntegrityError("swapped")
    with pytest.raises(IntegrityError):
        await pool.acquire(manifests[1].path, "float32", "b")
    assert preparing.orders[-1].recycle is not None
    assert list(pool.directory.iterdir()) == [] and pool.used_bytes == 0


async def test_a_lease_is_given_while_the_form_arrives_and_others_join_the_same_load(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest]
) -> None:
    preparing.gate.clear()
    early = asyncio.create_task(pool.acquire(manifests[0].path, "float32", "a", may_arrive=True))
    await preparing.started.wait()
    assert not early.done()
    preparing.orders[0].progress(Progress("arriving", 0, 10, "/dev/shm/x.tmp"))
    lease = await early
    assert (lease.tier, lease.arriving) == ("arriving", Path("/dev/shm/x.tmp"))
    assert lease.landing is not None and not lease.landing.done()
    joined = await pool.acquire(manifests[0].path, "float32", "b", may_arrive=True)
    (entry,) = pool.entries()
    assert (entry.state, set(entry.holders)) == (EntryState.LOADING, {"a", "b"})
    patient = asyncio.create_task(pool.acquire(manifests[0].path, "float32", "c"))
    assert not await pool.evict(lease.key)
    preparing.gate.set()
    await lease.landing
    assert (await patient).path == lease.path == joined.path
    assert preparing.calls == 1
    assert pool.outcome(lease.key) == OUTCOME
    assert (await pool.acquire(manifests[0].path, "float32", "d", may_arrive=True)).arriving is None


async def test_a_load_that_fails_after_its_lease_was_given_says_so_on_the_lease_and_can_be_begun_again(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest]
) -> None:
    preparing.gate.clear()
    early = asyncio.create_task(pool.acquire(manifests[0].path, "float32", "a", may_arrive=True))
    await preparing.started.wait()
    preparing.orders[0].progress(Progress("arriving", 0, 10, "/dev/shm/x.tmp"))
    lease = await early
    preparing.failure = IntegrityError("the last chunk is bad")
    preparing.gate.set()
    assert lease.landing is not None
    with pytest.raises(IntegrityError, match="last chunk"):
        await lease.landing
    pool.release("a")
    preparing.failure = None
    assert (await pool.acquire(manifests[0].path, "float32", "b", may_arrive=True)).arriving is None


async def test_who_comes_between_a_way_that_failed_and_the_next_is_not_given_the_name_that_is_gone(
    pool: WarmPool, preparing: Preparing, manifests: list[Manifest]
) -> None:
    preparing.gate.clear()
    early = asyncio.create_task(pool.acquire(manifests[0].path, "float32", "a", may_arrive=True))
    await preparing.started.wait()
    tell = preparing.orders[0].progress
    tell(Progress("arriving", 0, 10, "/dev/shm/x.tmp"))
    tell(Progress("left", 0, 0))  # before who waited has looked
    late = asyncio.create_task(pool.acquire(manifests[0].path, "float32", "b", may_arrive=True))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not early.done() and not late.done()
    tell(Progress("arriving", 0, 10, "/dev/shm/y.tmp"))
    assert [(await each).arriving for each in (early, late)] == [Path("/dev/shm/y.tmp")] * 2
    tell(Progress("left", 0, 0))
    last = asyncio.create_task(pool.acquire(manifests[0].path, "float32", "c", may_arrive=True))
    await asyncio.sleep(0)
    preparing.gate.set()
    assert (await last).arriving is None and preparing.calls == 1
