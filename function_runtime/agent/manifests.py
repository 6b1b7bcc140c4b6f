"""Manifests that a control plane on another machine sent: the slot's own copies, by checkpoint and content.

    a line of JSON, [[name, bytes], ...], then the files one after the other -> a folder aside -> verified -> its name

What arrived is used once its identity was made again of its content. Another manifest of the same checkpoint (other
files, another store) lies beside it, since somebody may be reading the first. Limits: `MOST_BYTES` a checkpoint,
without its weights, which are read from where the manifest says.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from function_runtime.errors import SlotError, SpecError
from model_loader.manifest import MANIFEST_NAME
from model_loader.portable import admit, is_part

MISSING: Final = "manifest_missing"
MOST_BYTES: Final = 512 * 1024 * 1024
_PIECE_BYTES: Final = 1024 * 1024
_IDENTITY: Final = re.compile(r"[0-9a-f]{64}")
_NAMED_BY: Final = 16
_ASIDE: Final = "arriving-"


class Body(Protocol):
    """What is read of a request; raises where it ends early."""

    async def readline(self) -> bytes: ...
    async def read(self, n: int = -1) -> bytes: ...


class Manifests:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for left in directory.glob(f"{_ASIDE}*"):
            shutil.rmtree(left, ignore_errors=True)

    def find(self, identity: str, sha256: str) -> Path:
        """Raises SlotError with `MISSING`: it has to be sent first."""
        path = self._directory / _checked(identity) / _checked(sha256)[:_NAMED_BY] / MANIFEST_NAME
        if not path.exists():
            raise SlotError(MISSING, f"this slot has no manifest of checkpoint {identity[:16]}", retry=False)
        return path

    async def take(self, identity: str, body: Body) -> None:
        """Raises SpecError, or the LoaderError of what is no such checkpoint."""
        ours = self._directory / _checked(identity)
        aside = self._directory / f"{_ASIDE}{secrets.token_hex(8)}"
        try:
            aside.mkdir(parents=True)
            for name, nbytes in _named(await body.readline()):
                await _write(aside / name, nbytes, body)
            await asyncio.to_thread(admit, aside, identity)
            sha256 = hashlib.sha256((aside / MANIFEST_NAME).read_bytes()).hexdigest()
            ours.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # two gateways may send the same at once: the second finds it there
                os.rename(aside, ours / sha256[:_NAMED_BY])
            self.find(identity, sha256)
        finally:
            await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)

    async def forget(self, identity: str) -> None:
        if _IDENTITY.fullmatch(identity):
            await asyncio.to_thread(shutil.rmtree, self._directory / identity, ignore_errors=True)


def _checked(identity: str) -> str:
    if not _IDENTITY.fullmatch(identity):
        raise SpecError(f"{identity[:80]!r} is no SHA-256 of a checkpoint or manifest")
    return identity


def _named(line: bytes) -> Sequence[tuple[str, int]]:
    try:
        told = json.loads(line)
        files = [(str(name), int(nbytes)) for name, nbytes in told]
    except (ValueError, TypeError) as error:
        raise SpecError(f"the files of a manifest are not named: {error}") from error
    total = sum(nbytes for _, nbytes in files)
    if total > MOST_BYTES or any(nbytes < 0 or not is_part(name) for name, nbytes in files):
        raise SpecError(f"these are not the files of a manifest, or more than {MOST_BYTES} bytes")
    return files


async def _write(path: Path, nbytes: int, body: Body) -> None:
    with path.open("xb") as file:
        while nbytes:
            piece = await body.read(min(nbytes, _PIECE_BYTES))
            if not piece:
                raise SpecError(f"{path.name} of a manifest ended {nbytes} bytes early")
            await asyncio.to_thread(file.write, piece)
            nbytes -= len(piece)
