"""Fifty random faults over imports, loads and evictions: no wrong tensor, no stuck lease, no file left, every failure
named."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos.loads import STEPS, Loads

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]
FAULTS = 50


def test_no_fault_of_a_load_is_ever_more_than_a_named_failure(tmp_path: Path) -> None:
    seed = int(os.environ.get("STOKER_CHAOS_SEED", random.randrange(1 << 31)))
    print(f"STOKER_CHAOS_SEED={seed}")
    with Loads(tmp_path, seed) as loads:
        found = loads.run(FAULTS, print)
    assert found.problems == [], f"seed {seed}"
    assert len(found.steps) == FAULTS >= len(STEPS)
    assert found.failures > 0
