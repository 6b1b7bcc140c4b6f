"""The process that waits for the next load: there when it is wanted, replaced when it was used or died."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from function_runtime.agent import loaders as module
from function_runtime.agent.children import Children
from function_runtime.agent.loaders import Loaders, loader_environment
from function_runtime.errors import LoadError
from model_loader.errors import SourceMissing
from model_loader.progress import Progress

DIRECTORY = Path("/pool")
SCRIPT = """
import json, os, sys
order = sys.stdin.readline().strip()
say = lambda **event: print(json.dumps(event), flush=True)
if order == "bad":
    say(event="error", code="model_not_found", message="nothing there")
    sys.exit(1)
if order == "die":
    os.kill(os.getpid(), 9)
if order:
    say(event="progress", stage="copy", done_bytes=1, total_bytes=2)
    say(event="done", pid=os.getpid(), order=order, arguments=sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the module that loads, whose imports take a while."""
    (tmp_path / "stoker_test_loader.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(module, "MODULE", "stoker_test_loader")
    monkeypatch.setattr(module, "_NEXT_WAITS_AFTER_S", 0.0)


async def waiting(loaders: Loaders) -> int:
    async with asyncio.timeout(30):
        await loaders.waits.wait()
    return loaders.waiting_pid


def test_the_one_that_waits_takes_the_order_and_another_waits_after_it() -> None:
    async def run() -> None:
        children, seen = Children(), list[Progress]()
        loaders = Loaders(children, DIRECTORY)
        loaders.wait_soon(0.0)
        first = await waiting(loaders)
        assert first in children.foreign
        told = await loaders.run(b"order", seen.append)
        assert (told["pid"], told["order"], seen[0].stage) == (first, "order", "copy")
        second = await waiting(loaders)
        assert second != first and first not in children.foreign
        beside = await loaders.run_beside(["--keep", "1"], b"order")
        assert beside["arguments"] == ["/pool", "--keep", "1"] and loaders.waiting_pid == second
        await loaders.close()
        assert not children.foreign
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)

    asyncio.run(run())


def test_two_loads_at_once_have_a_process_each() -> None:
    async def run() -> None:
        loaders = Loaders(Children(), DIRECTORY)
        loaders.wait_soon(0.0)
        await waiting(loaders)
        both = await asyncio.gather(*(loaders.run(name, lambda _: None) for name in (b"one", b"two")))
        assert {told["order"] for told in both} == {"one", "two"} and both[0]["pid"] != both[1]["pid"]
        await loaders.close()

    asyncio.run(run())


def test_one_that_dies_while_it_waits_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.0)

    async def run() -> None:
        loaders = Loaders(Children(), DIRECTORY)
        loaders.wait_soon(0.0)
        first = await waiting(loaders)
        loaders.waits.clear()  # set again by the next one
        os.kill(first, signal.SIGKILL)
        second = await waiting(loaders)
        assert second != first
        assert (await loaders.run(b"order", lambda _: None))["pid"] == second
        await loaders.close()

    asyncio.run(run())


def test_what_it_says_went_wrong_is_raised_and_a_death_is_named() -> None:
    async def run() -> None:
        loaders = Loaders(Children(), DIRECTORY)
        with pytest.raises(SourceMissing, match="nothing there"):
            await loaders.run(b"bad", lambda _: None)
        with pytest.raises(LoadError, match="signal 9"):
            await loaders.run(b"die", lambda _: None)
        await loaders.close()

    asyncio.run(run())


def test_what_the_user_set_for_the_c_library_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert loader_environment()["GLIBC_TUNABLES"].startswith("glibc.malloc.check=1:glibc.cpu.")
