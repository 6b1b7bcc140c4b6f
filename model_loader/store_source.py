"""Models in an object store: a prefix with a Hugging Face directory or one GGUF file, or the GGUF file itself.

What the store lists is chosen from and stamped first; small files come whole, headers by ranges and are checked before
the bulk moves; then every missing chunk is fetched, once, into a folder named by the stamp, where later loads find
whole files. Killed in the middle, the next run fetches what is missing. What is listed afterwards must be what was
listed before. Limits: objects directly under the prefix; S3, or whatever else `open_store` opens.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from model_loader.chunks import CHUNK_BYTES
from model_loader.confined import confine
from model_loader.directory_checkpoint import SETTINGS_NAMES, describe_directory
from model_loader.errors import (
    FormatError,
    LoaderError,
    MissingObject,
    ShortObject,
    SourceMissing,
    SourceRefused,
    SourceUnavailable,
    StoreError,
    StoreRefused,
    from_os_error,
)
from model_loader.gguf_checkpoint import describe_gguf
from model_loader.licence import CARD_NAME
from model_loader.manifest import sync_directory
from model_loader.objects import ObjectInfo, ObjectStore, open_store
from model_loader.objects.location import S3Location
from model_loader.partial_file import PartialFile, landed_names, reopen
from model_loader.pickles import directory_conversion, is_pickle
from model_loader.progress import Progress, Reporter
from model_loader.room import require_disk, require_memory
from model_loader.safetensors_format import INDEX_NAME, SINGLE_NAME, indexed_names, read_index
from model_loader.sources import ModelUri, ResolvedModel, resolve_path

ProgressCallback = Callable[[Progress], None]
_THREADS: Final = 4
_RUN_CHUNKS: Final = 4
"""Consecutive chunks asked for at once: 16 MiB hide a store's latency."""
_MEMORY_BYTES: Final = 256 * 1024 * 1024
"""Buffers of all threads, and what a header and a tokenizer take while they are parsed."""
_MAX_OBJECTS: Final = 20_000
_MAX_SMALL_BYTES: Final = 128 * 1024 * 1024
_WEIGHTS: Final = (".safetensors", ".gguf")
_FILES: Final = "files"
_PARTIAL: Final = "partial"


def resolve_stored(
    uri: ModelUri, root: Path, progress: ProgressCallback | None, opener: Callable[[str], ObjectStore] | None = None
) -> ResolvedModel:
    """`root` holds what was fetched, by URI and stamp. One caller at a time per URI."""
    place = _Place.of(uri)
    with _opened(place, opener) as store:
        listed = _listed(store, place)
        stamp = stamp_of(listed)
        folder = folder_of(uri, root) / stamp[:16]
        if not _is_whole(folder / _FILES, listed):
            reopen_folder(folder)
            try:
                _fetch(uri, place, store, listed, folder, progress)
            except OSError as error:
                raise from_os_error(error, str(folder)) from error
            if stamp_of(_listed(store, place)) != stamp:
                shutil.rmtree(folder, ignore_errors=True)
                raise SourceUnavailable(f"the objects of {uri.text} changed while they were fetched: try again")
            os.replace(folder / _PARTIAL, folder / _FILES)
            sync_directory(folder)
    found = resolve_path(uri.text, uri.text, folder / _FILES / place.file if place.file else folder / _FILES)
    return replace(
        found, origin=place.store_uri, keys=tuple(path.name for path in found.files), stamp=stamp, kept=folder
    )


def reopen_folder(folder: Path) -> None:
    """What was complete is partial again: the next fetch moves what is no longer what it was, and no more."""
    if not (folder / _FILES).is_dir():
        return
    shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
    os.replace(folder / _FILES, folder / _PARTIAL)
    for name in landed_names(folder / _PARTIAL):
        reopen(folder / _PARTIAL / name)


def _is_whole(folder: Path, listed: Sequence[ObjectInfo]) -> bool:
    """Whether what was fetched is there in full length. What the bytes are, the import checks against their chunks."""
    try:
        present = {path.name: path.stat().st_size for path in folder.iterdir()}
    except OSError:
        return False
    infos = {info.key: info for info in listed}
    try:
        needed = [*_weights(folder, infos), *(name for name in infos if not name.endswith(_WEIGHTS))]
    except LoaderError:
        return False
    return all(name in infos and present.get(name) == infos[name].nbytes for name in needed)


def current_stamp(uri: ModelUri, opener: Callable[[str], ObjectStore] | None = None) -> str:
    """Of what the store holds now."""
    place = _Place.of(uri)
    with _opened(place, opener) as store:
        return stamp_of(_listed(store, place))


def folder_of(uri: ModelUri, root: Path) -> Path:
    return root / hashlib.sha256(uri.text.encode()).hexdigest()[:32]


def stamp_of(listed: Sequence[ObjectInfo]) -> str:
    digest = hashlib.sha256()
    for info in sorted(listed, key=lambda each: each.key):
        digest.update(f"{info.key}\0{info.nbytes}\0{info.version}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Place:
    store_uri: str
    file: str
    """Empty: the whole prefix."""

    @staticmethod
    def of(uri: ModelUri) -> _Place:
        location = S3Location.parse(uri.text)
        if not location.prefix.lower().endswith((".gguf", ".safetensors")):
            return _Place(location.uri, "")
        folder, _, file = location.prefix.rpartition("/")
        return _Place(replace(location, prefix=folder).uri, file if file.lower().endswith(".gguf") else "")


@contextmanager
def _opened(place: _Place, opener: Callable[[str], ObjectStore] | None) -> Iterator[ObjectStore]:
    """The store; what it says goes out as what a source says."""
    store = (opener or open_store)(place.store_uri)
    try:
        yield store
    except (MissingObject, ShortObject) as error:
        raise SourceUnavailable(f"{place.store_uri} changed while it was read: {error}: try again") from error
    except StoreRefused as error:
        raise SourceRefused(f"{place.store_uri} cannot be read: {error}") from error
    except StoreError as error:
        raise SourceUnavailable(f"{place.store_uri} cannot be read now: {error}") from error
    finally:
        store.close()


def _listed(store: ObjectStore, place: _Place) -> list[ObjectInfo]:
    """The objects that are the model, weights and all."""
    beside: list[ObjectInfo] = []
    for number, info in enumerate(store.list(place.file)):
        if number >= _MAX_OBJECTS:
            raise SourceRefused(
                f"{place.store_uri} holds more than {_MAX_OBJECTS} objects: name the prefix of one model"
            )
        if "/" not in info.key and (not place.file or info.key == place.file):
            beside.append(info)
    if place.file:
        if not beside:
            raise SourceMissing(f"{place.store_uri} has no object {place.file}")
        return beside
    names = {info.key for info in beside}
    if "config.json" in names:
        wanted = [info for info in beside if _belongs(info.key)]
        if not any(info.key.endswith(".safetensors") for info in wanted):
            _refuse_pickles(place, names)
            raise SourceMissing(f"{place.store_uri} holds config.json and no safetensors: upload the weights")
        return wanted
    found = [info for info in beside if info.key.endswith(".gguf")]
    if len(found) != 1:
        _refuse_pickles(place, names)
        raise SourceMissing(
            f"{place.store_uri} holds no config.json and {len(found)} GGUF files: name one model (a file, or a prefix "
            "with config.json and safetensors)"
        )
    return found


def _belongs(name: str) -> bool:
    return name in SETTINGS_NAMES or name in (INDEX_NAME, CARD_NAME) or name.endswith(".safetensors")


def _refuse_pickles(place: _Place, names: set[str]) -> None:
    pickles = sorted(name for name in names if is_pickle(name))
    if pickles:
        raise SourceRefused(
            f"{pickles[0]} in {place.store_uri} is a pickle, which can run code when it is read: fetch the model, "
            f"convert it where you trust it, and upload the result: {directory_conversion('FOLDER')}"
        )


def _fetch(
    uri: ModelUri,
    place: _Place,
    store: ObjectStore,
    listed: Sequence[ObjectInfo],
    folder: Path,
    progress: ProgressCallback | None,
) -> None:
    """Every object that is needed into `folder`/partial, complete and synced."""
    _forget_others(folder)
    partial = folder / _PARTIAL
    partial.mkdir(mode=0o700, parents=True, exist_ok=True)
    infos = {info.key: info for info in listed}
    small = sorted(name for name in infos if not name.endswith(_WEIGHTS))
    for name in small:
        if infos[name].nbytes > _MAX_SMALL_BYTES:
            raise SourceRefused(f"{name} in {place.store_uri} has {infos[name].nbytes} bytes: it is no settings file")
    with _Fetching(store, partial, progress) as fetching:
        require_memory(_MEMORY_BYTES, f"fetching {uri.text}")
        require_disk(folder, fetching.open([infos[name] for name in small]), uri.text)
        fetching.fetch()
        with _refused_here(place, partial):
            weights = _weights(partial, infos)
            gone = [name for name in weights if name not in infos]
            if gone:
                raise SourceMissing(f"it lacks {', '.join(gone[:3])}, which weight_map in {INDEX_NAME} names")
        require_disk(folder, fetching.open([infos[name] for name in weights]), uri.text)
        with _refused_here(place, partial):
            if weights[0].endswith(".gguf"):
                describe_gguf(confine(partial, weights[0]), fetching.ensure)
            else:
                describe_directory(partial, fetching.ensure)
        fetching.fetch()
        fetching.complete()
    sync_directory(partial)


def _weights(partial: Path, infos: Mapping[str, ObjectInfo]) -> list[str]:
    """The objects with tensors that the model is made of; others may lie beside them."""
    if INDEX_NAME in infos:
        return list(indexed_names(read_index(partial), partial / INDEX_NAME))
    found = sorted(name for name in infos if name.endswith(_WEIGHTS))
    if SINGLE_NAME in found:
        return [SINGLE_NAME]
    if len(found) != 1:
        raise SourceMissing(f"it holds {len(found)} safetensors files and no {INDEX_NAME}")
    return found


@contextmanager
def _refused_here(place: _Place, partial: Path) -> Iterator[None]:
    """What is no model is not kept; the message names objects, not where they were put."""
    try:
        yield
    except (FormatError, SourceRefused, SourceMissing) as error:
        shutil.rmtree(partial.parent, ignore_errors=True)
        told = str(error).replace(f"{partial}/", "").replace(str(partial), "it")
        raise type(error)(f"{place.store_uri}: {told}") from error


def _forget_others(folder: Path) -> None:
    """Half-fetched objects as they were before they changed."""
    for path in folder.parent.glob(f"*/{_PARTIAL}"):
        if path.parent != folder:
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.parent.rmdir()


class _Fetching:
    """Missing chunks of several files, several at once, each written where it belongs and noted."""

    def __init__(self, store: ObjectStore, folder: Path, progress: ProgressCallback | None) -> None:
        self._store = store
        self._folder = folder
        self._files: dict[str, PartialFile] = {}
        self._reporter = Reporter("fetch", 0, progress)
        self._buffers = threading.local()
        self._stack = ExitStack()

    def __enter__(self) -> _Fetching:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, infos: Sequence[ObjectInfo]) -> int:
        """More files; gives how many of their bytes are missing."""
        missing = 0
        for info in infos:
            file = self._stack.enter_context(PartialFile(self._folder / info.key, info.nbytes))
            self._files[info.key] = file
            missing += info.nbytes - file.landed_bytes
            self._reporter.total_bytes += info.nbytes
            self._reporter.add(file.landed_bytes)
        return missing

    def complete(self) -> None:
        for file in self._files.values():
            file.complete()
        self._reporter.finish()

    def ensure(self, path: Path, start: int, end: int) -> None:
        file = self._files[path.name]
        for run in _runs(file.missing(start, end)):
            self._fetch_run(path.name, run)

    def fetch(self) -> None:
        """All that is missing of the files that were opened."""
        runs = [(name, run) for name, file in self._files.items() for run in _runs(file.missing())]
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch")
        try:
            work = [pool.submit(self._fetch_run, name, run) for name, run in runs]
            done, _ = wait(work, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _fetch_run(self, name: str, run: range) -> None:
        file = self._files[name]
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(bytearray(_RUN_CHUNKS * CHUNK_BYTES))
        begin = run.start * CHUNK_BYTES
        view = self._buffers.view[: min(len(run) * CHUNK_BYTES, file.nbytes - begin)]
        self._store.get_into(name, begin, view)
        for number, index in enumerate(run):
            piece = view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            file.land(index, piece)
            self._reporter.add(len(piece))


def _runs(indexes: Sequence[int]) -> Iterator[range]:
    """Consecutive ones, at most `_RUN_CHUNKS` together."""
    start = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1 or at - start == _RUN_CHUNKS:
            yield range(indexes[start], indexes[at - 1] + 1)
            start = at
