"""A form that took long to make is kept below the pool, once the pool has it; nobody waits for that, an eviction
neither."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from function_runtime.agent import pool as pool_module
from function_runtime.agent.children import Children
from function_runtime.agent.loaders import Loaders
from function_runtime.agent.pool import Pool, Tiers
from model_loader import form_memory
from model_loader.disk_tier import DiskTier
from model_loader.file_memory import HUGE_BYTES, huge_share
from model_loader.forms.kept import DiskForms
from model_loader.forms.order import FormOrder
from model_loader.importer import import_model
from model_loader.load_order import ProgressCallback
from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.recipe import prepare
from tests.support.checkpoints import make_tiny_llama

MADE = {
    "origin": "make",
    "seconds": 7.0,
    "nbytes": 1,
    "read_bytes": {},
    "chunks": 1,
    "bad_chunks": 0,
    "retries": 0,
    "tried": [],
}


async def test_what_the_agent_made_is_given_to_the_tiers_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = import_model(f"file://{make_tiny_llama(tmp_path / 'tiny')}", tmp_path / "models")
    kept: asyncio.Future[tuple[float, tuple[str, ...], bool]] = asyncio.get_running_loop().create_future()
    pool = Pool(tmp_path / "pool", 1 << 30, Children(), lambda: None, Tiers(tmp_path / "chunks", 1 << 20))

    async def run_beside(_: Loaders, arguments: Sequence[str], order: bytes) -> dict[str, Any]:
        (entry,) = pool.entries()
        kept.set_result((float(arguments[-1]), entry.holders, entry.state == "ready"))
        return {"kept": {"disk": 1, "store": 0}}

    async def run(_: Loaders, said: bytes, progress: ProgressCallback) -> dict[str, Any]:
        order = FormOrder.parse(said)
        await asyncio.to_thread(prepare, Manifest.load(Path(order.manifest_path)), order.dtype, Path(order.out))
        return MADE

    monkeypatch.setattr(Loaders, "run", run)
    monkeypatch.setattr(Loaders, "run_beside", run_beside)
    await pool.open()
    await pool.warm(str(manifest.path), "float32")
    seconds, holders, is_there = await asyncio.wait_for(kept, 30)
    assert (seconds, is_there) == (7.0, True)
    assert [holder.partition("-")[0] for holder in holders if not holder.startswith("warm-")] == ["keep"]
    await pool.close()


async def test_what_is_only_being_kept_is_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = import_model(f"file://{make_tiny_llama(tmp_path / 'tiny')}", tmp_path / "models")
    begun, ended = asyncio.Event(), asyncio.Event()

    async def run_beside(_: Loaders, arguments: Sequence[str], order: bytes) -> dict[str, Any]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("never")

    async def run(_: Loaders, said: bytes, progress: ProgressCallback) -> dict[str, Any]:
        order = FormOrder.parse(said)
        await asyncio.to_thread(prepare, Manifest.load(Path(order.manifest_path)), order.dtype, Path(order.out))
        return MADE

    monkeypatch.setattr(Loaders, "run", run)
    monkeypatch.setattr(Loaders, "run_beside", run_beside)
    pool = Pool(tmp_path / "pool", 1 << 30, Children(), lambda: None, Tiers(tmp_path / "chunks", 1 << 20))
    await pool.open()
    await pool.warm(str(manifest.path), "float32")
    await asyncio.wait_for(begun.wait(), 30)
    (entry,) = pool.entries()
    assert await pool.evict(entry.key) == entry.nbytes
    assert ended.is_set() and not [entry for entry in pool.entries() if entry.state != "absent"]
    await pool.close()


async def test_what_lies_in_the_disk_tier_is_told_and_what_is_forgotten_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = import_model(f"file://{make_tiny_llama(tmp_path / 'tiny')}", tmp_path / "models")
    told = asyncio.Event()
    pool = Pool(tmp_path / "pool", 1 << 30, Children(), told.set, Tiers(tmp_path / "chunks", 1 << 30))

    async def run_beside(_: Loaders, arguments: Sequence[str], order: bytes) -> dict[str, Any]:
        form = PreparedFile.open(Path(FormOrder.parse(order).out), verify=False)
        monkeypatch.setattr("model_loader.disk_tier.FREE_BYTES", 0)
        assert await asyncio.to_thread(DiskForms(DiskTier(tmp_path / "chunks", 1 << 30)).keep, form)
        return {"kept": {"disk": form.nbytes, "store": 0}}

    async def run(_: Loaders, said: bytes, progress: ProgressCallback) -> dict[str, Any]:
        order = FormOrder.parse(said)
        await asyncio.to_thread(prepare, Manifest.load(Path(order.manifest_path)), order.dtype, Path(order.out))
        return MADE

    monkeypatch.setattr(Loaders, "run", run)
    monkeypatch.setattr(Loaders, "run_beside", run_beside)

    async def until(on_disk: tuple[str, ...]) -> None:
        while pool.on_disk != on_disk:
            told.clear()
            await asyncio.wait_for(told.wait(), 30)

    await pool.open()
    assert pool.on_disk == ()
    await pool.warm(str(manifest.path), "float32")
    await until((manifest.identity,))
    await pool.close()

    again = pool = Pool(tmp_path / "pool", 1 << 30, Children(), told.set, Tiers(tmp_path / "chunks", 1 << 30))
    await again.open()
    await until((manifest.identity,))
    await again.forget(manifest.identity)
    await until(())
    await again.close()


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_a_form_in_small_pages_is_put_into_huge_ones_once_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    manifest = import_model(f"file://{make_tiny_llama(tmp_path / 'tiny')}", tmp_path / "models")
    asked: list[tuple[list[str], tuple[str, ...]]] = []
    looked = asyncio.Event()

    async def run_beside(_: Loaders, arguments: Sequence[str], order: bytes) -> dict[str, Any]:
        (entry,) = agents.entries()
        asked.append((list(arguments), entry.holders))
        return {"huge_bytes": 1, "whole_bytes": 1}

    async def run(_: Loaders, said: bytes, progress: ProgressCallback) -> dict[str, Any]:
        order = FormOrder.parse(said)
        await asyncio.to_thread(prepare, Manifest.load(Path(order.manifest_path)), order.dtype, Path(order.out))
        return {**MADE, "nbytes": pool_module.LEAST_HUGE_BYTES}

    def look(form: Path) -> float:
        looked.set()
        return share

    monkeypatch.setattr(Loaders, "run", run)
    monkeypatch.setattr(Loaders, "run_beside", run_beside)
    monkeypatch.setattr(pool_module, "huge_share", look)
    monkeypatch.setattr(pool_module, "is_memory", lambda _: True)
    monkeypatch.setattr(pool_module, "HUGE_AFTER_S", 0.0)
    agents = Pool(tmp_path / "pool", 1 << 30, Children(), lambda: None)
    await agents.open()
    await agents.warm(str(manifest.path), "float32")
    await asyncio.gather(*agents._keeping.values())
    if share == 1.0:
        assert looked.is_set() and not asked
    else:
        ((arguments, holders),) = asked
        assert arguments == ["--huge"] and [h.partition("-")[0] for h in holders] == ["keep"]
    assert not [h for entry in agents.entries() for h in entry.holders]
    await agents.close()


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"stoker-test-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


async def test_the_process_that_is_started_for_it_puts_the_form_into_huge_pages(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_llama(tmp_path / "model", hidden=256, layers=3)
    manifest = import_model(f"file://{model}", tmp_path / "models")
    shares: list[float] = []
    outcomes: list[dict[str, Any]] = []
    beside = Loaders.run_beside

    async def run_beside(loaders: Loaders, arguments: Sequence[str], order: bytes) -> dict[str, Any]:
        shares.append(huge_share(Path(FormOrder.parse(order).out)))
        outcomes.append(await beside(loaders, arguments, order))
        return outcomes[-1]

    async def run(_: Loaders, said: bytes, progress: ProgressCallback) -> dict[str, Any]:
        order = FormOrder.parse(said)
        await asyncio.to_thread(prepare, manifest, order.dtype, Path(order.out))
        return {**MADE, "nbytes": PreparedFile.open(Path(order.out), verify=False).nbytes}

    monkeypatch.setattr(form_memory, "enter_huge", lambda address, nbytes: False)  # as where memory is in pieces
    monkeypatch.setattr(Loaders, "run", run)
    monkeypatch.setattr(Loaders, "run_beside", run_beside)
    monkeypatch.setattr(pool_module, "LEAST_HUGE_BYTES", 2 * HUGE_BYTES)
    monkeypatch.setattr(pool_module, "HUGE_AFTER_S", 0.0)
    pool = Pool(shared_memory / "pool", 1 << 30, Children(), lambda: None)
    await pool.open()
    made = await pool.warm(str(manifest.path), "float32")
    before = PreparedFile.open(Path(made.path), verify=True)
    await asyncio.gather(*pool._keeping.values())
    assert shares == [0.0] and outcomes[0]["whole_bytes"] >= 2 * HUGE_BYTES
    PreparedFile.open(Path(made.path), verify=True)
    content = await asyncio.to_thread(Path(made.path).read_bytes)
    assert before.bytes_at(0, before.nbytes) == content, "who has it mapped sees the same"
    await pool.close()
    if outcomes[0]["huge_bytes"] < outcomes[0]["whole_bytes"]:
        pytest.skip("no huge pages are to be had here")
    assert huge_share(Path(made.path)) == 1.0
