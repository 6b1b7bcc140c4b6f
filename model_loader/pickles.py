"""Formats that can run code when they are read: refused by name, with the command that converts them.

Nothing of such a file is opened here. The command reads it with `weights_only=True`, on a machine the user chooses.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from model_loader.errors import SourceRefused, shown

PICKLE_SUFFIXES: Final = (
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill", ".th", ".pth.tar", ".nemo", ".mar",
)  # fmt: skip
PICKLE_STARTS: Final = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""How pickles of the protocols in use begin, and zip archives, which PyTorch puts them in."""


def is_pickle(name: str) -> bool:
    return PurePosixPath(name).name.lower().endswith(PICKLE_SUFFIXES)


def refuse_pickle(name: str, where: str = "") -> None:
    """Raises if the name is that of a pickle; `where` is the path or URI that named it."""
    if is_pickle(name):
        raise SourceRefused(
            f"{where or name} is a pickle, which can run code when it is read: convert it to safetensors where you "
            f"trust it, and import the result: {conversion(where or name)}"
        )


def refuse_pickles(root: Path, names: Iterable[str]) -> None:
    """A directory that holds pickles where its weights should be."""
    found = sorted(name for name in names if is_pickle(name))
    if found:
        raise SourceRefused(
            f"{root / found[0]} is a pickle, which can run code when it is read: convert the model to safetensors "
            f"where you trust it, and import the result: {directory_conversion(str(root))}"
        )


def conversion(path: str) -> str:
    """For one file of tensors."""
    is_local = path.startswith(("/", "file:///"))
    source = path.removeprefix("file://") if is_local else PurePosixPath(path).name
    target = str(PurePosixPath(source).with_suffix(".safetensors"))
    code = (
        "import sys, torch; from safetensors.torch import save_file; "
        'tensors = torch.load(sys.argv[1], map_location="cpu", weights_only=True); '
        "save_file({name: t.contiguous().clone() for name, t in tensors.items()}, sys.argv[2])"
    )
    return f"python -c {shlex.quote(code)} {shlex.quote(shown_path(source))} {shlex.quote(shown_path(target))}"


def directory_conversion(model: str) -> str:
    """For a model directory, or a repository of the hub."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        'M.from_pretrained(sys.argv[1], torch_dtype="auto").save_pretrained(sys.argv[2], safe_serialization=True); '
        "T.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
    )
    target = model.rstrip("/").rpartition("/")[2] + "-safetensors"
    return f"python -c {shlex.quote(code)} {shlex.quote(shown_path(model))} {shlex.quote(shown_path(target))}"


def shown_path(path: str) -> str:
    return path if len(path) <= 512 else shown(path)
