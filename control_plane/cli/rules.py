"""`stoker retention` and `stoker budgets`: the rules of a tenant, over `/api/v1/retention` and `/api/v1/budgets`."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli.options import DataDirOption, JsonOption, UrlOption, command

retention_app = typer.Typer(
    help="How long what is over of your requests is kept.", no_args_is_help=True, rich_markup_mode=None
)
budgets_app = typer.Typer(
    help="What a tenant or a key may spend in a minute, hour, day or month.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_PATH = "/api/v1/retention"
_BUDGETS = "/api/v1/budgets"

KindArgument = Annotated[str, typer.Argument(metavar="KIND", help="requests, tokens or microusd.")]
PeriodArgument = Annotated[str, typer.Argument(metavar="PERIOD", help="minute, hour, day or month.")]
KeyOption = Annotated[str | None, typer.Option("--key", metavar="ID", help="Of this key only [the whole tenant].")]
TenantOption = Annotated[
    str | None, typer.Option("--tenant", help="Of another tenant; for who runs the installation [your own].")
]


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


@command(budgets_app, "ls")
def budgets_ls(
    tenant: TenantOption = None, data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Budgets and what is spent of them in the present period, over all gateways."""
    from control_plane.cli.connection import connect
    from control_plane.cli.output import print_json, print_table

    answer = connect(data_dir, url).request("GET", _with(_BUDGETS, tenant=tenant))
    if as_json:
        print_json(answer)
        return
    rows = [(each["key"] or "all keys", each["kind"], each["period"], f"{each['amount']}", f"{each['spent']}")
            for each in answer["data"]]  # fmt: skip
    print_table(("OF", "KIND", "PERIOD", "AMOUNT", "SPENT"), rows, empty="no budgets")


@command(budgets_app, "set")
def budgets_set(
    kind: KindArgument,
    period: PeriodArgument,
    amount: Annotated[int, typer.Argument(min=0, metavar="AMOUNT", help="How many; money in micro-dollars.")],
    key: KeyOption = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Refuse new requests (429) once so much is spent, until the period is over."""
    from control_plane.cli.connection import connect
    from control_plane.cli.output import print_json

    body = {"kind": kind, "period": period, "amount": amount, "key": key or ""}
    answer = connect(data_dir, url).request("PUT", _with(_BUDGETS, tenant=tenant), body=body)
    if as_json:
        print_json(answer)
    else:
        print(
            f"{answer['key'] or 'tenant ' + answer['tenant']}: {amount} {kind} in a {period}, {answer['spent']} spent"
        )


@command(budgets_app, "rm")
def budgets_rm(
    kind: KindArgument,
    period: PeriodArgument,
    key: KeyOption = None,
    tenant: TenantOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a budget away: no bound."""
    from control_plane.cli.connection import connect
    from control_plane.cli.output import print_json

    path = _with(_BUDGETS, kind=kind, period=period, key=key, tenant=tenant)
    answer = connect(data_dir, url).request("DELETE", path)
    if as_json:
        print_json(answer)
    else:
        print(f"{key or 'tenant ' + answer['tenant']} has no budget of {kind} for a {period} any more")


def _with(path: str, **query: str | None) -> str:
    given = urllib.parse.urlencode({name: value for name, value in query.items() if value})
    return f"{path}?{given}" if given else path


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
