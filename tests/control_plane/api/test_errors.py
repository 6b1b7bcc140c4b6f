from __future__ import annotations

import pytest

from control_plane import errors
from control_plane.errors import (
    Conflict,
    InvalidRequest,
    ModelLoading,
    ModelUnusable,
    Saturated,
    StokerError,
    StorageUnavailable,
    Unauthenticated,
)

TREE = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, StokerError)]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_has_openais_form_a_status_and_a_code(kind: type[StokerError]) -> None:
    error = kind("what, which, what next", param="field")
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    assert error.body()["error"]["param"] == "field"
    assert 400 <= error.http_status < 600
    assert error.code and error.type


def test_saturated_and_loading_are_told_apart() -> None:
    assert (Saturated("x").http_status, Saturated("x").code) == (429, "saturated")
    assert (ModelLoading("x").http_status, ModelLoading("x").code) == (503, "model_loading")


def test_whether_a_retry_helps_is_said() -> None:
    assert Saturated("x").headers()["x-should-retry"] == "true"
    assert StorageUnavailable("x").headers() == {
        "Retry-After": "5", "retry-after-ms": "5000", "x-should-retry": "true",
    }  # fmt: skip
    assert ModelUnusable("x").headers() == {"x-should-retry": "false"}
    assert Conflict("x").headers() == {"x-should-retry": "false"}
    assert InvalidRequest("x").headers() == {}
    assert Unauthenticated("x").headers() == {"WWW-Authenticate": "Bearer"}


@pytest.mark.parametrize(
    ("estimate_s", "seconds", "milliseconds"),
    [(0.25, "1", "250"), (0.0, "1", "1"), (2.5, "3", "2500"), (900.0, "120", "120000")],
)
def test_a_retry_is_asked_for_no_earlier_than_estimated_and_no_later_than_clients_obey(
    estimate_s: float, seconds: str, milliseconds: str
) -> None:
    headers = ModelLoading("x", retry_after_s=estimate_s).headers()
    assert (headers["Retry-After"], headers["retry-after-ms"]) == (seconds, milliseconds)
