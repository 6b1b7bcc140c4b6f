"""Settings from environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.environment import ENVIRONMENT, BadVariable, apply_environment
from control_plane.settings import Settings


def test_every_variable_names_a_field_that_exists_and_is_documented() -> None:
    settings = Settings(Path("/nowhere"))
    for target in ENVIRONMENT.values():
        if target is not None:
            assert hasattr(getattr(settings, target[0]), target[1]), target


def test_what_is_set_is_taken_over_and_the_rest_stays() -> None:
    before = Settings(Path("/nowhere"))
    after = apply_environment(before, {"STOKER_WARM_WORKERS": "0", "STOKER_ALLOWED_MODELS": "pypi://*, hf://a/*"})
    assert after.slot.warm_workers == 0
    assert after.models.allowed == ("pypi://*", "hf://a/*")
    assert after.http == before.http


def test_the_object_store_is_the_data_directory_unless_another_is_named() -> None:
    settings = Settings(Path("/nowhere"))
    assert settings.store_uri == "file:///nowhere/objects"
    assert apply_environment(settings, {"STOKER_STORE": "s3://bucket/kv"}).store_uri == "s3://bucket/kv"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STOKER_PORT", "web"),
        ("STOKER_DRAIN_S", "nan"),
        ("STOKER_WARM_WORKERS", "-1"),
        ("STOKER_STORE", "/mnt/kv"),
        ("STOKER_STORE", "s3://bucket?nothing=1"),
    ],
)
def test_a_value_that_does_not_parse_is_named_with_its_variable(name: str, value: str) -> None:
    with pytest.raises(BadVariable, match=name):
        apply_environment(Settings(Path("/nowhere")), {name: value})
