"""One whole service per module, with the stub engine behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

TOKEN_S = "0.02"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("e2e")
    checkpoint = make_tiny_llama(folder / "tiny")
    with Service(folder / "data", env={"STOKER_STUB_TOKEN_S": TOKEN_S}) as service:
        service.deploy("stub", f"file://{checkpoint}", engine="stub", scaling={"keep_alive": 2})
        yield service
