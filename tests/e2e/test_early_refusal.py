"""A real service under overload: who would come too late is refused and told when to come back; at zero nobody is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.service import HttpError, Service

pytestmark = pytest.mark.e2e

OBJECTIVE_S = 1.0
SCALING = {
    "max_replicas": 1,
    "max_concurrency": 2,
    "target_concurrency": 2,
    "keep_alive": 0.5,
    "objectives": {"first_token_s": OBJECTIVE_S},
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    checkpoint = make_tiny_llama(tmp_path / "tiny")
    env = {"STOKER_STUB_TOKEN_S": "0.05", "STOKER_STUB_START_S": "0.5"}
    with Service(tmp_path / "data", env=env) as service:
        service.deploy("stub", f"file://{checkpoint}", engine="stub", scaling=SCALING)
        yield service


def ask(service: Service, tokens: int) -> HttpError | None:
    """None: answered."""
    body = {"model": "stub", "prompt": "hello", "max_tokens": tokens, "seed": 1}
    try:
        answer = service.call("POST", "/v1/completions", body)
    except HttpError as error:
        return error
    assert answer["usage"]["completion_tokens"] == tokens
    return None


def ask_at_once(service: Service, count: int, tokens: int) -> list[HttpError]:
    refused: list[HttpError] = []

    def work() -> None:
        error = ask(service, tokens)
        if error is not None:
            refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return refused


def wait_zero(service: Service) -> None:
    deadline = time.monotonic() + 30
    while service.replicas():
        assert time.monotonic() < deadline, "the function did not go to zero"
        time.sleep(0.05)


def test_overload_is_refused_early_and_honestly_and_a_request_at_zero_never(service: Service) -> None:
    # At zero, and nothing measured: all of them start one replica and wait for it.
    assert ask_at_once(service, 4, 20) == []
    # Two places, 0.6 s a request: of 14 at once no more than a few can have their first token within a second.
    asked_s = time.monotonic()
    refused = ask_at_once(service, 14, 12)
    assert 4 <= len(refused) <= 12
    for error in refused:
        assert error.status == 429 and "first_token_objective" in str(error)
        assert float(error.headers["x-stoker-first-token-s"]) > OBJECTIVE_S
        assert float(error.headers["retry-after-ms"]) > 0
    told = service.call("GET", "/api/v1/why/stub")["timeline"]
    assert [event for event in told if event["what"] == "refuse"]
    # Who obeys is taken: nobody else comes.
    latest_s = max(float(error.headers["retry-after-ms"]) for error in refused) / 1000
    time.sleep(max(latest_s - (time.monotonic() - asked_s), 0.0))
    assert ask(service, 2) is None
    # At zero again: what was measured is known, the start takes half of the objective, and still nobody is refused.
    wait_zero(service)
    assert ask_at_once(service, 14, 4) == []
