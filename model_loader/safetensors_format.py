"""Reads the headers of safetensors files: where each tensor lies. A directory may hold one file or an indexed set.

The header is checked as the format demands: offsets in order, no holes, no overlap, the file exactly as long as its
tensors. Limits: F32, F16 and BF16 tensors; quantised safetensors are refused by name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from model_loader.block_types import BLOCKS, count_values
from model_loader.errors import FormatError, SourceMissing, SourceRefused, UnsupportedArchitecture
from model_loader.manifest import TensorEntry

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
_MAX_HEADER_BYTES: Final = 100_000_000
_READ_TYPES: Final = ("F32", "F16", "BF16")


def find_files(root: Path) -> tuple[Path, ...]:
    """The safetensors files of a Hugging Face directory, in the order of their names."""
    index = root / INDEX_NAME
    if index.exists():
        names = sorted(set(_read_index(index).values()))
        for name in names:
            if "/" in name or "\\" in name or not name.endswith(".safetensors"):
                raise SourceRefused(f"{index} points at {name!r}; only files beside it are read")
    elif (root / SINGLE_NAME).exists():
        names = [SINGLE_NAME]
    else:
        names = sorted(p.name for p in root.glob("*.safetensors"))
        if len(names) != 1:
            raise SourceMissing(
                f"{root} holds {len(names)} safetensors files and no {INDEX_NAME}; "
                f"one file, or an index that names them, is needed"
            )
    missing = [name for name in names if not (root / name).exists()]
    if missing:
        raise SourceMissing(f"{root} lacks {', '.join(missing[:3])}, which {INDEX_NAME} names: download it again")
    return tuple(root / name for name in names)


def read_safetensors(root: Path, files: tuple[Path, ...]) -> tuple[TensorEntry, ...]:
    """Tensors of all files; with an index, every tensor must be where the index says."""
    tensors: dict[str, TensorEntry] = {}
    for number, path in enumerate(files):
        for entry in read_file(path, number):
            if entry.name in tensors:
                raise FormatError(f"tensor {entry.name} is in {files[tensors[entry.name].file]} and in {path}")
            tensors[entry.name] = entry
    index = root / INDEX_NAME
    if index.exists():
        for name, place in _read_index(index).items():
            if name not in tensors or files[tensors[name].file].name != place:
                raise FormatError(f"{index} says tensor {name} is in {place}; it is not there")
    return tuple(tensors.values())


def read_file(path: Path, file_index: int) -> list[TensorEntry]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise FormatError(f"{path} is truncated: 8 bytes needed, {len(head)} found")
            nbytes = int.from_bytes(head, "little")
            if nbytes > _MAX_HEADER_BYTES:
                raise FormatError(f"{path} is no safetensors file: its header would have {nbytes} bytes")
            if 8 + nbytes > size:
                raise FormatError(f"{path} is truncated: its header needs {8 + nbytes} bytes, {size} found")
            raw = file.read(nbytes)
    except OSError as error:
        raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
    header = _parse(path, raw)
    entries = [_entry(path, name, info, file_index) for name, info in header.items() if name != "__metadata__"]
    entries.sort(key=lambda t: (t.offset, t.nbytes))
    at = 0
    for entry in entries:
        if entry.offset != at:
            raise FormatError(f"{path}: tensor {entry.name} begins at {entry.offset} where {at} was expected")
        at += entry.nbytes
    data_start = 8 + nbytes
    if data_start + at > size:
        raise FormatError(f"{path} is truncated: its tensors need {data_start + at} bytes, {size} found")
    if data_start + at < size:
        raise FormatError(f"{path} has {size - data_start - at} bytes that belong to no tensor")
    return [TensorEntry(t.name, t.dtype, t.shape, t.file, data_start + t.offset, t.nbytes) for t in entries]


def _entry(path: Path, name: str, info: Any, file_index: int) -> TensorEntry:
    try:
        kind, shape, (start, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        sizes_are_valid = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: the entry of tensor {name} is malformed") from error
    if not sizes_are_valid:
        raise FormatError(f"{path}: the entry of tensor {name} is malformed")
    if kind not in _READ_TYPES:
        raise UnsupportedArchitecture(f"{path}: tensor {name} is {kind}; read are {', '.join(_READ_TYPES)}")
    nbytes = count_values(shape) * BLOCKS[kind][1]
    if end - start != nbytes:
        raise FormatError(f"{path}: tensor {name} of shape {shape} needs {nbytes} bytes, {end - start} are given")
    return TensorEntry(name, kind, shape, file_index, start, nbytes)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise FormatError(f"{path} holds a name twice")
        return result

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} is no safetensors file: its header is no object")
    return header


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise TypeError("weight_map")
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is no index of safetensors files") from error
    except OSError as error:
        raise SourceMissing(f"cannot read {path}: {error.strerror}") from error
    return weight_map
