"""Options that most commands take, and how a command is registered.

Limits: errors are reported in one way; a command that answers a program says so by `as_json`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from control_plane.cli.failure import reported

DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", "-d", help="The service's directory [STOKER_DATA_DIR, else ~/.local/share/stoker]."),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="The service's address, or several: URL,URL [STOKER_URL]; key: STOKER_API_KEY."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer as JSON, for programs.")]

F = TypeVar("F", bound=Callable[..., None])


def command(parent: typer.Typer, name: str) -> Callable[[F], F]:
    """Registers a command whose errors are reported in one way."""

    def register(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> None:
            with reported(as_json=bool(options.get("as_json"))):
                function(*args, **options)

        parent.command(name)(run)
        return function

    return register
