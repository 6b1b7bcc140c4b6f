"""Engines over tiny checkpoints; each made once per session, computed with one thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.function_runtime.engine.support import LLAMA2, LLAMA3, Checkpoint, prepare_checkpoint
from tests.support.checkpoints import make_tiny_llama


@pytest.fixture(scope="session")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Untied, two key heads for four."""
    directory = tmp_path_factory.mktemp("llama2")
    return prepare_checkpoint(make_tiny_llama(directory / "model", **LLAMA2), directory)


@pytest.fixture(scope="session")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Tied, one key head for three, llama3 rope scaling that begins to act at 64 positions."""
    directory = tmp_path_factory.mktemp("llama3")
    return prepare_checkpoint(make_tiny_llama(directory / "model", **LLAMA3), directory)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return prepare_checkpoint(smollm2_gguf, tmp_path_factory.mktemp("smollm2"))
