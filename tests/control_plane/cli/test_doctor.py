"""`stoker doctor`: well where all is well; what is wrong is named with what to do, and the exit status says so."""

from __future__ import annotations

import pytest

from tests.control_plane.cli.conftest import Stoker
from tests.support.service import Service


def test_all_is_well_in_a_line_each(stoker: Stoker) -> None:
    done = stoker("doctor")
    assert done.status == 0, done.out
    lines = done.out.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    names = [line[7:].partition("  ")[0].strip() for line in lines]
    assert names == ["service", "database", "object store", "secrets", "slots", "devices", "models", "gateways"]


def test_a_secret_that_is_not_there_and_a_model_that_failed_are_wrong(stoker: Stoker, model: str) -> None:
    spec = f"name: needy\nmodel: {model}\nengine: stub\nsecrets: {{TOKEN: not-there}}\n"
    assert stoker("deploy", "-", stdin=spec).status == 0
    missing = model.replace("/tiny", "/missing")
    assert stoker("deploy", "broken", "--model", missing).status == 1
    try:
        done = stoker("doctor", "--json")
        assert done.status == 1
        wrong = {check["name"]: check for check in done.json["data"] if not check["ok"]}
        assert set(wrong) == {"secrets", "models"}
        assert "the secret not-there of needy is not there" in wrong["secrets"]["says"]
        assert "stoker models import" in wrong["models"]["do"]
        assert "next: " in stoker("doctor").out
    finally:
        stoker("delete", "needy")
        stoker("delete", "broken")


def test_a_service_that_does_not_answer_is_wrong(stoker: Stoker) -> None:
    done = stoker("doctor", "--url", "http://127.0.0.1:9")
    assert done.status == 1
    assert done.out.startswith("WRONG  service")
    assert "kubectl" in done.out


def test_a_user_is_told_that_it_takes_an_admin(
    stoker: Stoker, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = stoker("keys", "create", "somebody", "--json").json["key"]
    monkeypatch.setenv("STOKER_API_KEY", key)
    done = stoker("doctor", "--url", service.url)
    assert done.status == 1
    assert "key" in done.out
    assert "admin" in done.out
