"""A model that one slot has comes to the next from there; functions and control planes come and go, it stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.replica_client import wait_for
from tests.support.service import Service

pytestmark = pytest.mark.e2e

SLOW_TO_MAKE = {"make": 1.0, "copy as is": 1.0, "peer": 1e9, "disk": 1e9}
"""As if a slot had measured this: making takes for ever."""


def agent_log(service: Service, slot: int) -> str:
    return (service.data_dir / "slots" / str(slot) / "agent.log").read_text()


def test_the_second_slot_takes_the_first_one_s_form_and_the_answers_are_the_same(tmp_path: Path) -> None:
    with Service(tmp_path / "data", args=("--slots", "2")) as service:
        wait_for(lambda: len(service.pool_directories()) == 2, 60)
        pools = service.pool_directories()
        for pool in pools:
            (pool / ".rates.json").write_text(json.dumps(SLOW_TO_MAKE))
        checkpoint = make_tiny_llama(tmp_path / "tiny")
        service.deploy("tiny", f"file://{checkpoint}", scaling={"max_replicas": 2, "keep_alive": 60})
        wait_for(lambda: all(" form=" in agent_log(service, slot) for slot in (0, 1)), 60)
        told = [agent_log(service, slot) for slot in (0, 1)]
        assert sum("made: " in text for text in told) == 1, told
        assert sum("copied from peer" in text and "chunks verified" in text for text in told) == 1, told
        files = [next(iter(pool.glob("*.prepared"))).read_bytes() for pool in pools]
        assert files[0][4096 * 2 :] == files[1][4096 * 2 :]
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
        texts = {service.call("POST", "/v1/completions", body)["choices"][0]["text"] for _ in range(2)}
        service.deploy("second", f"file://{checkpoint}", scaling={"keep_alive": 60})
        service.wait_imported("second")
        held = forms(pools)
        service.kill("gateway")
        service.start()

        def pooled() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = service.call("GET", "/api/v1/why/second")["pools"]
            return found if len(found) == 2 and all(entry["load"] for entry in found) else []

        how = sorted(entry["load"] for entry in wait_for(pooled, 30))
        for name in ("tiny", "second"):
            texts.add(service.call("POST", "/v1/completions", {**body, "model": name})["choices"][0]["text"])
        assert len(texts) == 1
        assert forms(pools) == held and len(held) == 2, (
            "one form a pool for both functions, and a restart is none of it"
        )
        assert "copied from peer" in how[0] and "made: " in how[1] and all("chunks verified" in each for each in how)


def forms(pools: list[Path]) -> set[tuple[str, int]]:
    return {(str(path.parent), path.stat().st_ino) for pool in pools for path in pool.glob("*.prepared")}
