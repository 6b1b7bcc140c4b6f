"""Reads the headers of safetensors files: where each tensor lies. A directory may hold one file or an indexed set.

The header is checked as the format demands: offsets in order, no holes, no overlap, the file exactly as long as its
tensors. Nothing is allocated for what a header merely announces: its length, its number of tensors and each tensor's
bytes are compared with the file first. Limits: F32, F16 and BF16 tensors; quantised safetensors are refused by name;
`MAX_HEADER_BYTES` of header and 100,000 tensors a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from model_loader.block_types import BLOCKS, count_values
from model_loader.confined import confine, is_there, read_confined
from model_loader.errors import FormatError, SourceMissing, SourceRefused, UnsupportedArchitecture, shown
from model_loader.json_text import parse_json
from model_loader.manifest import TensorEntry
from model_loader.pickles import PICKLE_STARTS, conversion, refuse_pickles

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
"""A tensor's entry takes about 100 bytes; the largest checkpoints in use have some ten thousand a file."""
_MAX_VALUES: Final = 1_500_000
_MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
_MAX_INDEX_VALUES: Final = 3_000_000
_MAX_SHARDS: Final = 10_000
_MAX_DIMENSIONS: Final = 8
_MAX_NAME_CHARS: Final = 512
_MAX_FILE_NAME_BYTES: Final = 255
"""What file systems and object stores agree on; a message that names the file stays one."""
_READ_TYPES: Final = ("F32", "F16", "BF16")

Ensure = Callable[[Path, int, int], None]
"""Sees to it that a file's bytes from one place up to another are there; one that is fetched in pieces needs it."""


def find_files(root: Path) -> tuple[Path, ...]:
    """The safetensors files of a Hugging Face directory, in the order of their names."""
    if is_there(root, INDEX_NAME):
        names = indexed_names(read_index(root), root / INDEX_NAME)
    elif is_there(root, SINGLE_NAME):
        names = (SINGLE_NAME,)
    else:
        names = tuple(sorted(p.name for p in root.glob("*.safetensors")))
        if not names:
            refuse_pickles(root, (p.name for p in root.iterdir()))
        if len(names) != 1:
            raise SourceMissing(
                f"{root} holds {len(names)} safetensors files and no {INDEX_NAME}; "
                f"one file, or an index that names them, is needed"
            )
    missing = [name for name in names if not is_there(root, name)]
    if missing:
        raise SourceMissing(
            f"{root} lacks {', '.join(missing[:3])}, which weight_map in {INDEX_NAME} names: download it again"
        )
    return tuple(confine(root, name) for name in names)


def read_safetensors(root: Path, files: tuple[Path, ...], ensure: Ensure | None = None) -> tuple[TensorEntry, ...]:
    """Tensors of all files; with an index, every tensor must be where the index says."""
    tensors: dict[str, TensorEntry] = {}
    for number, path in enumerate(files):
        for entry in read_file(path, number, ensure):
            if entry.name in tensors:
                raise FormatError(f"tensor {entry.name} is in {files[tensors[entry.name].file]} and in {path}")
            tensors[entry.name] = entry
    if is_there(root, INDEX_NAME):
        for name, place in read_index(root).items():
            if name not in tensors or files[tensors[name].file].name != place:
                raise FormatError(
                    f"{root / INDEX_NAME}: weight_map says tensor {shown(name)} is in {place}; it is not there"
                )
    return tuple(tensors.values())


def read_file(path: Path, file_index: int, ensure: Ensure | None = None) -> list[TensorEntry]:
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if ensure is not None:
                ensure(path, 0, min(8, size))
            head = file.read(8)
            if len(head) < 8:
                raise FormatError(f"{path} is truncated: 8 bytes needed, {len(head)} found")
            nbytes = int.from_bytes(head, "little")
            if nbytes > MAX_HEADER_BYTES and head.startswith(PICKLE_STARTS):
                raise SourceRefused(
                    f"{path} is no safetensors file but begins like a pickle ({head[:4]!r}), which can run code when "
                    f"it is read: convert it where you trust it: {conversion(str(path))}"
                )
            if nbytes > MAX_HEADER_BYTES:
                raise FormatError(
                    f"{path}: its first 8 bytes announce a header of {nbytes} bytes, at most {MAX_HEADER_BYTES} are "
                    "read: it is no safetensors file"
                )
            if 8 + nbytes > size:
                raise FormatError(f"{path} is truncated: its header needs {8 + nbytes} bytes, {size} found")
            if ensure is not None:
                ensure(path, 8, 8 + nbytes)
            raw = file.read(nbytes)
    except OSError as error:
        raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
    if len(raw) != nbytes:
        raise FormatError(f"{path} is truncated: its header needs {8 + nbytes} bytes, {8 + len(raw)} could be read")
    header = parse_json(raw, f"the header of {path}", max_values=_MAX_VALUES)
    entries = [_entry(path, name, info, file_index) for name, info in header.items() if name != "__metadata__"]
    entries.sort(key=lambda t: (t.offset, t.nbytes))
    at, before = 0, "the header"
    for entry in entries:
        if entry.offset != at:
            kind = "overlaps" if entry.offset < at else "leaves a hole after"
            raise FormatError(
                f"{path}: data_offsets of tensor {entry.name} begin at {entry.offset} where {at} was expected: it "
                f"{kind} {before}"
            )
        at, before = at + entry.nbytes, f"tensor {entry.name}"
    data_start = 8 + nbytes
    if data_start + at > size:
        raise FormatError(
            f"{path} is truncated: its tensors need {data_start + at} bytes, {size} found; its last is {before}"
        )
    if data_start + at < size:
        raise FormatError(f"{path} has {size - data_start - at} bytes that belong to no tensor")
    return [TensorEntry(t.name, t.dtype, t.shape, t.file, data_start + t.offset, t.nbytes) for t in entries]


def _entry(path: Path, name: str, info: Any, file_index: int) -> TensorEntry:
    if len(name) > _MAX_NAME_CHARS:
        raise FormatError(f"{path}: a tensor's name has {len(name)} characters: {shown(name)}")

    def refuse(field: str, value: object) -> FormatError:
        return FormatError(f"{path}: the entry of tensor {shown(name)} is malformed: {field} is {shown(value)}")

    if not isinstance(info, dict):
        raise refuse("it", info)
    kind, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(kind, str):
        raise refuse("dtype", kind)
    if kind not in _READ_TYPES:
        raise UnsupportedArchitecture(
            f"{path}: dtype of tensor {shown(name)} is {shown(kind)}; read are {', '.join(_READ_TYPES)}"
        )
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not _are_sizes(shape):
        raise refuse("shape", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets) or offsets[0] > offsets[1]:
        raise refuse("data_offsets", offsets)
    start, end = offsets
    nbytes = count_values(shape) * BLOCKS[kind][1]
    if end - start != nbytes:
        raise FormatError(
            f"{path}: tensor {shown(name)} of shape {tuple(shape)} needs {nbytes} bytes, its data_offsets give "
            f"{end - start}"
        )
    return TensorEntry(name, kind, tuple(shape), file_index, start, nbytes)


def _are_sizes(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def read_index(root: Path) -> dict[str, str]:
    """Which file each tensor is in, by the index of a sharded checkpoint."""
    path = root / INDEX_NAME
    document = parse_json(read_confined(root, INDEX_NAME, _MAX_INDEX_BYTES), str(path), max_values=_MAX_INDEX_VALUES)
    places = document.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise FormatError(f"{path} is no index of safetensors files: its weight_map is {shown(places)}")
    if not places:
        raise FormatError(f"{path} is no index of safetensors files: its weight_map is empty")
    return places


def indexed_names(places: dict[str, str], index: Path) -> tuple[str, ...]:
    """The files an index names, each beside it."""
    names = tuple(sorted(set(places.values())))
    if len(names) > _MAX_SHARDS:
        raise FormatError(f"{index}: weight_map names {len(names)} files; at most {_MAX_SHARDS} are read")
    for name in names:
        if len(name.encode("utf-8", "replace")) > _MAX_FILE_NAME_BYTES:
            raise SourceRefused(f"{index}: weight_map names a file by {len(name)} characters: {shown(name)}")
        if "/" in name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise SourceRefused(f"{index}: weight_map points at {shown(name)}; only files beside it are read")
    return names
