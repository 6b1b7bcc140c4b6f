"""Agents for the runtime's tests; each in a directory of its own, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.replica_client import AgentProcess


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Callable[..., AgentProcess]]:
    with ExitStack() as stack:

        def start(*arguments: str, name: str = "slot", env: dict[str, str] | None = None) -> AgentProcess:
            return stack.enter_context(AgentProcess(tmp_path / name, *arguments, env=env))

        yield start


@pytest.fixture
def agent(start_agent: Callable[..., AgentProcess]) -> AgentProcess:
    return start_agent()
