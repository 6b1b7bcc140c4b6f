"""Compiled kernels that outlive their replica: kept per checkpoint, device kind and versions, brought back before the
first request.

    restore: the slot's directory has them | the store has an archive of exactly this key -> verified -> directory
    keep:    what the compilers added since -> one archive, under the key's name

The key names everything the code depends on, and is repeated inside the archive; an archive of another key, or with a
byte changed, is not unpacked. Triton notes where the files of a kernel lie by whole paths: those are left out of the
archive and written for the place it is unpacked to, so that what is used is what was verified, and nothing beside it.
Nothing here is needed: whatever fails costs the time of compiling, never a start.
Limits: whoever may write to the object store can put code into replicas, as with the functions' own handlers; two
replicas that keep at the same time overwrite one another, and the later one's archive is the one that stays.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model_loader.errors import FormatError, IntegrityError, MissingObject, StoreError
from model_loader.forms.sweeping import artifact_key
from model_loader.objects import ObjectStore

MAGIC: Final = b"STOKRAR1"
_PREFIX: Final = struct.Struct("<8sQ32s")
"""magic, bytes of the table, SHA-256 of the table; then the table as JSON, then the files' bytes in its order"""
MAX_BYTES: Final = 1 << 30
MAX_FILES: Final = 20_000
_MAX_TABLE_BYTES: Final = 64 << 20
STORE_S: Final = 30.0
"""For one operation of the object store: compiling anew takes about as long."""
CACHES: Final[Mapping[str, str]] = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Where the compilers keep theirs: environment variable and folder. What a kernel was specialised for (types, strides,
splits of the context) is in its file's name; this engine captures nothing else of shapes."""
_GROUP: Final = "__grp__"
"""How Triton's note of a kernel's files begins: {"child_paths": {name: path}}, all of them beside it. One whose files
are not where it says is as good as none: the kernel is compiled again."""


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    checkpoint: str
    """The checkpoint's identity, and the form it is computed in."""
    device: str
    """Kind and capability: code for one is not run on another."""
    versions: tuple[tuple[str, str], ...]
    """Of everything that makes or loads the code: compilers, driver, this engine's own kernels."""

    def fields(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "device": self.device, "versions": dict(sorted(self.versions))}

    @property
    def identity(self) -> str:
        """The checkpoint's alone: what was made of it goes with it."""
        return self.checkpoint.partition("/")[0]

    @property
    def name(self) -> str:
        """64 hexadecimal digits, the same in every process."""
        return hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Restored:
    tier: str
    """disk: the slot had them; store; none."""
    files: int
    nbytes: int
    detail: str = ""


class Artifacts:
    def __init__(self, key: ArtifactKey, root: Path, store: ObjectStore | None) -> None:
        self.key = key
        self.directory = root / key.name
        self._store = store
        self._known: frozenset[str] = frozenset()

    @property
    def object_key(self) -> str:
        return artifact_key(self.key.identity, self.key.name)

    def environment(self) -> dict[str, str]:
        """What points the compilers to the directory."""
        return {variable: str(self.directory / folder) for variable, folder in CACHES.items()}

    def restore(self) -> Restored:
        """Makes the directory what it was when somebody last kept it; empty if nobody has. Never raises."""
        try:
            found = self._restore()
        except (MissingObject, FileNotFoundError):
            found = Restored("none", 0, 0)
        except (OSError, StoreError, FormatError, IntegrityError) as error:
            found = Restored("none", 0, 0, f"not restored: {error}")
        self._known = frozenset(self._files())
        return found

    def keep(self) -> int:
        """Stores the directory if the compilers added to it; gives the archive's bytes, 0 where there is nothing new.
        Raises `StoreError`, and `OSError` for a directory that cannot be read."""
        files = self._files()
        if self._store is None or not files or set(files) <= self._known:
            return 0
        archive = pack(self.key, without_places({name: (self.directory / name).read_bytes() for name in files}))
        if len(archive) > MAX_BYTES:
            return 0
        self._store.put(self.object_key, archive, durable=False, within_s=STORE_S)
        self._known = frozenset(files)
        return len(archive)

    def _restore(self) -> Restored:
        if self.directory.is_dir():
            self._stay(self._files())
            files = self._files()
            return Restored("disk", len(files), sum((self.directory / name).stat().st_size for name in files))
        if self._store is None:
            return Restored("none", 0, 0)
        archive = self._store.get(self.object_key, within_s=STORE_S)
        unpacked = with_places(unpack(self.key, archive), self.directory)
        temporary = self.directory.with_name(f".{self.key.name}.{secrets.token_hex(4)}.tmp")
        try:
            for name, data in unpacked.items():
                path = temporary / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(data)
            try:
                os.rename(temporary, self.directory)
            except OSError:
                # Another replica of the slot was first.
                if not self.directory.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Restored("store", len(unpacked), len(archive))

    def _stay(self, files: list[str]) -> None:
        """Notes of a directory that was moved, or unpacked by an earlier version, name this one from now on."""
        there = dict.fromkeys(files, b"")
        for name in filter(_is_group, files):
            path = self.directory / name
            before = path.read_bytes()
            try:
                after = with_places(without_places({**there, name: before}), self.directory).get(name)
            except FormatError:
                after = None
            if after is None:
                path.unlink(missing_ok=True)
            elif json.loads(after) != json.loads(before):
                temporary = path.with_name(f"tmp.{secrets.token_hex(4)}")
                temporary.write_bytes(after)
                os.replace(temporary, path)

    def _files(self) -> list[str]:
        """Relative names of complete files: compilers write theirs under other names first."""
        found: list[str] = []
        for folder in CACHES.values():
            for path in sorted((self.directory / folder).rglob("*")):
                name = path.relative_to(self.directory).as_posix()
                if path.is_file() and not path.is_symlink() and "tmp" not in name and not name.endswith(".lock"):
                    found.append(name)
        return found[:MAX_FILES]


def without_places(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """As they are the same wherever they lie. Notes whose files are not all there are left out."""
    found = dict(files)
    for name in filter(_is_group, files):
        try:
            children = sorted(json.loads(files[name])["child_paths"])
        except (ValueError, TypeError, KeyError):
            children = []
        if children and all(_beside(name, child) in files for child in children):
            found[name] = json.dumps({"child_paths": {child: child for child in children}}).encode()
        else:
            del found[name]
    return found


def with_places(files: Mapping[str, bytes], directory: Path) -> dict[str, bytes]:
    """As the compilers find them in `directory`. Raises `FormatError` for a note of anything else."""
    found = dict(files)
    for name in filter(_is_group, files):
        try:
            children = [str(child) for child in json.loads(files[name])["child_paths"]]
        except (ValueError, TypeError, KeyError):
            raise FormatError(f"{name} in an archive of artifacts is no note of a kernel's files") from None
        gone = [child for child in children if _beside(name, child) not in files]
        if gone:
            raise FormatError(f"{name} in an archive of artifacts names {gone[0]!r}, which is not in it")
        places = {child: str(directory / _beside(name, child)) for child in children}
        found[name] = json.dumps({"child_paths": places}).encode()
    return found


def _is_group(name: str) -> bool:
    return name.startswith("triton/") and name.rpartition("/")[2].startswith(_GROUP)


def _beside(name: str, child: str) -> str:
    return f"{name.rpartition('/')[0]}/{child}"


def pack(key: ArtifactKey, files: Mapping[str, bytes]) -> bytes:
    listed = [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in sorted(files.items())]
    table = json.dumps({"key": key.fields(), "files": listed}, sort_keys=True).encode()
    out = io.BytesIO()
    out.write(_PREFIX.pack(MAGIC, len(table), hashlib.sha256(table).digest()))
    out.write(table)
    for name in sorted(files):
        out.write(files[name])
    return out.getvalue()


def unpack(key: ArtifactKey, archive: bytes) -> dict[str, bytes]:
    """The files by name. Raises `FormatError` (no archive, or another key's) and `IntegrityError` (bytes changed)."""
    if len(archive) < _PREFIX.size:
        raise FormatError(f"an archive of artifacts has at least {_PREFIX.size} bytes, this one {len(archive)}")
    magic, size, digest = _PREFIX.unpack_from(archive)
    if magic != MAGIC or size > min(_MAX_TABLE_BYTES, len(archive) - _PREFIX.size):
        raise FormatError("this is no archive of artifacts, or one of another version")
    raw = archive[_PREFIX.size : _PREFIX.size + size]
    if hashlib.sha256(raw).digest() != digest:
        raise IntegrityError("the table of an archive of artifacts does not match its digest")
    table = json.loads(raw)
    if table.get("key") != key.fields():
        raise FormatError(f"the archive is of {table.get('key')}, not of {key.fields()}")
    at, found = _PREFIX.size + size, dict[str, bytes]()
    for name, nbytes, expected in table["files"]:
        if name in found or not _is_plain(name):
            raise FormatError(f"an archive of artifacts names a file {name!r}")
        data = archive[at : at + nbytes]
        if len(data) != nbytes or hashlib.sha256(data).hexdigest() != expected:
            raise IntegrityError(f"{name} in an archive of artifacts does not match its digest")
        found[name] = data
        at += nbytes
    if at != len(archive):
        raise IntegrityError(f"an archive of artifacts has {len(archive) - at} bytes too many")
    return found


def _is_plain(name: str) -> bool:
    parts = name.split("/")
    return (
        parts[0] in CACHES.values()
        and len(parts) > 1
        and all(p not in ("", ".", "..") for p in parts)
        and "\0" not in name
    )
