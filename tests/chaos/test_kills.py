"""Fifty kills at random points of streams, with a tiny model: nothing lost, doubled or changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.killing import VICTIMS, audit, kill_rounds
from tests.chaos.seeds import SEED
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
ROUNDS = int(os.environ.get("STOKER_CHAOS_ROUNDS", "50"))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "data") as running:
        yield running


def test_fifty_kills_lose_double_and_change_nothing(service: Service, tmp_path: Path) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny", layers=4, hidden=128, heads=4, kv_heads=2)
    # Without cached or stored prefixes a repeated prompt is computed as the first time: equal means byte for byte.
    service.deploy(
        "tiny",
        f"file://{checkpoint}",
        scaling={"keep_alive": 60},
        engine_options={"prefix_cache": False},
        share_prefixes="none",
    )
    report = kill_rounds(service, "tiny", rounds=ROUNDS, seed=SEED, max_tokens=200)
    assert not report.problems, f"STOKER_CHAOS_SEED={SEED}:\n" + "\n".join(report.problems)
    killed = {victim: sum(r.killed for r in report.rounds if r.victim == victim) for victim in VICTIMS}
    assert min(killed.values()) > 0, f"some victims were never there to be killed: {killed}"
    service.call("DELETE", "/api/v1/functions/tiny")
    service.wait_zero()
    counts = audit(service.data_dir)
    assert counts["done"] >= ROUNDS
