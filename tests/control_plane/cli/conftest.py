"""One service with the stub engine, and the command line run against it in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

from control_plane.cli.main import app
from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service


@dataclass(frozen=True)
class Said:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Stoker: TypeAlias = Callable[..., Said]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("cli")
    make_tiny_llama(folder / "tiny")
    with Service(folder / "data", env={"STOKER_STUB_TOKEN_S": "0.02"}) as service:
        yield service


@pytest.fixture(scope="module")
def model(service: Service) -> str:
    return f"file://{service.data_dir.parent / 'tiny'}"


@pytest.fixture
def stoker(monkeypatch: pytest.MonkeyPatch, service: Service) -> Stoker:
    monkeypatch.setenv("STOKER_DATA_DIR", str(service.data_dir))
    monkeypatch.delenv("STOKER_URL", raising=False)
    monkeypatch.delenv("STOKER_API_KEY", raising=False)
    return run


def run(*arguments: str, stdin: str | None = None) -> Said:
    done = CliRunner().invoke(app, list(arguments), input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Said(done.exit_code, done.stdout, done.stderr)
