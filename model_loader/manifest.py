"""What a checkpoint is: its configuration, its tensors with their digests, and where their bytes lie.

`identity` covers every tensor's name, dtype, shape and content, the tokenizer, the template and the configuration, and
nothing else: the same model imported from another place, or in other files, has the same identity. Paths are where the
bytes were at the last import; whoever reads them checks them by the chunks of their file (`chunk_lists`), which lie
beside the manifest in a file it names by digest. A manifest of version 1 is read and has none: the model is imported
again when it is next loaded, with the same identity. Limits: one architecture family (llama).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from model_loader.chunks import ChunkList
from model_loader.errors import FormatError, IntegrityError, SourceMissing

_TEMPORARY: Final = re.compile(r"\..+\.([0-9]+)\.[0-9a-f]{8}\.tmp")
MANIFEST_VERSION: Final = 2
READ_VERSIONS: Final = (1, 2)
MANIFEST_NAME: Final = "manifest.json"
TOKENIZER_NAME: Final = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None, or one of
    {"rope_type": "linear", "factor"},
    {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    {"rope_type": "factors", "factors": [head_dim / 2 divisors of the inverse frequencies]} (GGUF's rope_freqs)."""
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    """Biases on q, k, v; and on the output projection where `output_bias`."""
    mlp_bias: bool = False
    output_bias: bool = False
    dtype: str = "float32"
    """The checkpoint's own: float32 | bfloat16 | float16, or the GGUF type of its matrices (Q4_1, ...)."""

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Rotary inverse frequencies, head_dim / 2 of them, scaling applied."""
        base = [self.rope_theta ** (-2.0 * i / self.head_dim) for i in range(self.head_dim // 2)]
        scaling = self.rope_scaling
        if scaling is None:
            return tuple(base)
        kind = scaling["rope_type"]
        if kind == "linear":
            return tuple(f / scaling["factor"] for f in base)
        if kind == "factors":
            return tuple(f / divisor for f, divisor in zip(base, scaling["factors"], strict=True))
        factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
        original = scaling["original_max_position_embeddings"]
        scaled: list[float] = []
        for f in base:
            wavelength = 2.0 * math.pi / f
            if wavelength < original / high:
                scaled.append(f)
            elif wavelength > original / low:
                scaled.append(f / factor)
            else:
                smooth = (original / wavelength - low) / (high - low)
                scaled.append((1.0 - smooth) * f / factor + smooth * f)
        return tuple(scaled)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when it was imported."""

    path: str
    nbytes: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(path: Path) -> SourceFile:
        try:
            found = os.stat(path)
        except OSError as error:
            raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
        return SourceFile(str(path), found.st_size, found.st_mtime_ns, found.st_ino)

    def unchanged(self) -> bool:
        try:
            return SourceFile.of(Path(self.path)) == self
        except SourceMissing:
            return False


@dataclass(frozen=True, slots=True)
class FileContent:
    """What a file of tensors holds, whoever keeps a copy of it."""

    nbytes: int
    sha256: str
    origin: str = ""
    """The object store it was fetched from, if it was (`model_loader.objects.open_store`)."""
    key: str = ""
    """Of the object there."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    """The Hugging Face name, whatever the format."""
    dtype: str
    """As stored: F32, BF16, F16 (safetensors), or a GGUF type."""
    shape: tuple[int, ...]
    """Row-major, outermost first."""
    file: int
    """Index into `Manifest.files`."""
    offset: int
    nbytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    identity: str
    uri: str
    pinned_uri: str
    format: str
    """gguf | safetensors"""
    architecture: str
    config: ModelConfig
    tensors: tuple[TensorEntry, ...]
    files: tuple[SourceFile, ...]
    """Where the tensors' bytes lie."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos_token: bool
    """Whether a plain prompt is begun with `bos_token` (templates write it themselves)."""
    contents: tuple[FileContent, ...] = ()
    """Of `files`, in their order; none in version 1."""
    chunks_sha256: str = ""
    """Of the file with the lists of chunks."""
    licence: str | None = None
    """As the source states it."""
    version: int = MANIFEST_VERSION
    path: Path = field(default=Path(), compare=False)
    """Where this manifest was loaded from; not stored."""

    @property
    def directory(self) -> Path:
        """Holds tokenizer.json beside the manifest."""
        return self.path.parent

    @property
    def chunks_path(self) -> Path:
        return chunks_path(self.directory, self.chunks_sha256)

    def chunk_lists(self) -> tuple[ChunkList, ...]:
        """Of `files`, in their order; none where the manifest is of version 1. Raises `IntegrityError` where the lists
        are not those that were made at import."""
        if not self.contents:
            return ()
        again = f"import {self.uri} again"
        try:
            raw = self.chunks_path.read_bytes()
        except OSError as error:
            raise SourceMissing(f"cannot read {self.chunks_path}: {error.strerror}; {again}") from error
        found = hashlib.sha256(raw).hexdigest()
        if found != self.chunks_sha256:
            raise IntegrityError(
                f"{self.chunks_path} has SHA-256 {found}, the manifest says {self.chunks_sha256}; {again}"
            )
        lists, at = [], 0
        for content in self.contents:
            end = at + ChunkList.nbytes_for(content.nbytes)
            lists.append(ChunkList.from_bytes(raw[at:end], str(self.chunks_path)))
            at = end
        return tuple(lists)

    def digest_texts(self, tokenizer: bytes) -> str:
        """The identity made again of what the manifest says and the tokenizer beside it."""
        special = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": list(self.eos_token_ids),
            "add_bos_token": self.add_bos_token,
        }
        return checkpoint_identity(self.config, self.tensors, tokenizer, self.chat_template, special)

    @property
    def context_length(self) -> int:
        return self.config.max_position

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def tensor(self, name: str) -> TensorEntry:
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise FormatError(f"the checkpoint {self.uri} has no tensor {name}")

    def save(self, path: Path) -> Manifest:
        """Writes it atomically; the result knows its path."""
        document = {k: v for k, v in asdict(self).items() if k != "path"}
        write_atomically(path, json.dumps(document, indent=None, separators=(",", ":")).encode())
        return replace(self, path=path)

    @staticmethod
    def load(path: Path) -> Manifest:
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise SourceMissing(f"no manifest at {path}: import the model again ({error.strerror})") from error
        except ValueError as error:
            raise FormatError(f"{path} is not a manifest: import the model again") from error
        try:
            if document["version"] not in READ_VERSIONS:
                raise FormatError(
                    f"{path} has version {document['version']}, known are {READ_VERSIONS}: import the model again"
                )
            return Manifest(
                **{
                    **document,
                    "config": ModelConfig(**document["config"]),
                    "tensors": tuple(TensorEntry(**{**t, "shape": tuple(t["shape"])}) for t in document["tensors"]),
                    "files": tuple(SourceFile(**f) for f in document["files"]),
                    "contents": tuple(FileContent(**c) for c in document.get("contents", ())),
                    "eos_token_ids": tuple(document["eos_token_ids"]),
                },
                path=path,
            )
        except (KeyError, TypeError) as error:
            raise FormatError(f"{path} is not a manifest of this version: {error}") from error


def chunks_path(directory: Path, sha256: str) -> Path:
    """Named by content: an import of the same checkpoint in other files leaves what earlier readers need."""
    return directory / f"chunks-{sha256[:16]}.bin"


def checkpoint_identity(
    config: ModelConfig,
    tensors: Iterable[TensorEntry],
    tokenizer: bytes,
    chat_template: str | None,
    special: Mapping[str, object],
) -> str:
    """SHA-256 over tagged, length-prefixed fields, in one canonical order."""
    digest = hashlib.sha256(b"stoker-checkpoint-1\0")

    def feed(tag: str, value: bytes) -> None:
        digest.update(len(tag).to_bytes(4, "big") + tag.encode() + len(value).to_bytes(8, "big"))
        digest.update(value)

    for entry in sorted(tensors, key=lambda t: t.name):
        feed("name", entry.name.encode())
        feed("dtype", entry.dtype.encode())
        feed("shape", ",".join(map(str, entry.shape)).encode())
        feed("content", bytes.fromhex(entry.sha256))
    feed("tokenizer", tokenizer)
    feed("template", b"" if chat_template is None else b"=" + chat_template.encode())
    feed("config", json.dumps(asdict(config), sort_keys=True, separators=(",", ":")).encode())
    feed("special", json.dumps(dict(special), sort_keys=True, separators=(",", ":")).encode())
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Temporary file, fsync, rename, fsync of the folder: a reader sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def remove_abandoned(folder: Path) -> None:
    """What `write_atomically` had begun there when its process was killed."""
    for path in folder.glob(".*.tmp"):
        if (named := _TEMPORARY.fullmatch(path.name)) and not os.path.exists(f"/proc/{named[1]}"):
            path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
