"""Two `stoker up` on one PostgreSQL: a function's queue has one bound, whoever is asked, also when one is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.postgres import PostgresServer
from tests.support.service import HttpError, Service

pytestmark = pytest.mark.e2e

BOUND = 8
PLACES = 1
"""What the only replica takes beside the queue; the other gateway counts it as well."""
BODY = {"model": "stub", "input": "hello", "max_output_tokens": 1000, "background": True}


@pytest.fixture
def pair(postgres: PostgresServer, tmp_path: Path) -> Iterator[list[Service]]:
    checkpoint = make_tiny_llama(tmp_path / "tiny")
    with postgres.database() as url:
        env = {
            "STOKER_STUB_TOKEN_S": "0.1",
            "STOKER_LEASE_S": "3",
            "STOKER_DATABASE": url,
            "STOKER_STORE": (tmp_path / "objects").as_uri(),
            "STOKER_QUEUE_REQUESTS": str(BOUND),
        }
        services = [
            Service(tmp_path / name, env=env, args=("--slots", slots)) for name, slots in (("one", "1"), ("two", "0"))
        ]
        try:
            for service in services:
                service.start()
            scaling = {"keep_alive": 30, "max_replicas": 1, "target_concurrency": 1, "max_concurrency": PLACES}
            services[0].deploy("stub", f"file://{checkpoint}", engine="stub", scaling=scaling)
            services[1].wait_imported("stub")
            yield services
        finally:
            for service in services:
                service.close()


def ask(service: Service) -> str | None:
    """The id of what was accepted; None: the queue is full."""
    try:
        answer: dict[str, Any] = service.call("POST", "/v1/responses", BODY)
        return str(answer["id"])
    except HttpError as error:
        assert error.status == 429, error
        return None


def ask_all(services: list[Service], each: int) -> list[str]:
    """All at once, at every gateway."""
    found: list[str | None] = []

    def work(service: Service) -> None:
        found.extend(ask(service) for _ in range(each))

    threads = [threading.Thread(target=work, args=(service,)) for service in services for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each for each in found if each is not None]


def test_the_bound_holds_at_both_and_over_the_death_of_one(pair: list[Service]) -> None:
    accepted = ask_all(pair, 8)
    # What runs does not wait; nor does, for each other gateway, what found the same place free.
    assert BOUND - 2 <= len(accepted) <= BOUND + 2 * PLACES
    time.sleep(2.5)  # what is claimed and not used is back
    accepted += ask_all([pair[1]], 3)
    assert len(accepted) <= BOUND + 2 * PLACES
    assert pair[1].kill("gateway")
    deadline = time.monotonic() + 20
    waiting = pair[0].call("GET", "/api/v1/functions/stub/status")["status"]
    while waiting["waiting"] + waiting["running"] < len(accepted):
        assert time.monotonic() < deadline, waiting
        time.sleep(0.1)
        waiting = pair[0].call("GET", "/api/v1/functions/stub/status")["status"]
    assert len(accepted) + len(ask_all([pair[0]], 4)) <= BOUND + 2 * PLACES
    for response_id in accepted:
        pair[0].call("POST", f"/v1/responses/{response_id}/cancel")
    assert ask(pair[0]) is not None
