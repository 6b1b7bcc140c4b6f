"""Fifty random faults over a mixed load, eight requests at a time: nothing lost, doubled, changed, no wrong KV used."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.faults import ENVIRONMENT, close_and_look, run_faults
from tests.chaos.twins import collect_twins
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
FAULTS = int(os.environ.get("STOKER_CHAOS_FAULTS", "50"))
SEED = int(os.environ.get("STOKER_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
ENGINE = {"prefix_cache": False, "threads": 1}
"""Without the prefix cache a repeated prompt is computed as the first time, so that equal means byte for byte."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "data", env=ENVIRONMENT) as running:
        yield running


def test_fifty_faults_lose_double_and_change_nothing(service: Service, tmp_path: Path) -> None:
    shape = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2}
    checkpoint = make_tiny_llama(tmp_path / "tiny", **shape)
    revision = make_tiny_llama(tmp_path / "revision", seed=1, **shape)
    twins = collect_twins(service, checkpoint, revision, ENGINE, prompts=1)
    scaling = {"keep_alive": 60, "max_replicas": 2, "target_concurrency": 4}
    service.deploy("tiny", f"file://{checkpoint}", scaling=scaling, engine_options=ENGINE)

    report = run_faults(service, "tiny", twins, seed=SEED, faults=FAULTS, max_tokens=96, on_done=print)
    close_and_look(service, report)
    print(report)
    verdict = report.verdict
    assert not verdict.problems, f"STOKER_CHAOS_SEED={SEED}:\n" + "\n".join(verdict.problems)
    assert verdict.resumes, "nothing was ever resumed"
