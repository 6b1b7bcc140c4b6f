"""Small checkpoints, made once, copied where a test changes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from model_loader.importer import import_model
from model_loader.manifest import Manifest
from tests.support.checkpoints import make_tiny_llama
from tests.support.gguf_files import make_tiny_gguf


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_gguf_source(tiny_source: Path) -> Path:
    return make_tiny_gguf(tiny_source.parent / "tiny.gguf", tiny_source)


@pytest.fixture
def tiny(tiny_source: Path, tmp_path: Path) -> Path:
    """A safetensors directory the test may change."""
    return Path(shutil.copytree(tiny_source, tmp_path / "model"))


@pytest.fixture
def tiny_gguf(tiny_gguf_source: Path, tmp_path: Path) -> Path:
    """A GGUF file the test may change."""
    return Path(shutil.copy(tiny_gguf_source, tmp_path / "tiny.gguf"))


@pytest.fixture
def imported(tmp_path: Path) -> Callable[[Path], Manifest]:
    return lambda path: import_model(f"file://{path}", tmp_path / "models")


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The real model, imported."""
    return import_model(f"file://{smollm2_gguf}", tmp_path_factory.mktemp("smollm2"))
