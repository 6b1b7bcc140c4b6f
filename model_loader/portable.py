"""A checkpoint's manifest as it travels: with what lies beside it, to a machine that has none of its files.

    pack    manifest (each file by the object store that has it), tokenizer, vocabulary, digests of chunks
    admit   the same on the other side, verified by identity before it gets its name

Limits: weights do not travel with it; every byte of them is verified by the chunks that do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from model_loader.errors import FormatError, IntegrityError, LoaderError, SourceRefused
from model_loader.manifest import MANIFEST_NAME, TOKENIZER_NAME, Manifest, SourceFile
from model_loader.vocabulary import VOCABULARY_NAME

_ELSEWHERE: Final = "/elsewhere"
"""Where files of a manifest are said to lie that lie on no disk of the machine that has it."""
_NAME: Final = re.compile(r"manifest\.json|tokenizer\.json|vocabulary\.bin|chunks-[0-9a-f]{16}\.bin")
OriginOf = Callable[[int], tuple[str, str]]
"""The object store that has a manifest's file, by the file's number, and its key there. Raises LoaderError."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the bundle: its bytes, or where they are."""

    name: str
    content: bytes | Path

    @property
    def nbytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


def pack(manifest: Manifest, origin_of: OriginOf) -> list[Part]:
    """What another machine needs of the manifest. `origin_of` is asked for files that were fetched from no store."""
    if not manifest.contents:
        raise FormatError(f"the manifest of {manifest.uri} is of an earlier release: import the model again")
    contents, files = [], []
    for number, (file, content) in enumerate(zip(manifest.files, manifest.contents, strict=True)):
        if not content.origin:
            origin, key = origin_of(number)
            content = replace(content, origin=origin, key=key)
        contents.append(content)
        name = f"{_ELSEWHERE}/{manifest.identity[:16]}/{number}/{Path(file.path).name}"
        files.append(SourceFile(name, file.nbytes, 0, 0))
    document = asdict(replace(manifest, files=tuple(files), contents=tuple(contents)))
    del document["path"]
    beside = [manifest.directory / TOKENIZER_NAME, manifest.directory / VOCABULARY_NAME, manifest.chunks_path]
    return [
        Part(MANIFEST_NAME, json.dumps(document, separators=(",", ":")).encode()),
        *(Part(path.name, path) for path in beside if path.exists()),
    ]


def bundle(parts: Sequence[Part]) -> list[bytes]:
    """All parts as one: a line of JSON, [[name, bytes], ...], and the files one after the other."""
    return [json.dumps([(part.name, part.nbytes) for part in parts]).encode() + b"\n", *(part.read() for part in parts)]


def unbundle(raw: bytes, directory: Path) -> None:
    """Writes the parts down. Raises IntegrityError."""
    line, newline, rest = raw.partition(b"\n")
    try:
        files = [(str(name), int(nbytes)) for name, nbytes in json.loads(line)]
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"a bundle of a manifest cannot be read: {error}") from error
    if not newline or sum(nbytes for _, nbytes in files) != len(rest) or not all(is_part(name) for name, _ in files):
        raise IntegrityError("a bundle of a manifest is cut off, or holds something else")
    at = 0
    for name, nbytes in files:
        (directory / name).write_bytes(rest[at : at + nbytes])
        at += nbytes


def is_part(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def is_elsewhere(manifest: Manifest) -> bool:
    """Whether none of its files is meant to be on this machine."""
    return all(file.path.startswith(f"{_ELSEWHERE}/") for file in manifest.files)


def admit(directory: Path, identity: str) -> Manifest:
    """The manifest that arrived in `directory`. Raises IntegrityError where it is not the checkpoint it should be."""
    try:
        manifest = Manifest.load(directory / MANIFEST_NAME)
        tokenizer = (directory / TOKENIZER_NAME).read_bytes()
        manifest.chunk_lists()
    except OSError as error:
        raise IntegrityError(f"the manifest of {identity[:16]} arrived without its tokenizer: {error}") from error
    except LoaderError as error:
        raise IntegrityError(f"what arrived as manifest of {identity[:16]} cannot be used: {error}") from error
    if not is_elsewhere(manifest) or not all(content.origin for content in manifest.contents):
        raise SourceRefused(f"the manifest of {identity[:16]} names files of this machine: one that travels names none")
    found = manifest.digest_texts(tokenizer)
    if not found == manifest.identity == identity:
        raise IntegrityError(f"the manifest that arrived as {identity[:16]} is of {found[:16]}: it was altered")
    return manifest
