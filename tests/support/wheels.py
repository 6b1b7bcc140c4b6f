"""Wheels for tests, good and bad, written by hand."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path


def make_wheel(
    folder: Path,
    members: Mapping[str, bytes],
    *,
    name: str = "tiny_model",
    version: str = "1.0",
    record: Mapping[str, bytes] | None = None,
) -> Path:
    """`record` gives contents other than the true ones for the RECORD's digests."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n".encode()
    wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents = {**members, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    lines = [
        f"{member},sha256={_digest((record or {}).get(member, content))},{len(content)}"
        for member, content in contents.items()
    ]
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in contents.items():
            archive.writestr(member, content)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
