"""Who may use this installation's own object store over HTTP, and what of it.

A slot's token is derived from a secret of the installation and the slot's name, so that every gateway knows it and
nobody stores it; it reads what slots read, writes what slots write, and is void once the slot is gone. Gateways use the
token they show one another, which opens everything. Limits: within a slot all replicas have the same token, as they
have the same memory.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

_PREFIX: Final = "slot."
CHECKPOINTS: Final = "checkpoints/"
"""`checkpoints/IDENTITY/N`: the Nth file of an imported checkpoint, wherever it lies on the control plane's machine."""
SLOT_WRITES: Final = ("kv/", "forms/", "artifacts/", "store-check/")
SLOT_READS: Final = (*SLOT_WRITES, "models/", CHECKPOINTS)


@dataclass(frozen=True, slots=True)
class StoreScope:
    """Prefixes of keys; an empty one is all of them."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def may_read(self, key: str) -> bool:
        return key.startswith(self.reads)

    def may_write(self, key: str) -> bool:
        return key.startswith(self.writes)


EVERYTHING: Final = StoreScope(("",), ("",))
OF_A_SLOT: Final = StoreScope(SLOT_READS, SLOT_WRITES)


class StoreTokens:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of(self, slot_id: str) -> str:
        mac = hmac.new(self._secret, _bytes(f"stoker store:{slot_id}"), hashlib.sha256).hexdigest()
        return f"{_PREFIX}{slot_id}.{mac}"

    def slot_of(self, token: str) -> str | None:
        """Whose token it is; None: nobody's."""
        slot_id = token.removeprefix(_PREFIX).rpartition(".")[0]
        right = token.startswith(_PREFIX) and hmac.compare_digest(_bytes(self.of(slot_id)), _bytes(token))
        return slot_id if right and slot_id else None


def _bytes(text: str) -> bytes:
    """Of what may have come in a header."""
    return text.encode("utf-8", "surrogatepass")
