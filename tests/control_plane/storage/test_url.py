"""Which database a setting names, and how a statement's parameters are numbered."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.database.placeholders import numbered
from control_plane.database.url import is_postgresql, sqlite_path, without_password
from control_plane.environment import BadVariable, apply_environment
from control_plane.errors import StorageUnavailable
from control_plane.settings import Settings


@pytest.mark.parametrize("where", ["sqlite:///var/stoker.db", "sqlite:////var/stoker.db", "/var/stoker.db"])
def test_a_file_is_named_by_url_or_path(where: str) -> None:
    assert not is_postgresql(where)
    assert sqlite_path(where) == Path("/var/stoker.db")


@pytest.mark.parametrize("where", ["sqlite://host/x", "sqlite:///", "mysql://host/x"])
def test_other_urls_are_refused(where: str) -> None:
    with pytest.raises(StorageUnavailable):
        sqlite_path(where) if not is_postgresql(where) else None
    with pytest.raises(BadVariable, match="STOKER_DATABASE"):
        apply_environment(Settings(Path("/d")), {"STOKER_DATABASE": where})


def test_the_setting_names_the_database_and_without_it_the_data_directory_does() -> None:
    assert Settings(Path("/d")).database_url == "/d/stoker.db"
    url = "postgresql://stoker@db:5433/stoker"
    assert apply_environment(Settings(Path("/d")), {"STOKER_DATABASE": url}).database_url == url


def test_a_password_is_not_shown() -> None:
    assert without_password("postgresql://u:p@h:1/n?sslmode=require") == "postgresql://u@h:1/n"


def test_names_are_numbered_once_each_and_casts_are_left_alone() -> None:
    assert numbered("SELECT :a, x::text WHERE b = :b AND c = :a") == (
        "SELECT $1, x::text WHERE b = $2 AND c = $1",
        ("a", "b"),
    )
    assert numbered("SELECT ?, ?") == ("SELECT $1, $2", None)
