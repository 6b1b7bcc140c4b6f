"""Who may use this installation's own object store over HTTP, and what of it.

    token = claims (slot, tenant, checkpoint, ...) + MAC under a secret of the installation

A token is for the work of one replica: it opens its tenant's stored KV and its checkpoint, at that slot, until it runs
out. Every gateway makes the same one and nobody stores it; those of replicas that live longer are replaced in time. It
is void once nothing of its tenant runs at that slot. Gateways use the token they show one another, which opens
everything. Limits: within a tenant all KV is opened alike, whatever function made it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from control_plane.sealing import EVERYBODY

CHECKPOINTS: Final = "checkpoints/"
"""`checkpoints/IDENTITY/N`: the Nth file of an imported checkpoint, wherever it lies on the control plane's machine."""
PACKS: Final = "kv/packs/"
CHECKS: Final = "store-check/"
STEP_S: Final = 3 * 3600
"""All tokens that are made within one of these run out together, two to three of them later."""
RENEW_S: Final = 1800.0
"""Pause between two rounds in which slots are given the newest."""
_MARK: Final = "st1."
_PLACE_DIGITS: Final = 16
_OLD_PACK: Final = re.compile(r"kv/packs/[0-9a-f]{2}/[0-9a-f]{64}")


@lru_cache(4096)
def place_of(tenant: str) -> str:
    """Under `kv/packs/`: where a tenant's KV lies. `printf 'tenant:NAME' | sha256sum` begins with it."""
    return hashlib.sha256(_bytes(f"tenant:{tenant}")).hexdigest()[:_PLACE_DIGITS]


def is_placeless(key: str) -> bool:
    """Whether it is a pack of a release that told tenants' packs not apart by name."""
    return _OLD_PACK.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class StoreScope:
    """Prefixes of keys; an empty one is all of them."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    whose: str = "this token"
    owners: frozenset[str] = frozenset()
    """Whose packs without a place it reads."""

    def may_read(self, key: str) -> bool:
        return key.startswith(self.reads)

    def may_write(self, key: str) -> bool:
        return key.startswith(self.writes)


EVERYTHING: Final = StoreScope(("",), ("",))


class StoreClaims(msgspec.Struct, frozen=True, array_like=True):
    """What a token says."""

    slot_id: str
    tenant: str
    """Empty: only a checkpoint is to be loaded, for nobody yet."""
    identity: str
    shares: bool
    """Its function's KV is shared with every tenant whose function says so, too."""
    until_s: int

    @property
    def scope(self) -> StoreScope:
        return _scope(self.slot_id, self.tenant, self.identity, self.shares)


@lru_cache(4096)
def _scope(slot_id: str, tenant: str, identity: str, shares: bool) -> StoreScope:
    from model_loader.forms.sweeping import form_names

    owners = frozenset(filter(None, (tenant, EVERYBODY if tenant and shares else "")))
    kv = sorted(f"{PACKS}{place_of(owner)}/" for owner in owners)
    made = [*(f"forms/{name}/" for name in sorted(form_names(identity))), f"artifacts/{identity}/"] if identity else []
    given = [f"{CHECKPOINTS}{identity}/", f"models/{identity}/"] if identity else []
    writes = (*kv, *made, CHECKS)
    whose = f"the token of {slot_id} for {f'tenant {tenant}' if tenant else 'no tenant'} and checkpoint {identity[:16]}"
    return StoreScope((*writes, *given), writes, whose, owners)


class StoreTokens:
    def __init__(self, secret: bytes, now_s: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._now_s = now_s

    def of(self, slot_id: str, tenant: str, identity: str, *, shares: bool = False) -> str:
        until_s = (int(self._now_s()) // STEP_S + 3) * STEP_S
        claims = msgspec.json.encode(StoreClaims(slot_id, tenant, identity, shares, until_s))
        return f"{_MARK}{base64.urlsafe_b64encode(claims).decode()}.{self._mac(claims)}"

    def read(self, token: str) -> StoreClaims | None:
        """What it says, whether or not it has run out; None: it was not made here."""
        body, _, mac = token.removeprefix(_MARK).rpartition(".")
        try:
            claims = base64.urlsafe_b64decode(_bytes(body))
        except (binascii.Error, ValueError):
            return None
        if not token.startswith(_MARK) or not hmac.compare_digest(_bytes(self._mac(claims)), _bytes(mac)):
            return None
        return msgspec.json.decode(claims, type=StoreClaims)

    def has_run_out(self, claims: StoreClaims) -> bool:
        return self._now_s() >= claims.until_s

    def _mac(self, claims: bytes) -> str:
        return hmac.new(self._secret, b"stoker store:" + claims, hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    """Of what may have come in a header."""
    return text.encode("utf-8", "surrogatepass")
