"""`stoker retention`: what a tenant sets for itself, over `/api/v1/retention`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli.options import DataDirOption, JsonOption, UrlOption, command

retention_app = typer.Typer(
    help="How long what is over of your requests is kept.", no_args_is_help=True, rich_markup_mode=None
)
_PATH = "/api/v1/retention"


@command(retention_app, "show")
def show(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """How long logs and requests are kept after their end, and whose rule that is."""
    _ask(data_dir, url, "GET", None, as_json)


@command(retention_app, "set")
def set_(
    log_s: Annotated[
        float | None, typer.Option("--log", min=0, help="Seconds that log and input are kept [the installation's].")
    ] = None,
    request_s: Annotated[
        float | None, typer.Option("--request", min=0, help="Seconds that the request is known [the installation's].")
    ] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set both; what has ended before goes by it, too."""
    _ask(data_dir, url, "PUT", {"log_s": log_s, "request_s": request_s}, as_json)


@command(retention_app, "reset")
def reset(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Back to the installation's rule."""
    _ask(data_dir, url, "DELETE", None, as_json)


def _ask(data_dir: Path | None, url: str | None, method: str, body: dict[str, Any] | None, as_json: bool) -> None:
    from control_plane.cli.connection import connect
    from control_plane.cli.output import print_json

    answer = connect(data_dir, url).request(method, _PATH, body=body)
    if as_json:
        print_json(answer)
        return
    for name, what in (("log_s", "log and input"), ("request_s", "times, usage, outcome")):
        whose = "the installation's rule" if answer["own"][name] is None else f"tenant {answer['tenant']}'s own"
        print(f"{what}: kept {answer[name]:g} s after the end ({whose})")
