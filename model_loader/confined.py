"""Files of a model directory, and nothing else: a name or a link that leads out of it is refused.

A directory may be a link itself; what lies in it may link to its own files, and, where it is a snapshot of the hub's
cache, to that cache's blobs. Pipes, devices and sockets are refused before they are opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from model_loader.errors import FormatError, SourceMissing, SourceRefused, shown

_SNAPSHOTS: Final = "snapshots"
_BLOBS: Final = "blobs"


def confine(root: Path, name: str) -> Path:
    """The file `name` directly in `root`. Raises `SourceRefused` naming where it leads, `SourceMissing` if it is not
    there."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise SourceRefused(f"{root} is asked for a file {shown(name)}; only files directly in it are read")
    path = root / name
    return confine_path(path)


def confine_path(path: Path) -> Path:
    """`path` itself, if what it leads to lies in its own folder."""
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    if not any(target.is_relative_to(allowed) for allowed in _allowed(folder)):
        raise SourceRefused(
            f"{path} is a link to {target}, outside its own folder: put the file itself there, or name the folder "
            "it is in"
        )
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise SourceRefused(f"{path} is no ordinary file")
    return path


def read_confined(root: Path, name: str, max_bytes: int) -> bytes:
    """The whole of a small file, which is refused before it is read where it is not small."""
    path = confine(root, name)
    try:
        with open(path, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > max_bytes:
                raise FormatError(f"{path} has {nbytes} bytes; at most {max_bytes} are read")
            return file.read(nbytes + 1)[:max_bytes]
    except OSError as error:
        raise SourceMissing(f"cannot read {path}: {error.strerror}") from error


def is_there(root: Path, name: str) -> bool:
    """Whether something of that name is in the directory, a dangling link included."""
    return os.path.lexists(root / name)


def _allowed(folder: Path) -> list[Path]:
    cache = next((parent.parent for parent in (folder, *folder.parents) if parent.name == _SNAPSHOTS), None)
    return [folder] if cache is None else [folder, cache / _BLOBS]
