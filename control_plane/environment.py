"""Settings from environment variables, for containers and service managers: one table, one reader.

Each variable sets one field of `control_plane.settings`; what the command line says wins over it. A variable of a
known name with a value that does not parse is an error, never a silent default. Limits: values are flat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from control_plane.settings import AgentPlace, Settings, SlotRange


def _patterns(text: str) -> tuple[str, ...]:
    patterns = tuple(part.strip() for part in text.split(",") if part.strip())
    if not patterns:
        raise ValueError("expected one pattern or several, separated by commas")
    return patterns


def database_url(text: str) -> str:
    """As `DatabaseSettings.url` has it; raises ValueError."""
    from control_plane.database.url import is_postgresql, sqlite_path
    from control_plane.errors import StorageUnavailable

    try:
        return text if is_postgresql(text) else str(sqlite_path(text))
    except StorageUnavailable as error:
        raise ValueError(error.message) from error


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("0 or 1 is needed")
    return text == "1"


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be a number of seconds, 0 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("must be a number from 0 to 1")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected {' or '.join(choices)}")
        return text

    return parse


def store_uri(text: str) -> str:
    """Checked for its form only: whether the store works is found out beside the start."""
    from model_loader.errors import LoaderError
    from model_loader.objects.location import S3Location

    if text.startswith("http+stoker:"):
        from model_loader.objects.http import parse_address

        try:
            parse_address(text)
        except LoaderError as error:
            raise ValueError(str(error)) from error
        return text.rstrip("/")
    if text.startswith("s3:"):
        try:
            return S3Location.parse(text).uri
        except LoaderError as error:
            raise ValueError(str(error)) from error
    if not text.startswith("file:///"):
        raise ValueError("expected file:///FOLDER, s3://BUCKET/PREFIX or http+stoker://HOST:PORT")
    return text


def slot_store_uri(text: str) -> str:
    uri = store_uri(text)
    if uri.startswith("file:"):
        raise ValueError("a folder is not reached from other machines: give http+stoker://HOST:PORT or s3://BUCKET")
    return uri


ENVIRONMENT: Final[dict[str, tuple[str, str, Callable[[str], Any]] | None]] = {
    "STOKER_DATABASE": ("database", "url", database_url),
    "STOKER_HOST": ("http", "host", str),
    "STOKER_PORT": ("http", "port", _count),
    "STOKER_DRAIN_S": ("http", "shutdown_drain_s", _seconds),
    "STOKER_BODY_BYTES": ("http", "body_bytes", _count),
    "STOKER_QUEUE_REQUESTS": ("queue", "max_requests", _count),
    "STOKER_QUEUE_BYTES": ("queue", "max_bytes", _count),
    "STOKER_LEASE_S": ("gateway", "lease_s", _seconds),
    "STOKER_ADVERTISE_URL": ("gateway", "url", str),
    "STOKER_SLOTS": ("slot", "range", SlotRange.parse),
    "STOKER_AGENTS": ("slot", "agents", AgentPlace.parse_list),
    "STOKER_AGENT_SECRET_FILE": ("slot", "agent_secret_file", str),
    "STOKER_SLOT_HOLD_S": ("slot", "hold_s", _seconds),
    "STOKER_SLOT_REPLICAS": ("slot", "most_replicas", _count),
    "STOKER_WARM_WORKERS": ("slot", "warm_workers", _count),
    "STOKER_POOL_BYTES": ("slot", "pool_bytes", _count),
    "STOKER_DISK_BYTES": ("slot", "disk_bytes", _count),
    "STOKER_KEEP_FORMS": ("slot", "keep_forms", _switch),
    "STOKER_ORPHAN_S": ("slot", "orphan_s", _seconds),
    "STOKER_LOG_RETENTION_S": ("retention", "log_s", _seconds),
    "STOKER_STORE": ("store", "uri", store_uri),
    "STOKER_SLOT_STORE": ("store", "slots_uri", slot_store_uri),
    "STOKER_ALLOWED_MODELS": ("models", "allowed", _patterns),
    "STOKER_KV_QUOTA_BYTES": ("kv", "quota_bytes", _count),
    "STOKER_KV_GRACE_S": ("kv", "grace_s", _seconds),
    "STOKER_KV_ORPHAN_S": ("kv", "orphan_s", _seconds),
    "STOKER_TRACE_SHARE": ("traces", "share", _share),
    "STOKER_REQUIRED": None,  # what else the environment has to hold (`control_plane.required`)
    "STOKER_BACKEND": ("kubernetes", "backend", _one_of("local", "kubernetes")),
    "STOKER_NAMESPACE": ("kubernetes", "namespace", str),
    "STOKER_RELEASE": ("kubernetes", "release", str),
    "STOKER_POD_NAME": ("kubernetes", "pod_name", str),
    "STOKER_POD_IP": ("kubernetes", "pod_ip", str),
    "STOKER_SLOT_IMAGE": ("kubernetes", "slot_image", str),
    "STOKER_SLOT_POOL": ("kubernetes", "slot_pool", str),
    "STOKER_SLOT_POOLS_FILE": ("kubernetes", "slot_pools_file", str),
    "STOKER_SLOT_POOLS_OWNER": ("kubernetes", "slot_pools_owner", str),
    "STOKER_KUBECONFIG": ("kubernetes", "kubeconfig", str),
    "STOKER_FUNCTION_OBJECTS": ("kubernetes", "function_objects", _one_of("own", "all")),
    "STOKER_UNSCHEDULABLE_S": ("kubernetes", "unschedulable_s", _seconds),
    "STOKER_PULLING_S": ("kubernetes", "pulling_s", _seconds),
    "STOKER_STARTING_S": ("kubernetes", "starting_s", _seconds),
    "STOKER_TROUBLE_S": ("kubernetes", "trouble_s", _seconds),
    "STOKER_MASTER_KEY": None,  # what tenants' keys are wrapped with: in no settings, in no database
    "STOKER_ADMIN_KEY": None,  # the first administrator's key: read where keys are made, never kept in settings
}


class BadVariable(ValueError):
    """An environment variable does not parse; the message names it and its value."""


def apply_environment(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """The settings with every known variable of `environ` taken over."""
    for name, target in ENVIRONMENT.items():
        text = environ.get(name)
        if target is None or text is None or text == "":
            continue
        group_name, field_name, parse = target
        try:
            value = parse(text)
        except ValueError as error:
            raise BadVariable(f"{name}={text!r}: {error}") from error
        group = dataclasses.replace(getattr(settings, group_name), **{field_name: value})
        settings = dataclasses.replace(settings, **{group_name: group})
    return settings
