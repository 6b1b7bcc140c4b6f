"""`stoker quotas`: devices that tenants may hold, their weights where devices are short, and how much of their KV is
kept, over `/api/v1/quotas`."""

from __future__ import annotations

import urllib.parse
from typing import Annotated

import typer

from control_plane.cli.options import DataDirOption, JsonOption, UrlOption, command

quotas_app = typer.Typer(
    help="Devices that a tenant may hold at once, its weight where they are short, how much of its KV is kept.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_PATH = "/api/v1/quotas"

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Whose.")]


@command(quotas_app, "ls")
def quotas_ls(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """What each tenant may hold, holds and needs, and its share while devices are short."""
    from control_plane.cli.connection import connect
    from control_plane.cli.output import print_json, print_table, size

    answer = connect(data_dir, url).request("GET", _PATH)
    if as_json:
        print_json(answer)
        return
    rows = [
        (each["tenant"], _or_dash(each["devices"]), f"{each['weight']:g}", str(each["held"]),
         _or_dash(each["wanted"]), _or_dash(each["share"]), size(each["kv_bytes"]), size(each["kv_held_bytes"]))
        for each in answer["data"]
    ]  # fmt: skip
    head = ("TENANT", "DEVICES", "WEIGHT", "HELD", "NEEDED", "SHARE", "KV AT MOST", "KV KEPT")
    print_table(head, rows, empty="no tenants")


@command(quotas_app, "set")
def quotas_set(
    tenant: TenantArgument,
    devices: Annotated[
        int | None, typer.Option("--devices", min=0, help="Most that it may hold at once [no bound].")
    ] = None,
    weight: Annotated[
        float, typer.Option("--weight", min=0.001, help="Its part where devices are short, against the others'.")
    ] = 1.0,
    kv_bytes: Annotated[
        int | None,
        typer.Option("--kv-bytes", min=1, help="Most KV of its ended requests that is kept [STOKER_KV_QUOTA_BYTES]."),
    ] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bound a tenant's devices and stored KV, weigh it, or all of it: what is not said is as if never set."""
    from control_plane.cli.connection import connect
    from control_plane.cli.output import print_json, size

    body = {"devices": devices, "weight": weight, "kv_bytes": kv_bytes}
    answer = connect(data_dir, url).request("PUT", _of(tenant), body=body)
    if as_json:
        print_json(answer)
        return
    most = "any number of" if answer["devices"] is None else f"at most {answer['devices']}"
    kept = "" if answer["kv_bytes"] is None else f"; keeps at most {size(answer['kv_bytes'])} of KV"
    print(f"tenant {tenant}: {most} devices, weight {answer['weight']:g}; holds {answer['held']}{kept}")


@command(quotas_app, "rm")
def quotas_rm(
    tenant: TenantArgument, data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Back to no bound and weight 1."""
    from control_plane.cli.connection import connect
    from control_plane.cli.output import print_json

    answer = connect(data_dir, url).request("DELETE", _of(tenant))
    if as_json:
        print_json(answer)
    else:
        print(f"tenant {tenant} has no quota any more")


def _of(tenant: str) -> str:
    return f"{_PATH}?{urllib.parse.urlencode({'tenant': tenant})}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
