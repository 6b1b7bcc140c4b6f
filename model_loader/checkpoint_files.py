"""A checkpoint's files as something to read by ranges: their lists of chunks, and this machine's disk as a source.

Limits: files go by the paths they had at the last import.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from model_loader.chunks import CHUNK_BYTES, ChunkDigester, ChunkList
from model_loader.errors import IntegrityError, SourceMissing
from model_loader.manifest import Manifest, SourceFile
from model_loader.origin import origin_sources
from model_loader.portable import is_elsewhere
from model_loader.ranges.local import ColdWays, LocalSource
from model_loader.ranges.source import RangeSource, Tier

RECORDS: Final = "imports"
"""Folder of the models directory: what each import read."""
_WAYS_NAME: Final = ".cold-reads.json"
_PIECE_BYTES: Final = 1024 * 1024


def checkpoint_chunks(manifest: Manifest) -> Mapping[str, ChunkList]:
    """By path, as the import made them. For a manifest of version 1 they are made by reading every tensor once more,
    against the SHA-256 that the import made of it."""
    if known := manifest.chunk_lists():
        return {file.path: chunks for file, chunks in zip(manifest.files, known, strict=True)}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="chunks") as pool:
        lists = pool.map(lambda number: _digest_file(manifest, number), range(len(manifest.files)))
        return {file.path: chunks for file, chunks in zip(manifest.files, lists, strict=True)}


@contextlib.contextmanager
def what_next(manifest: Manifest) -> Iterator[None]:
    """Adds to what a reader says of a file, which knows of no models, what can be done about it."""
    try:
        yield
    except (IntegrityError, SourceMissing) as error:
        if manifest.uri in str(error):
            raise
        told = f"{error}; it is not what was imported from {manifest.uri}: import the model again"
        raise type(error)(told) from error


def _digest_file(manifest: Manifest, number: int) -> ChunkList:
    path = manifest.files[number].path
    waiting = sorted((t for t in manifest.tensors if t.file == number), key=lambda t: t.offset)
    digester, at = ChunkDigester(), 0
    state, index = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as opened:
            while piece := opened.read(_PIECE_BYTES):
                digester.update(piece)
                while index < len(waiting):
                    entry = waiting[index]
                    state.update(piece[max(0, entry.offset - at) : max(0, entry.offset + entry.nbytes - at)])
                    if entry.offset + entry.nbytes > at + len(piece):
                        break
                    if state.hexdigest() != entry.sha256:
                        raise IntegrityError(
                            f"{path} is not the file that was imported: tensor {entry.name} has SHA-256 "
                            f"{state.hexdigest()[:16]}…, the manifest says {entry.sha256[:16]}…; import the model again"
                        )
                    state, index = hashlib.sha256(), index + 1
                at += len(piece)
    except OSError as error:
        raise SourceMissing(
            f"the checkpoint's file {path} is gone ({error.strerror}): import the model again"
        ) from error
    if index < len(waiting):
        entry = waiting[index]
        raise IntegrityError(
            f"{path} is shorter than when it was imported: tensor {entry.name} needs bytes up to "
            f"{entry.offset + entry.nbytes}, {at} found; import the model again"
        )
    return digester.finish()


@contextlib.contextmanager
def own_sources(manifest: Manifest, remember_in: Path) -> Iterator[list[RangeSource]]:
    """This machine's files; the same files as other imports found them (looked for at once where these are not as they
    were, else when a chunk is bad); and the store they were fetched from, if they were."""
    with contextlib.ExitStack() as stack:
        sources: list[RangeSource] = []
        if is_elsewhere(manifest):
            for origin in origin_sources(manifest, streams=True):
                stack.callback(origin.close)
                sources.append(origin)
            yield sources
            return
        sources.append(stack.enter_context(local_source(manifest, remember_in)))
        if not all(file.unchanged() for file in manifest.files):
            sources += [stack.enter_context(LocalSource(paths)) for paths in other_places(manifest)]
        elif (manifest.directory.parent / RECORDS).is_dir():
            sources.append(stack.enter_context(contextlib.closing(OtherPlace(manifest))))
        for origin in origin_sources(manifest):
            stack.callback(origin.close)
            sources.append(origin)
        yield sources


class OtherPlace:
    """The same files where another import found them, looked for when they are first asked for: that a disk has rotted
    shows in no date. Limits: of several places the first that has a file."""

    name: Final = "another import's files"
    tier: Final = Tier.DISK
    range_bytes: Final = CHUNK_BYTES
    threads: Final = 1

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._lock = threading.Lock()
        self._source: LocalSource | None = None

    def size(self, file: str) -> int:
        return self._found().size(file)

    def read_into(self, file: str, offset: int, view: memoryview, *, within_s: float) -> int:
        return self._found().read_into(file, offset, view, within_s=within_s)

    def close(self) -> None:
        with self._lock:
            if self._source is not None:
                self._source.__exit__()
                self._source = None

    def _found(self) -> LocalSource:
        with self._lock:
            if self._source is None:
                paths: dict[str, Path] = {}
                for place in other_places(self._manifest):
                    paths = {**place, **paths}
                own = {file.path for file in self._manifest.files}
                others = {file: path for file, path in paths.items() if str(path) not in own}
                self._source = LocalSource(others, name=self.name)
            return self._source


def other_places(manifest: Manifest) -> list[dict[str, Path]]:
    """Where else the same checkpoint was imported from and still is, by the paths the manifest gives its files. What is
    read there is verified like everything else."""
    found: list[dict[str, Path]] = []
    for record in sorted((manifest.directory.parent / RECORDS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, SourceMissing):
            told = json.loads(record.read_bytes())
            if told["identity"] != manifest.identity or told["uri"] == manifest.uri:
                continue
            # Whether they were touched since does not matter: every chunk is verified.
            there = [file for file in (SourceFile(**each) for each in told["files"]) if _has_length(file)]
            paths: dict[str, Path] = {}
            for wanted in manifest.files:
                same = [Path(f.path) for f in there if f.nbytes == wanted.nbytes]
                named = [path for path in same if path.name == Path(wanted.path).name]
                if chosen := named or same:
                    paths[wanted.path] = chosen[0]
            if paths:
                found.append(paths)
    return found


def _has_length(file: SourceFile) -> bool:
    try:
        return SourceFile.of(Path(file.path)).nbytes == file.nbytes
    except SourceMissing:
        return False


def local_source(manifest: Manifest, remember_in: Path) -> LocalSource:
    """The manifest's own files. What was learnt about cold reads is kept in `remember_in`."""
    return LocalSource({f.path: Path(f.path) for f in manifest.files}, ColdWays(remember_in / _WAYS_NAME))
