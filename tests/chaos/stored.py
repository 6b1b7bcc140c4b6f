"""The objects of a service's store, as whoever means it harm sees them: beside the service, not through it.

Limits: what is put takes the place of what was there at once and whole, as in any store.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol


class Objects(Protocol):
    def get(self, name: str) -> bytes | None:
        """None: it is not there."""
        ...

    def put(self, name: str, content: bytes) -> None: ...

    def delete(self, name: str) -> None: ...

    def names(self, prefix: str) -> list[str]:
        """In order, of all that begin with it."""
        ...


class FolderObjects:
    """A directory store's. A new file takes an old one's place, for readers that have it open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None

    def put(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".damaged")
        beside.write_bytes(content)
        os.replace(beside, path)

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def names(self, prefix: str) -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.glob(f"{prefix}**/*") if p.is_file())


class BucketObjects:
    """A bucket's, under `prefix`, by a client of its own."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read())
        except self._client.exceptions.NoSuchKey:
            return None

    def put(self, name: str, content: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def names(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        return sorted(item["Key"].removeprefix(self._prefix) for page in pages for item in page.get("Contents", ()))
