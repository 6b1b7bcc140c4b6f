"""The benchmark's rounds: each is written down, one that fails stops none, and what was written is not run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import faults, report
from tests.chaos.faults import Report
from tests.chaos.schedule import Fault
from tests.chaos.victims import Done

SITES = ("one gateway", "two gateways")


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    return tmp_path / "results" / "faults.json"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Instead of running rounds, says which: (service, seed, faults). Seed 12 fails."""
    said: list[tuple[str, int, int]] = []

    def under_fire(folder: Path, kind: str, *, seed: int, faults: int, on_done: Any, **_: Any) -> Report:
        said.append((kind, seed, faults))
        done = Done(Fault(0, "kill replica", 10, seed), hit="replica 1")
        on_done(done)
        (folder / "up.log").write_text("what a service leaves")
        if seed == 12:
            raise RuntimeError("the service did not start")
        return Report(seed, [done], states={"done": 3})

    monkeypatch.setattr(faults, "under_fire", under_fire)
    return said


def test_a_round_that_fails_is_told_kept_and_stops_none(
    ran: list[tuple[str, int, int]], results: Path, tmp_path: Path
) -> None:
    found = faults.run(3 * faults.ROUND + 10, 11, SITES, [], tmp_path / "kept")
    assert ran == [
        ("two gateways", 11, 200),
        ("one gateway", 12, 200),
        ("two gateways", 13, 200),
        ("one gateway", 14, 10),
    ]
    assert (found["faults"], found["states"]) == (4, {"done": 9})
    (lost,) = found["lost"]
    assert lost.startswith("seed 12 (one gateway): the round ended after 1 faults: ")
    assert "the service did not start" in lost
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["round-12", "round-12.txt"]
    assert json.loads(results.read_text())["lost"] == found["lost"]


def test_what_was_written_is_not_run_again(ran: list[tuple[str, int, int]], results: Path) -> None:
    faults.run(faults.ROUND, 11, SITES, [], None)
    seed, rounds = faults.earlier(0)
    assert (seed, [row["seed"] for row in rounds]) == (11, [11])
    found = faults.run(2 * faults.ROUND, seed, SITES, rounds, None)
    assert [seed for _, seed, _ in ran] == [11, 12]
    assert [row["seed"] for row in json.loads(results.read_text())["rounds"]] == [11, 12]
    assert found["hits"] == {"kill replica": 2}
    with pytest.raises(SystemExit, match="is of seed 11, not 5"):
        faults.earlier(5)
