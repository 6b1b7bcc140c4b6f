"""Fifty random faults over imports, loads and evictions: no wrong tensor, no stuck lease, no file left, every failure
named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.loads import STEPS, Loads
from tests.chaos.seeds import SEED

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]
FAULTS = 50


def test_no_fault_of_a_load_is_ever_more_than_a_named_failure(tmp_path: Path) -> None:
    with Loads(tmp_path, SEED) as loads:
        found = loads.run(FAULTS, print)
    assert found.problems == [], f"seed {SEED}"
    assert len(found.steps) == FAULTS >= len(STEPS)
    assert found.failures > 0
