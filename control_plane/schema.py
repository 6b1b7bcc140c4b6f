"""The tables, as numbered migrations that only go forward; one SQL text for SQLite and PostgreSQL.

Hot rows are small: what never changes of a request (prompt, parameters) lies in `request_inputs`, because an update
rewrites a whole row. `token_log` is only appended to and has no index: `requests.log_head` names a request's last row
and each row the one before, so that a commit with tokens of 32 streams writes a page or two and not 32. On PostgreSQL
its ids begin with the second they were made in, and it is partitioned by them: old logs go by dropping a partition
(`control_plane.log_partitions`). Times are unix microseconds (`_us`), money integer micro-dollars, states and kinds
text.
Limits: a migration may add (tables, columns with a default, indexes) but not take away what the previous release
still reads, so that two releases can run side by side during an upgrade.
"""

from __future__ import annotations

from typing import Final

from control_plane.migration import LOG_SECOND_BITS, POSTGRESQL, SQLITE, Dialect, Migration, Only
from control_plane.schema_scaling import FUNCTION_OBJECTS, LOAD, MODEL_NAMES, QUOTAS, SLOT_PLACES

__all__ = ["LOG_SECOND_BITS", "MIGRATIONS", "POSTGRESQL", "SQLITE", "Dialect", "Migration"]

_FIRST: Final = Migration(
    1,
    "functions, keys, journal, ledger, decisions",
    (
        """
        CREATE TABLE secrets (
            name TEXT PRIMARY KEY,
            value {blob} NOT NULL,
            created_us BIGINT NOT NULL
        )""",
        """
        CREATE TABLE api_keys (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            role TEXT NOT NULL,
            hash {blob} NOT NULL UNIQUE,
            display TEXT NOT NULL,
            created_us BIGINT NOT NULL,
            revoked_us BIGINT
        )""",
        """
        CREATE TABLE functions (
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            revision BIGINT NOT NULL,
            created_us BIGINT NOT NULL,
            updated_us BIGINT NOT NULL,
            deleted_us BIGINT,
            PRIMARY KEY (tenant, name)
        )""",
        """
        CREATE TABLE revisions (
            tenant TEXT NOT NULL,
            function TEXT NOT NULL,
            revision BIGINT NOT NULL,
            spec TEXT NOT NULL,
            digest TEXT NOT NULL,
            price_microusd_per_hour BIGINT NOT NULL,
            created_us BIGINT NOT NULL,
            state TEXT NOT NULL,
            error_code TEXT,
            error_message TEXT,
            identity TEXT,
            manifest_path TEXT,
            PRIMARY KEY (tenant, function, revision)
        )""",
        """
        CREATE TABLE gateways (
            id TEXT PRIMARY KEY,
            host TEXT NOT NULL,
            pid BIGINT NOT NULL,
            started_us BIGINT NOT NULL,
            lease_until_us BIGINT NOT NULL
        )""",
        """
        CREATE TABLE requests (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            key_id TEXT NOT NULL,
            function TEXT NOT NULL,
            revision BIGINT NOT NULL,
            endpoint TEXT NOT NULL,
            model TEXT NOT NULL,
            durability TEXT NOT NULL,
            on_disconnect TEXT NOT NULL,
            stream BIGINT NOT NULL,
            idempotency_key TEXT,
            body_hash {blob},
            input_tokens BIGINT NOT NULL,
            created_us BIGINT NOT NULL,
            state TEXT NOT NULL,
            owner TEXT NOT NULL,
            epoch BIGINT NOT NULL DEFAULT 0,
            last_seq BIGINT NOT NULL DEFAULT 0,
            log_head BIGINT,
            replica_id TEXT,
            slot_id TEXT,
            assigned_us BIGINT,
            first_token_us BIGINT,
            finished_us BIGINT,
            expires_us BIGINT,
            prefill_us BIGINT NOT NULL DEFAULT 0,
            decode_us BIGINT NOT NULL DEFAULT 0,
            cached_tokens BIGINT NOT NULL DEFAULT 0,
            prefill_ends {blob},
            outcome {blob}
        )""",
        """
        CREATE UNIQUE INDEX requests_idempotency ON requests (tenant, idempotency_key)
            WHERE idempotency_key IS NOT NULL""",
        "CREATE INDEX requests_live ON requests (owner) WHERE state IN ('queued', 'running')",
        "CREATE INDEX requests_expiring ON requests (expires_us) WHERE expires_us IS NOT NULL",
        "CREATE INDEX requests_by_function ON requests (function, created_us)",
        """
        CREATE TABLE request_inputs (
            request_id TEXT PRIMARY KEY,
            params {blob} NOT NULL,
            prompt {blob} NOT NULL
        )""",
        Only("postgresql", "CREATE SEQUENCE log_ids"),
        """
        CREATE TABLE token_log (
            id {log_id},
            previous BIGINT,
            first_seq BIGINT NOT NULL,
            last_seq BIGINT NOT NULL,
            epoch BIGINT NOT NULL,
            payload {blob} NOT NULL
        ) {by_log_id}""",
        Only("postgresql", "CREATE TABLE token_log_rest PARTITION OF token_log DEFAULT"),
        """
        CREATE TABLE attempts (
            request_id TEXT NOT NULL,
            epoch BIGINT NOT NULL,
            replica_id TEXT NOT NULL,
            slot_id TEXT NOT NULL,
            gateway TEXT NOT NULL,
            after_seq BIGINT NOT NULL,
            assigned_us BIGINT NOT NULL,
            ended_us BIGINT,
            last_seq BIGINT,
            reason TEXT,
            loaded_tokens BIGINT,
            recomputed_tokens BIGINT,
            exact BIGINT,
            load_us BIGINT,
            detail TEXT,
            prefill_us BIGINT NOT NULL DEFAULT 0,
            decode_us BIGINT NOT NULL DEFAULT 0,
            PRIMARY KEY (request_id, epoch)
        ) {clustered}""",
        "CREATE INDEX attempts_by_replica ON attempts (replica_id)",
        """
        CREATE TABLE request_kv (
            request_id TEXT NOT NULL,
            number BIGINT NOT NULL,
            epoch BIGINT NOT NULL,
            counted BIGINT NOT NULL,
            chunks {blob} NOT NULL,
            PRIMARY KEY (request_id, number)
        ) {clustered}""",
        """
        CREATE TABLE ledger (
            id {serial},
            at_us BIGINT NOT NULL,
            kind TEXT NOT NULL,
            tenant TEXT NOT NULL,
            key_id TEXT,
            function TEXT NOT NULL,
            revision BIGINT NOT NULL,
            model TEXT,
            request_id TEXT,
            epoch BIGINT,
            replica_id TEXT,
            stage TEXT NOT NULL,
            wall_us BIGINT NOT NULL,
            device_us BIGINT NOT NULL,
            input_tokens BIGINT NOT NULL,
            cached_tokens BIGINT NOT NULL,
            output_tokens BIGINT NOT NULL,
            price_microusd_per_hour BIGINT NOT NULL,
            cost_microusd BIGINT NOT NULL
        )""",
        "CREATE INDEX ledger_by_time ON ledger (at_us)",
        "CREATE INDEX ledger_by_request ON ledger (request_id) WHERE request_id IS NOT NULL",
        "CREATE INDEX ledger_by_replica ON ledger (replica_id) WHERE replica_id IS NOT NULL",
        """
        CREATE TABLE replica_accounts (
            replica_id TEXT PRIMARY KEY,
            version BIGINT NOT NULL DEFAULT 0,
            tenant TEXT NOT NULL,
            function TEXT NOT NULL,
            revision BIGINT NOT NULL,
            price_microusd_per_hour BIGINT NOT NULL,
            charged_us BIGINT NOT NULL DEFAULT 0,
            charged_microusd BIGINT NOT NULL DEFAULT 0,
            attributed_us BIGINT NOT NULL DEFAULT 0,
            cold_us BIGINT NOT NULL DEFAULT 0,
            idle_us BIGINT NOT NULL DEFAULT 0,
            overhead_us BIGINT NOT NULL DEFAULT 0,
            unreported_us BIGINT NOT NULL DEFAULT 0,
            held_us BIGINT NOT NULL DEFAULT 0,
            reported_us BIGINT NOT NULL,
            closed_us BIGINT
        )""",
        "CREATE INDEX replica_accounts_open ON replica_accounts (reported_us) WHERE closed_us IS NULL",
        """
        CREATE TABLE decisions (
            id {serial},
            at_us BIGINT NOT NULL,
            kind TEXT NOT NULL,
            tenant TEXT,
            function TEXT,
            replica_id TEXT,
            request_id TEXT,
            reason TEXT NOT NULL,
            inputs TEXT NOT NULL
        )""",
        "CREATE INDEX decisions_by_time ON decisions (at_us)",
        "CREATE INDEX decisions_by_function ON decisions (function, id)",
        "CREATE INDEX decisions_by_replica ON decisions (replica_id) WHERE replica_id IS NOT NULL",
        "CREATE INDEX decisions_by_request ON decisions (request_id) WHERE request_id IS NOT NULL",
    ),
)

_SECOND: Final = Migration(
    2,
    "appends by the group, logs compacted and dropped by partition",
    (
        "ALTER TABLE requests ADD COLUMN log_tail BIGINT",
        # Where the log's head was before the update that moved it: an update can return only what it leaves behind.
        "ALTER TABLE requests ADD COLUMN log_previous BIGINT",
        Only("postgresql", "CREATE INDEX requests_log_tail ON requests (log_tail) WHERE log_tail IS NOT NULL"),
        # Room on the page for the next version of a row, so that an append touches no index.
        Only("postgresql", "ALTER TABLE requests SET (fillfactor = 50)"),
    ),
)

_GATEWAYS: Final = Migration(
    3,
    "several gateways: addresses, leases, slots",
    (
        "ALTER TABLE gateways ADD COLUMN url TEXT NOT NULL DEFAULT ''",
        """
        CREATE TABLE leases (
            name TEXT PRIMARY KEY,
            holder TEXT NOT NULL,
            until_us BIGINT NOT NULL,
            epoch BIGINT NOT NULL
        )""",
        """
        CREATE TABLE slots (
            id TEXT PRIMARY KEY,
            host TEXT NOT NULL,
            port BIGINT NOT NULL,
            token TEXT NOT NULL,
            incarnation TEXT NOT NULL,
            owner TEXT NOT NULL,
            seen_us BIGINT NOT NULL
        )""",
    ),
)

_FOURTH: Final = Migration(
    4,
    "what stored KV there is for whoever comes next: chunks, packs, observed reuse",
    (
        """
        CREATE TABLE kv_packs (
            pack TEXT PRIMARY KEY,
            nbytes BIGINT NOT NULL,
            state TEXT NOT NULL,
            tenant TEXT NOT NULL,
            reason TEXT NOT NULL,
            created_us BIGINT NOT NULL,
            changed_us BIGINT NOT NULL
        ) {clustered}""",
        "CREATE INDEX kv_packs_leaving ON kv_packs (changed_us) WHERE state <> 'live'",
        """
        CREATE TABLE kv_chunks (
            identity TEXT NOT NULL,
            scope TEXT NOT NULL,
            chain TEXT NOT NULL,
            parent TEXT NOT NULL,
            first_token BIGINT NOT NULL,
            end_token BIGINT NOT NULL,
            pack TEXT NOT NULL,
            pack_offset BIGINT NOT NULL,
            nbytes BIGINT NOT NULL,
            digest TEXT NOT NULL,
            form TEXT NOT NULL,
            tenant TEXT NOT NULL,
            function TEXT NOT NULL,
            conversation TEXT NOT NULL,
            saved_us BIGINT NOT NULL,
            price_microusd_per_hour BIGINT NOT NULL,
            uses BIGINT NOT NULL,
            created_us BIGINT NOT NULL,
            used_us BIGINT NOT NULL,
            PRIMARY KEY (identity, scope, chain)
        ) {clustered}""",
        "CREATE INDEX kv_chunks_by_pack ON kv_chunks (pack)",
        """
        CREATE TABLE kv_reuse (
            tenant TEXT NOT NULL,
            function TEXT NOT NULL,
            keyed BIGINT NOT NULL,
            kept BIGINT NOT NULL,
            reused BIGINT NOT NULL,
            PRIMARY KEY (tenant, function, keyed)
        ) {clustered}""",
    ),
)

_DRAINS: Final = Migration(
    5,
    "functions and slots that operators drain",
    (
        """
        CREATE TABLE drains (
            kind TEXT NOT NULL,
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            since_us BIGINT NOT NULL,
            until_us BIGINT,
            reason TEXT NOT NULL,
            PRIMARY KEY (kind, tenant, name, since_us)
        ) {clustered}""",
    ),
)


_TENANT_KEYS: Final = Migration(
    6,
    "keys of tenants, and which of them a request's stored parts are sealed with (0: none)",
    (
        """
        CREATE TABLE tenant_keys (
            tenant TEXT NOT NULL,
            number BIGINT NOT NULL,
            created_us BIGINT NOT NULL,
            wrapped {blob},
            PRIMARY KEY (tenant, number)
        ) {clustered}""",
        "ALTER TABLE requests ADD COLUMN sealed BIGINT NOT NULL DEFAULT 0",
    ),
)

_TENANT_RULES: Final = Migration(
    7,
    "what tenants set for themselves; how long a request's function keeps it, where that is not its tenant's rule",
    (
        """
        CREATE TABLE tenant_settings (
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            value BIGINT,
            changed_us BIGINT NOT NULL,
            applied_us BIGINT NOT NULL,
            PRIMARY KEY (tenant, name)
        ) {clustered}""",
        "ALTER TABLE requests ADD COLUMN kept_us BIGINT",
    ),
)

_BEGUN: Final = Migration(
    8,
    "what an exact resume has to know of the first attempt's prefill and of what that began on, as JSON",
    ("ALTER TABLE requests ADD COLUMN begun TEXT",),
)

_SHARED_BOUNDS: Final = Migration(
    9,
    "what each gateway has claimed of bounds that hold over all of them; what tenants and keys may spend in a period",
    (
        """
        CREATE TABLE shares (
            resource TEXT NOT NULL,
            gateway TEXT NOT NULL,
            amount BIGINT NOT NULL,
            until_us BIGINT,
            PRIMARY KEY (resource, gateway)
        ) {clustered}""",
        """
        CREATE TABLE budgets (
            tenant TEXT NOT NULL,
            key_id TEXT NOT NULL,
            kind TEXT NOT NULL,
            period TEXT NOT NULL,
            amount BIGINT NOT NULL,
            changed_us BIGINT NOT NULL,
            PRIMARY KEY (tenant, key_id, kind, period)
        ) {clustered}""",
    ),
)

MIGRATIONS: Final[tuple[Migration, ...]] = (
    _FIRST, _SECOND, _GATEWAYS, _FOURTH, _DRAINS, _TENANT_KEYS, _TENANT_RULES, _BEGUN, _SHARED_BOUNDS,
    LOAD, QUOTAS, SLOT_PLACES, MODEL_NAMES, FUNCTION_OBJECTS,
)  # fmt: skip
