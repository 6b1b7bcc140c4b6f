"""Fifty random faults over a mixed load, eight requests at a time: nothing lost, doubled, changed, no wrong KV used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.faults import FUNCTION, Report, under_fire
from tests.chaos.seeds import SEED

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
GIVEN = int(os.environ.get("STOKER_CHAOS_FAULTS", "0"))


def assert_sound(report: Report) -> None:
    print(report)
    assert not report.verdict.problems, f"STOKER_CHAOS_SEED={SEED}:\n" + "\n".join(report.verdict.problems)
    assert report.verdict.resumes, f"nothing of {FUNCTION} was ever resumed"


def test_fifty_faults_lose_double_and_change_nothing(tmp_path: Path) -> None:
    assert_sound(under_fire(tmp_path, "one gateway", seed=SEED, faults=GIVEN or 50, on_done=print))
