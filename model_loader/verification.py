"""Every byte of an imported checkpoint read again and compared with what the import found.

Files chunk by chunk (file, offset, expected and found digest of each that differs), their length, and the identity made
again of what lies beside the manifest. `python -m model_loader.verification MANIFEST...` tells it line by line:
`{"event":"progress"}`, `{"event":"bad","identity","file","offset","nbytes","expected","found","message"}`, and `done`.
Limits: a manifest of version 1 has no chunks; its tensors are compared by SHA-256 instead.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from model_loader.chunks import ALGORITHM, ChunkList, digest_chunk
from model_loader.content import read_files
from model_loader.errors import LoaderError
from model_loader.manifest import TOKENIZER_NAME, Manifest, SourceFile
from model_loader.progress import Progress, Reporter, run_reporting, say_event

_MOST_READERS: Final = 16
"""Chunks in memory at once."""
_SHOWN_BAD: Final = 1000
"""Chunks of one file that are told one by one."""


@dataclass(frozen=True, slots=True)
class BadPart:
    file: str
    offset: int
    nbytes: int
    expected: str
    found: str
    """Empty: it could not be read."""
    message: str


def verify(manifest: Manifest, on_bytes: Callable[[int], None]) -> Iterator[BadPart]:
    """What is not as it was imported, as it is found."""
    yield from _verify_texts(manifest)
    if not manifest.contents:
        yield from _verify_tensors(manifest, on_bytes)
        return
    try:
        lists = manifest.chunk_lists()
    except LoaderError as error:
        yield BadPart(str(manifest.chunks_path), 0, 0, manifest.chunks_sha256, "", str(error))
        return
    for file, chunks in zip(manifest.files, lists, strict=True):
        yield from _verify_file(file, chunks, on_bytes)


def _verify_texts(manifest: Manifest) -> Iterator[BadPart]:
    """Tokenizer, template and configuration are part of the identity, and so is every tensor's digest."""
    path = manifest.directory / TOKENIZER_NAME
    try:
        tokenizer = path.read_bytes()
    except OSError as error:
        yield BadPart(str(path), 0, 0, "", "", f"{path} cannot be read: {error.strerror}")
        return
    found = manifest.digest_texts(tokenizer)
    if found != manifest.identity:
        yield BadPart(
            str(manifest.path), 0, 0, manifest.identity, found,
            f"{manifest.path}, or {TOKENIZER_NAME} beside it, was altered: identity {found} instead of "
            f"{manifest.identity}",
        )  # fmt: skip


def _verify_file(file: SourceFile, chunks: ChunkList, on_bytes: Callable[[int], None]) -> Iterator[BadPart]:
    try:
        handle = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        yield BadPart(file.path, 0, chunks.nbytes, "", "", f"{file.path} cannot be read: {error.strerror}")
        on_bytes(chunks.nbytes)
        return
    try:
        size = os.fstat(handle).st_size
        if size != chunks.nbytes:
            told = f"{file.path} has {size} bytes, expected are {chunks.nbytes}"
            yield BadPart(file.path, min(size, chunks.nbytes), abs(size - chunks.nbytes), "", "", told)

        def check(index: int) -> BadPart | None:
            begin, nbytes = chunks.bounds(index)
            view = memoryview(bytearray(nbytes))
            try:
                count = os.preadv(handle, [view], begin)
            except OSError as error:
                return BadPart(file.path, begin, nbytes, "", "", f"{file.path} at byte {begin}: {error.strerror}")
            on_bytes(nbytes)
            found = digest_chunk(view[:count])
            if count == nbytes and chunks.matches(index, found):
                return None
            expected = chunks.expected(index).hex()
            told = (
                f"{file.path}: bytes {begin} to {begin + nbytes} have {ALGORITHM.decode()} {found.hex()}, expected is "
                f"{expected}"
            )
            return BadPart(file.path, begin, nbytes, expected, found.hex(), told)

        told_parts, readers = 0, min(_MOST_READERS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(readers, thread_name_prefix="verify") as pool:
            for bad in pool.map(check, range(len(chunks))):
                if bad is not None and told_parts < _SHOWN_BAD:
                    told_parts += 1
                    yield bad
    finally:
        os.close(handle)


def _verify_tensors(manifest: Manifest, on_bytes: Callable[[int], None]) -> Iterator[BadPart]:
    try:
        found = read_files([Path(file.path) for file in manifest.files], manifest.tensors, on_bytes)
    except LoaderError as error:
        yield BadPart("", 0, 0, "", "", str(error))
        return
    for entry in manifest.tensors:
        path, digest = manifest.files[entry.file].path, found[entry.file].tensors[entry.name].sha256
        if digest != entry.sha256:
            told = f"{path}: tensor {entry.name} has SHA-256 {digest}, expected is {entry.sha256}"
            yield BadPart(path, entry.offset, entry.nbytes, entry.sha256, digest, told)


def total_bytes(manifest: Manifest) -> int:
    return sum(file.nbytes for file in manifest.files)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="model_loader.verification", description="Verify imported checkpoints.")
    parser.add_argument("manifests", type=Path, nargs="*")
    given = parser.parse_args(arguments)

    def work(report: Callable[[Progress], None]) -> dict[str, object]:
        manifests = [Manifest.load(path) for path in given.manifests]
        reporter = Reporter("verify", sum(map(total_bytes, manifests)), report)
        bad_models = bad_parts = 0
        for manifest in manifests:
            before = bad_parts
            for part in verify(manifest, reporter.add):
                bad_parts += 1
                say_event({"event": "bad", "identity": manifest.identity, "uri": manifest.uri, **asdict(part)})
            bad_models += bad_parts > before
        reporter.finish()
        return {
            "models": len(manifests), "bad_models": bad_models, "bad_parts": bad_parts,
            "nbytes": sum(map(total_bytes, manifests)),
        }  # fmt: skip

    return run_reporting(work)


if __name__ == "__main__":
    raise SystemExit(main())
