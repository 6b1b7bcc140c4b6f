"""The tables of scaling: load by windows, start times, quotas in devices, places for slots, names and objects of
functions. Part of `schema`.

Limits: as there.
"""

from __future__ import annotations

from typing import Final

from control_plane.migration import Migration

LOAD: Final = Migration(
    10,
    "load by windows, when it was watched, and how long starts took",
    (
        """
        CREATE TABLE load_windows (
            tenant TEXT NOT NULL,
            function TEXT NOT NULL,
            length_s BIGINT NOT NULL,
            start_s BIGINT NOT NULL,
            gateway TEXT NOT NULL,
            data {blob} NOT NULL,
            PRIMARY KEY (tenant, function, length_s, start_s, gateway)
        ) {clustered}""",
        "CREATE INDEX load_windows_by_age ON load_windows (length_s, start_s)",
        """
        CREATE TABLE load_observed (
            gateway TEXT NOT NULL,
            since_s BIGINT NOT NULL,
            until_s BIGINT NOT NULL,
            PRIMARY KEY (gateway, since_s)
        ) {clustered}""",
        """
        CREATE TABLE start_times (
            tenant TEXT NOT NULL,
            function TEXT NOT NULL,
            changed_s BIGINT NOT NULL,
            data TEXT NOT NULL,
            PRIMARY KEY (tenant, function)
        ) {clustered}""",
    ),
)

QUOTAS: Final = Migration(
    11,
    "devices that a tenant may hold at once, and its weight where they are short",
    (
        """
        CREATE TABLE tenant_quotas (
            tenant TEXT PRIMARY KEY,
            devices BIGINT,
            weight DOUBLE PRECISION NOT NULL,
            changed_us BIGINT NOT NULL
        ) {clustered}""",
    ),
)

SLOT_PLACES: Final = Migration(
    12,
    "where a slot may be, at which gateway, and whether one is wanted there",
    (
        """
        CREATE TABLE slot_places (
            id TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            least BIGINT NOT NULL,
            wanted BIGINT NOT NULL,
            changed_us BIGINT NOT NULL
        )""",
    ),
)

MODEL_NAMES: Final = Migration(
    13,
    "which function a model name means, and as of which revision of it",
    (
        """
        CREATE TABLE model_names (
            tenant TEXT NOT NULL,
            function TEXT NOT NULL,
            model TEXT NOT NULL,
            PRIMARY KEY (tenant, function, model)
        ) {clustered}""",
        "CREATE INDEX model_names_by_model ON model_names (tenant, model)",
        "ALTER TABLE functions ADD COLUMN named_revision BIGINT NOT NULL DEFAULT 0",
        "CREATE INDEX functions_unnamed ON functions (tenant) WHERE named_revision <> revision",
    ),
)

FUNCTION_OBJECTS: Final = Migration(
    14,
    "which object of a cluster a function is kept in step with, and what both last agreed on",
    (
        """
        CREATE TABLE function_objects (
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            object TEXT NOT NULL,
            uid TEXT NOT NULL,
            generation BIGINT NOT NULL,
            digest TEXT NOT NULL,
            PRIMARY KEY (tenant, name)
        ) {clustered}""",
    ),
)
