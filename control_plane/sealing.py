"""Encryption at rest, per tenant: what is stored of a tenant's requests is sealed with its key, and gone with it.

A tenant's key is 32 bytes, kept in the database wrapped (AES-256-GCM) by the installation's master key, which is in no
database: `STOKER_MASTER_KEY`, or a file beside the data of a single copy. Each request has a key of its own, derived
(HMAC-SHA256) from its tenant's, so that random nonces never come near their bound. Deleting a tenant's key erases the
wrapped bytes: journal and KV sealed with it can be read by nobody any more, in whatever backup they lie.
Limits: model, function, times and counts are not sealed (the bill needs them); a request in flight when its key is
deleted goes on from memory, and cannot be resumed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from control_plane.changes import Changes
from control_plane.database import Connection, Database, to_the_end
from control_plane.errors import Damaged, InvalidRequest, KeyDeleted, StorageUnavailable
from control_plane.tenants import Keys, read_private, write_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
EVERYBODY: Final = "*"
"""Whose KV is counted as that shares with all tenants: no tenant's name."""
NOT_SEALED: Final = 0
"""The key number of what is stored in the clear."""


def _cipher(key: bytes) -> AESGCM:
    # Imported by those who seal: it costs a control plane without tenant keys nothing.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _seal(cipher: AESGCM, data: bytes, context: bytes) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + cipher.encrypt(nonce, data, context)


def _open(cipher: AESGCM, sealed: bytes, context: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context)
    except (InvalidTag, ValueError) as error:
        raise Damaged("something sealed does not open with its key: its bytes were altered") from error


class RequestSeal:
    """Seals and opens the parts of one request. Each part is bound to its name and place."""

    def __init__(self, key: bytes, number: int, request_id: str) -> None:
        self.number = number
        self._context = request_id.encode()
        self._cipher = _cipher(hmac.new(key, b"request\0" + self._context, hashlib.sha256).digest())

    def seal(self, part: str, data: bytes) -> bytes:
        return _seal(self._cipher, data, self._context + b"\0" + part.encode())

    def open(self, part: str, sealed: bytes) -> bytes:
        return _open(self._cipher, sealed, self._context + b"\0" + part.encode())


@dataclass(frozen=True)
class TenantKey:
    tenant: str
    number: int
    """Counts a tenant's keys, from 1; a sealed request names the one it was sealed with."""
    created_us: int
    material: bytes | None
    """None: deleted, or damaged."""
    damaged: bool = False
    """Its wrapped bytes do not open, while those of others do. What it sealed cannot be read, and nothing new is
    stored for its tenant until it gets another key: least of all in the clear."""

    @cached_property
    def kv_key(self) -> bytes:
        """What a slot is given to seal this tenant's KV with."""
        return b"" if self.material is None else hmac.new(self.material, b"kv", hashlib.sha256).digest()

    @property
    def fingerprint(self) -> str:
        """Recognises a key without giving anything of it away."""
        if self.material is None:
            return ""
        return hmac.new(self.material, b"fingerprint", hashlib.sha256).hexdigest()[:16]


class KvAccess(NamedTuple):
    """What a request's stored KV is found and opened with."""

    scope: str
    key: bytes = b""
    """Empty: in the clear."""
    owner: str = ""
    """Whose quota it counts against; empty: the tenant's."""


class MasterKey:
    """The installation's own key: from the environment, else from a file that is made when it is first needed. Without
    a path (several control planes, of which each would make its own) only the environment's will do."""

    def __init__(self, path: Path | None, given: str = "") -> None:
        self._path = path
        self._given = given

    def load(self, *, make: bool) -> bytes | None:
        if self._given:
            return key_of(self._given, "STOKER_MASTER_KEY")
        if self._path is None:
            return None
        known = read_private(self._path)
        if known:
            return key_of(known, self._path.name)
        if not make:
            return None
        key = secrets.token_bytes(KEY_BYTES)
        write_private(self._path, base64.b64encode(key).decode() + "\n")
        return key


def key_of(text: str, name: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"{name} must be {KEY_BYTES} bytes in base64 (openssl rand -base64 32)", param="key")
    return key


def _damaged(key: TenantKey) -> Damaged:
    return Damaged(f"key {key.number} of tenant {key.tenant} is damaged in the database: an admin must set a new one")


class TenantKeys:
    """All tenants' keys, held in memory; `refresh` reads what other gateways changed."""

    def __init__(self, database: Database, keys: Keys, master: MasterKey) -> None:
        self._database = database
        self._api_keys = keys
        self._master = master
        self._keys: dict[tuple[str, int], TenantKey] = {}
        self._current: dict[str, TenantKey] = {}
        self._changes = Changes()

    async def refresh(self) -> None:
        def run(connection: Connection) -> list[Any]:
            return connection.execute(
                "SELECT tenant, number, created_us, wrapped FROM tenant_keys ORDER BY number"
            ).fetchall()

        rows = await self._changes.read(lambda: self._database.read(run))
        if not rows:
            self._keys, self._current = {}, {}
            return
        master = self._master.load(make=False)
        if master is None and any(row[3] is not None for row in rows):
            raise StorageUnavailable(
                "tenants have keys in this database and there is no master key to open them: set STOKER_MASTER_KEY to "
                "the one they were made with"
            )
        keys: dict[tuple[str, int], TenantKey] = {}
        current: dict[str, TenantKey] = {}
        for tenant, number, created_us, wrapped in rows:
            material, damaged = None, False
            if wrapped is not None and master is not None:
                try:
                    material = _open(_cipher(master), bytes(wrapped), f"{tenant}\0{number}".encode())
                except Damaged:
                    damaged = True
            key = keys[tenant, number] = TenantKey(tenant, number, created_us, material, damaged)
            current.pop(tenant, None)
            if material is not None or damaged:
                current[tenant] = key
        lost = [key for key in keys.values() if key.damaged]
        if lost and not any(key.material for key in keys.values()):
            raise StorageUnavailable(
                "no tenant's key opens with this master key: it is another one than when they were made. Start with "
                "the master key of that time"
            )
        for key in lost:
            logger.error("event=tenant_key_damaged tenant=%s number=%d", key.tenant, key.number)
        self._keys, self._current = keys, current

    def current(self, tenant: str) -> TenantKey | None:
        """What is sealed from now on is sealed with this; None: the tenant has no key."""
        return self._current.get(tenant)

    def knows(self, tenant: str, number: int) -> bool:
        """Whether this gateway has heard of the key; if not, it was set through another, and `refresh` reads it."""
        return number == NOT_SEALED or (tenant, number) in self._keys

    def number(self, tenant: str) -> int:
        key = self._current.get(tenant)
        return NOT_SEALED if key is None else key.number

    async def kv_access(self, tenant: str, number: int | None = None, *, shares: str = "tenant") -> KvAccess:
        """How a request finds its KV: one that was accepted under key `number` finds what was sealed with that.
        `shares`: its function's `share_prefixes`."""
        key = self._current.get(tenant) if number is None else self._keys.get((tenant, number))
        if key is not None and key.damaged:
            raise _damaged(key)
        if key is None and shares == "all":
            return KvAccess(await self._api_keys.kv_scope(EVERYBODY), owner=EVERYBODY)
        scope = await self._api_keys.kv_scope(tenant, NOT_SEALED if key is None else key.number)
        return KvAccess(scope, b"" if key is None else key.kv_key)

    def numbers(self, tenant: str) -> list[int]:
        """Under which key numbers a tenant's KV may lie: in the clear, and sealed with each key that is not deleted."""
        return [NOT_SEALED, *(n for (t, n), key in self._keys.items() if t == tenant and key.material is not None)]

    def sealed_under(self, tenant: str) -> list[int]:
        """The numbers of a tenant's keys that are not deleted, damaged ones among them."""
        return [n for (t, n), key in self._keys.items() if t == tenant and (key.material is not None or key.damaged)]

    def kv_keys(self) -> list[bytes]:
        """Of every key that is not deleted."""
        return [key.kv_key for key in self._keys.values() if key.material is not None]

    def seal_of(self, tenant: str, number: int, request_id: str) -> RequestSeal | None:
        """For the parts of a request stored under key `number`; None: they are in the clear. Raises `KeyDeleted`."""
        if number == NOT_SEALED:
            return None
        key = self._keys.get((tenant, number))
        if key is not None and key.damaged:
            raise _damaged(key)
        if key is None or key.material is None:
            raise KeyDeleted(f"what was stored of {request_id} was sealed with a key that has been deleted")
        return RequestSeal(key.material, number, request_id)

    async def set(self, tenant: str, material: bytes | None = None) -> TenantKey:
        """A new key; what earlier ones sealed can still be read. `material`: the tenant's own, else a random one."""
        material = material or secrets.token_bytes(KEY_BYTES)
        master = self._master.load(make=True)
        if master is None:
            raise StorageUnavailable(
                "there is no master key: set STOKER_MASTER_KEY, the same for every control plane of this database"
            )
        wrapping = _cipher(master)
        now_us = self._database.clock.now_us()

        def run(connection: Connection) -> int:
            (last,) = connection.execute(
                "SELECT COALESCE(MAX(number), 0) FROM tenant_keys WHERE tenant = :tenant", {"tenant": tenant}
            ).fetchone()
            number = int(last) + 1
            values = {
                "tenant": tenant,
                "number": number,
                "created_us": now_us,
                "wrapped": _seal(wrapping, material, f"{tenant}\0{number}".encode()),
            }
            connection.execute(
                "INSERT INTO tenant_keys (tenant, number, created_us, wrapped) "
                "VALUES (:tenant, :number, :created_us, :wrapped)",
                values,
            )
            return number

        async def change() -> TenantKey:
            number = await self._database.write(run, durable=True)
            self._changes.note()
            key = TenantKey(tenant, number, now_us, material)
            self._keys[tenant, number] = self._current[tenant] = key
            return key

        return await to_the_end(change())

    async def delete(self, tenant: str, also: Callable[[Connection], object] = lambda connection: None) -> int:
        """Erase all of a tenant's keys, and with them what they sealed. How many there were. `also`: what else goes
        with them, in the same transaction."""

        def run(connection: Connection) -> int:
            also(connection)
            return connection.execute(
                "UPDATE tenant_keys SET wrapped = NULL WHERE tenant = :tenant AND wrapped IS NOT NULL",
                {"tenant": tenant},
            ).rowcount

        async def change() -> int:
            erased = await self._database.write(run, durable=True)
            self._changes.note()
            self._current.pop(tenant, None)
            for place, key in list(self._keys.items()):
                if key.tenant == tenant:
                    self._keys[place] = TenantKey(tenant, key.number, key.created_us, None)
            return erased

        return await to_the_end(change())
