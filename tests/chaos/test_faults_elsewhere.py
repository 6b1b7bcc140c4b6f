"""Random faults where gateways are two, and where database and store are servers: the same promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import under_fire
from tests.chaos.seeds import SEED
from tests.chaos.site import missing
from tests.chaos.test_faults import GIVEN, assert_sound

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", ["two gateways", "two gateways on PostgreSQL"])
def test_faults_of_two_gateways_lose_double_and_change_nothing(tmp_path: Path, kind: str) -> None:
    if reason := missing(database="PostgreSQL" in kind, bucket=False):
        pytest.skip(reason)
    assert_sound(under_fire(tmp_path, kind, seed=SEED, faults=GIVEN or 10, on_done=print))


def test_faults_of_database_and_store_servers_lose_double_and_change_nothing(tmp_path: Path) -> None:
    if reason := missing(database=True, bucket=True):
        pytest.skip(reason)
    assert_sound(under_fire(tmp_path, "PostgreSQL and S3", seed=SEED, faults=GIVEN or 10, on_done=print))
