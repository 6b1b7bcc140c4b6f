"""`stoker kv ...`: what each command is called and takes. What it does lives in `control_plane.cli.kv`."""

from __future__ import annotations

from typing import Annotated

import typer

from control_plane.cli.options import DataDirOption, JsonOption, UrlOption, command

kv_app = typer.Typer(help="Stored KV of prompts and conversations.", no_args_is_help=True, rich_markup_mode=None)


@command(kv_app, "ls")
def kv_ls(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """What is kept: packs with their size, use and state."""
    from control_plane.cli.kv import show_kv

    show_kv(data_dir, url, as_json)


@command(kv_app, "inspect")
def kv_inspect(
    name: Annotated[
        str, typer.Argument(metavar="PACK|CHAIN", help="First digits of a pack, or a chunk's whole chain.")
    ],
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a pack holds, by its own headers: chunks, positions, layers, identity."""
    from control_plane.cli.kv import inspect_kv

    inspect_kv(data_dir, url, name, as_json)


@command(kv_app, "verify")
def kv_verify(
    packs: Annotated[list[str] | None, typer.Argument(metavar="[PACK]...", help="Packs [all that are live].")] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte again; what is not as it was written is quarantined. Exit 1 if anything was."""
    from control_plane.cli.kv import verify_kv

    verify_kv(data_dir, url, packs or [], as_json)


@command(kv_app, "rebuild-index")
def kv_rebuild_index(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Make the index again from the headers of what lies in the store."""
    from control_plane.cli.kv import rebuild_index

    rebuild_index(data_dir, url, as_json)


@command(kv_app, "gc")
def kv_gc(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Collect now: what nothing leads to, what is not worth its bytes or over quota, what nobody names."""
    from control_plane.cli.kv import collect_kv

    collect_kv(data_dir, url, as_json)
