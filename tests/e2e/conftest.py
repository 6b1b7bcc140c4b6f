"""One whole service per module, with the stub engine behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.town import POOL, town
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

TOKEN_S = "0.02"


@contextlib.contextmanager
def stub_service(folder: Path) -> Iterator[Service]:
    with Service(folder / "data", env={"STOKER_STUB_TOKEN_S": TOKEN_S}) as service:
        deploy(service, folder)
        yield service


@contextlib.contextmanager
def stub_pods(folder: Path) -> Iterator[Service]:
    """Its slots are pods, which stay a little longer than their replicas, as a machine's slot does."""
    with town(folder, POOL, {"STOKER_SLOT_HOLD_S": "5"}) as place:
        place.cluster.kubelet.image_environment["STOKER_STUB_TOKEN_S"] = TOKEN_S
        deploy(place.service, folder)
        yield place.service


def deploy(service: Service, folder: Path) -> None:
    checkpoint = make_tiny_llama(folder / "tiny")
    service.deploy("stub", f"file://{checkpoint}", engine="stub", scaling={"keep_alive": 2})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with stub_service(tmp_path_factory.mktemp("e2e")) as running:
        yield running
