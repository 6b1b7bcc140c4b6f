"""What a loading process is told: which form, where to, and what places there are. JSON, on its stdin.

Limits: it holds tokens of peers and store, so it is never written to disk or shown in a list of processes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from model_loader.errors import FormatError
from model_loader.ranges.peer import PeerAddress


@dataclass(frozen=True, slots=True)
class FormOrder:
    manifest_path: str
    dtype: str
    out: str
    peers: tuple[PeerAddress, ...] = ()
    pool_key: str = ""
    """Under which peers have it."""
    recycle: str = ""
    disk: str = ""
    """Directory of the disk tier; empty: none."""
    disk_bytes: int = 0
    store: str = ""
    """URI of the object store where forms are kept; empty: none."""
    threads: int = 0
    store_token: str = ""
    """What stores of a control plane are used with (`model_loader.objects.http`)."""

    @staticmethod
    def parse(raw: bytes) -> FormOrder:
        try:
            given: dict[str, Any] = json.loads(raw)
            peers = tuple(PeerAddress(**peer) for peer in given.pop("peers", ()))
            return FormOrder(**given, peers=peers)
        except (ValueError, TypeError) as error:
            raise FormatError(f"an order for a form cannot be read: {error}") from error

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()
