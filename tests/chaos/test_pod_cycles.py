"""Twenty-five times from zero to answers and back to zero over slots that are pods, under faults of the cluster and of
the control plane: nothing lost, left behind, doubled or shared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.pod_cycles import Cycles
from tests.chaos.seeds import SEED

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
CYCLES = int(os.environ.get("STOKER_CHAOS_CYCLES", "25"))


def test_cycles_of_pods_lose_leave_double_and_share_nothing(tmp_path: Path) -> None:
    print(f"STOKER_CHAOS_SEED={SEED}")
    with Cycles(tmp_path, SEED) as cycles:
        found = cycles.run(CYCLES, print)
    print(found)
    assert found.problems == [], f"STOKER_CHAOS_SEED={SEED}"
    assert found.cycles == CYCLES and found.replicas >= 2 * CYCLES, "each cycle wakes both functions"
    assert found.moved + found.resumes > 0, "some answers were met in the middle, by a pod's end or a control plane's"
