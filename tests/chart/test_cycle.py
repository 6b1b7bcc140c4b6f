"""The script of `helm test` against a service of this machine: zero, an answer, zero; and what it says if not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.rendering import CHART
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny").as_uri()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("cycle") / "data") as service:
        yield service


def cycle(service: Service, **environment: str) -> subprocess.CompletedProcess[str]:
    key = (service.data_dir / "admin.key").read_text().strip()
    told = {**os.environ, "STOKER_URL": service.url, "STOKER_API_KEY": key, "STOKER_TEST_STEP_S": "60", **environment}
    # As the chart hands it over: the text of the file, with nothing beside it.
    script = (CHART / "files" / "cycle.py").read_text()
    return subprocess.run(
        [sys.executable, "-I", "-c", script], env=told, capture_output=True, text=True, timeout=240, check=False
    )


def test_it_goes_from_zero_to_an_answer_and_back_and_leaves_nothing(service: Service, model: str) -> None:
    done = cycle(service, STOKER_TEST_MODEL=model)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert steps == ["ready", "deployed at zero", "woken by a call", "and at zero again"]
    assert service.call("GET", "/api/v1/functions")["data"] == []


def test_what_does_not_come_true_fails_with_what_was_seen(service: Service) -> None:
    missing = Path(service.data_dir) / "no-such-model"
    done = cycle(service, STOKER_TEST_MODEL=missing.as_uri())
    assert done.returncode == 1
    assert f"{missing.as_uri()} cannot be used: " in done.stderr
    assert service.call("GET", "/api/v1/functions")["data"] == []


def test_a_service_that_is_not_ready_is_named_with_its_reason(service: Service) -> None:
    done = cycle(service, STOKER_TEST_MODEL="none", STOKER_URL="http://127.0.0.1:9", STOKER_TEST_STEP_S="1")
    assert done.returncode == 1
    assert "after 1 s the service ready is not so; last seen: " in done.stderr
