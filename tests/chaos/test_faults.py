"""Fifty random faults over a mixed load, eight requests at a time: nothing lost, doubled, changed, no wrong KV used."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.faults import ENVIRONMENT, close_and_look, run_faults
from tests.chaos.ground import Servers
from tests.chaos.twins import collect_twins
from tests.support import postgres
from tests.support.checkpoints import make_tiny_llama
from tests.support.faulty_proxy import FaultyProxy
from tests.support.seaweed import ADMIN, NotInstalled, Seaweed
from tests.support.service import Service

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
FAULTS = int(os.environ.get("STOKER_CHAOS_FAULTS", "50"))
SEED = int(os.environ.get("STOKER_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
SERVER_FAULTS = int(os.environ.get("STOKER_CHAOS_FAULTS", "15"))
SCALING = {"keep_alive": 60, "max_replicas": 2, "target_concurrency": 4}
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
    service.deploy("tiny", f"file://{checkpoint}", scaling=SCALING, engine_options=ENGINE)

    report = run_faults(service, "tiny", twins, seed=SEED, faults=FAULTS, max_tokens=96, on_done=print)
    close_and_look(service, report)
    print(report)
    verdict = report.verdict
    assert not verdict.problems, f"STOKER_CHAOS_SEED={SEED}:\n" + "\n".join(verdict.problems)
    assert verdict.resumes, "nothing was ever resumed"


def test_faults_of_database_and_store_servers_lose_double_and_change_nothing(tmp_path: Path) -> None:
    if (reason := postgres.missing()) is not None:
        pytest.skip(reason)
    pytest.importorskip("boto3", reason="the extra s3 is not installed")
    try:
        seaweed = Seaweed(tmp_path / "seaweed")
    except NotInstalled as error:
        pytest.skip(str(error))
    checkpoint = make_tiny_llama(tmp_path / "tiny", layers=4, hidden=128, heads=4, kv_heads=2)
    # What a commit has told is to be there after a kill of the server.
    with (
        postgres.server({"synchronous_commit": "on"}) as server,
        seaweed,
        FaultyProxy(seaweed.port) as proxy,
        server.database() as url,
        Service(
            tmp_path / "data",
            env=ENVIRONMENT | ADMIN.environ(),
            args=("--database", url, "--store", seaweed.uri("kv", endpoint=proxy.url)),
        ) as service,
    ):
        service.deploy("tiny", f"file://{checkpoint}", scaling=SCALING, engine_options=ENGINE)
        report = run_faults(
            service,
            "tiny",
            (),
            seed=SEED,
            faults=SERVER_FAULTS,
            max_tokens=96,
            servers=Servers(server, url, seaweed, proxy),
            on_done=print,
        )
        close_and_look(service, report)
    print(report)
    assert not report.verdict.problems, f"STOKER_CHAOS_SEED={SEED}:\n" + "\n".join(report.verdict.problems)
    assert report.verdict.resumes, "nothing was ever resumed"
