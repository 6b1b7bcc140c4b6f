"""API keys, who they belong to, and the installation's own secrets.

A key is `sk-stoker-` and 43 random characters, shown once; stored is its SHA-256 and a prefix for people. Every key
has a tenant and a role. Keys are few: all that are valid are held in memory, so that a request costs no query.
Limits: a key revoked through another gateway is refused here after the next `refresh`.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from control_plane.changes import Changes
from control_plane.database import Connection, Database, to_the_end
from control_plane.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unauthenticated

KEY_PREFIX: Final = "sk-stoker-"
GIVEN_KEY_CHARS: Final = 24
"""Fewest characters of a key that an operator chose; those made here have 43 after their prefix."""
DEFAULT_TENANT: Final = "default"


class Role(enum.StrEnum):
    ADMIN = "admin"
    """Deploys, manages keys, sees usage of its tenant."""
    USER = "user"
    """Calls functions of its tenant."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: str
    tenant: str
    name: str
    role: Role
    display: str
    """Beginning of the secret, to recognise it by."""
    created_us: int
    revoked_us: int | None = None

    def require(self, role: Role) -> None:
        if role is Role.ADMIN and self.role is not Role.ADMIN:
            raise Forbidden(f"this needs a key with role admin; key {self.display} ({self.name}) has role {self.role}")

    def require_operator(self) -> None:
        """What concerns all tenants is for who runs the installation."""
        self.require(Role.ADMIN)
        if self.tenant != DEFAULT_TENANT:
            raise Forbidden(
                f"this concerns the whole installation: it needs an admin key of the tenant {DEFAULT_TENANT}"
            )


_COLUMNS: Final = "id, tenant, name, role, display, created_us, revoked_us"


def _key(row: Any) -> ApiKey:
    return ApiKey(row[0], row[1], row[2], Role(row[3]), row[4], row[5], row[6])


class Keys:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._by_hash: dict[bytes, ApiKey] = {}
        self._secrets: dict[str, bytes] = {}
        self._scopes: dict[str, str] = {}
        self._changes = Changes()

    async def refresh(self) -> None:
        """Read the valid keys; once at start, and now and then where several gateways share a database."""

        def run(connection: Connection) -> list[Any]:
            return connection.execute(f"SELECT {_COLUMNS}, hash FROM api_keys WHERE revoked_us IS NULL").fetchall()

        rows = await self._changes.read(lambda: self._database.read(run))
        known = {role.value for role in Role}
        # A role that only a newer release knows gives nobody anything here, and takes nothing from the other keys.
        self._by_hash = {bytes(row[7]): _key(row) for row in rows if row[3] in known}

    def authenticate(self, authorization: str | None) -> ApiKey:
        """The key of an `Authorization` header; raises `Unauthenticated`. Looked up by hash, so time tells nothing."""
        if not authorization:
            raise Unauthenticated("give an API key: Authorization: Bearer sk-stoker-...", code="missing_api_key")
        scheme, _, secret = authorization.partition(" ")
        key = self.lookup(secret.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise Unauthenticated("this API key is not known or was revoked; an admin makes keys: stoker keys create")
        return key

    def lookup(self, secret: str) -> ApiKey | None:
        return self._by_hash.get(_hash(secret))

    async def create(self, tenant: str, name: str, role: Role = Role.USER) -> tuple[ApiKey, str]:
        """A new key and its secret, which nobody can show again."""
        return await self._store(tenant, name, role, KEY_PREFIX + secrets.token_urlsafe(32))

    async def _store(self, tenant: str, name: str, role: Role, secret: str) -> tuple[ApiKey, str]:
        key = ApiKey(
            id="key_" + secrets.token_hex(6),
            tenant=tenant,
            name=name,
            role=role,
            display=secret[: 4 + len(KEY_PREFIX) * secret.startswith(KEY_PREFIX)] + "...",
            created_us=self._database.clock.now_us(),
        )
        digest = _hash(secret)

        def run(connection: Connection) -> None:
            connection.execute(
                """INSERT INTO api_keys (id, tenant, name, role, hash, display, created_us)
                VALUES (:id, :tenant, :name, :role, :hash, :display, :created_us)""",
                {
                    "id": key.id,
                    "tenant": tenant,
                    "name": name,
                    "role": role.value,
                    "hash": digest,
                    "display": key.display,
                    "created_us": key.created_us,
                },
            )

        async def change() -> None:
            await self._database.write(run)
            self._changes.note()
            self._by_hash[digest] = key

        await to_the_end(change())
        return key, secret

    async def revoke(self, key_id: str, tenant: str) -> ApiKey:
        """Idempotent; takes effect here at once."""

        def run(connection: Connection) -> Any:
            values = {"id": key_id, "tenant": tenant, "now": self._database.clock.now_us()}
            connection.execute(
                "UPDATE api_keys SET revoked_us = :now WHERE id = :id AND tenant = :tenant AND revoked_us IS NULL",
                values,
            )
            return connection.execute(
                f"SELECT {_COLUMNS} FROM api_keys WHERE id = :id AND tenant = :tenant", values
            ).fetchone()

        async def change() -> ApiKey:
            row = await self._database.write(run)
            if row is None:
                raise NotFound(f"there is no API key {key_id}", param="id")
            self._changes.note()
            self._by_hash = {digest: key for digest, key in self._by_hash.items() if key.id != key_id}
            return _key(row)

        return await to_the_end(change())

    async def list(self, tenant: str) -> list[ApiKey]:
        def run(connection: Connection) -> list[Any]:
            return connection.execute(
                f"SELECT {_COLUMNS} FROM api_keys WHERE tenant = :tenant ORDER BY created_us, id", {"tenant": tenant}
            ).fetchall()

        return [_key(row) for row in await self._database.read(run)]

    async def ensure_admin_key(self, path: Path, given: str = "") -> str:
        """The local admin key of embedded mode, in a file only its owner can read; made at the first start, and again
        if the file is gone or the database does not know it. `given` is a key chosen by the operator."""
        if given:
            await self._take_admin_key(given)
            if read_private(path) != given:
                write_private(path, given + "\n")
            return given
        secret = read_private(path)
        key = self.lookup(secret) if secret else None
        if key is not None and key.role is Role.ADMIN:
            return secret
        _, secret = await self.create(DEFAULT_TENANT, "local admin", Role.ADMIN)
        write_private(path, secret + "\n")
        return secret

    async def _take_admin_key(self, given: str) -> None:
        if len(given) < GIVEN_KEY_CHARS or not given.isascii() or any(c.isspace() for c in given):
            raise InvalidRequest(
                f"STOKER_ADMIN_KEY needs at least {GIVEN_KEY_CHARS} ASCII characters without spaces", param="admin_key"
            )
        known = self.lookup(given)
        if known is not None and known.role is Role.ADMIN:
            return
        digest = _hash(given)

        def taken(connection: Connection) -> Any:
            return connection.execute("SELECT id FROM api_keys WHERE hash = :hash", {"hash": digest}).fetchone()

        row = await self._database.read(taken)
        if row is not None:
            raise Conflict(f"STOKER_ADMIN_KEY is key {row[0]}, which was revoked or is no admin's: choose another")
        await self._store(DEFAULT_TENANT, "given admin", Role.ADMIN, given)

    # --- secrets of the installation --------------------------------------------------------------------------

    async def internal_secret(self, name: str) -> bytes:
        """32 random bytes under a name, made at first use and the same for every gateway ever after."""
        known = self._secrets.get(name)
        if known is None:
            known = self._secrets[name] = await self._stored_secret(name)
        return known

    async def _stored_secret(self, name: str) -> bytes:
        def run(connection: Connection) -> bytes:
            values = {"name": name, "value": secrets.token_bytes(32), "now": self._database.clock.now_us()}
            connection.execute(
                """INSERT INTO secrets (name, value, created_us) VALUES (:name, :value, :now)
                ON CONFLICT (name) DO NOTHING""",
                values,
            )
            (value,) = connection.execute("SELECT value FROM secrets WHERE name = :name", values).fetchone()
            return bytes(value)

        return await self._database.write(run)

    async def kv_scope(self, tenant: str, key_number: int = 0) -> str:
        """Under what name a tenant's KV is kept: an HMAC, so that nobody can name another tenant's. What is sealed with
        different keys is kept under different names."""
        name = f"{tenant}\0{key_number}" if key_number else tenant
        scope = self._scopes.get(name)
        if scope is None:
            secret = await self.internal_secret("kv-scope")
            scope = self._scopes[name] = hmac.new(secret, name.encode(), hashlib.sha256).hexdigest()
        return scope


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def read_private(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, on the disk when it returns, and never readable by others, not even for a moment."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    # NOTE: what is wrapped with a master key is in the database with fsync: the file must not be lost to a power cut
    # that spares it.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
