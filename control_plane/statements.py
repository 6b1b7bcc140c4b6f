"""The journal's SQL: portable text with `:name` parameters. What fences a write is part of each statement.

A row of `requests` is updated only where `owner`, `epoch` and `state` are what the author believes; the update takes
the row's lock and looks again after whoever held it (PostgreSQL, READ COMMITTED), and SQLite has one writer at a time.
Limits: reads of several statements rely on the caller's transaction.
"""

from __future__ import annotations

from typing import Final

OWNERS_OF_LIVE: Final = "SELECT DISTINCT owner FROM requests WHERE state IN ('queued', 'running')"

ADOPT: Final = "UPDATE requests SET owner = :me WHERE owner = :owner AND state IN ('queued', 'running')"

TAKE_OVER: Final = """
UPDATE requests SET owner = :me WHERE owner = :owner AND state IN ('queued', 'running') RETURNING id"""

ACCEPT: Final = """
INSERT INTO requests (id, tenant, key_id, function, revision, endpoint, model, durability, on_disconnect, stream,
    idempotency_key, body_hash, input_tokens, created_us, state, owner, epoch, replica_id, slot_id, assigned_us,
    sealed)
VALUES (:id, :tenant, :key_id, :function, :revision, :endpoint, :model, :durability, :on_disconnect, :stream,
    :idempotency_key, :body_hash, :input_tokens, :created_us, :state, :me, :first_epoch, :replica_id, :slot_id, :now,
    :sealed)
ON CONFLICT DO NOTHING"""

ACCEPT_INPUT: Final = "INSERT INTO request_inputs (request_id, params, prompt) VALUES (:id, :params, :prompt)"

_RECORD: Final = """
SELECT r.id, r.tenant, r.key_id, r.function, r.revision, r.endpoint, r.model, r.durability, r.on_disconnect, r.stream,
    r.idempotency_key, r.input_tokens, r.created_us, r.state, r.owner, r.epoch, r.last_seq, r.replica_id, r.slot_id,
    r.assigned_us, r.first_token_us, r.finished_us, r.cached_tokens, r.prefill_us, r.decode_us, r.prefill_ends,
    r.outcome, i.params, i.prompt, r.sealed, r.begun
FROM requests r LEFT JOIN request_inputs i ON i.request_id = r.id"""

GET: Final = _RECORD + " WHERE r.id = :id"
GET_OF_TENANT: Final = _RECORD + " WHERE r.id = :id AND r.tenant = :tenant"
MINE: Final = _RECORD + " WHERE r.owner = :me AND r.state IN ('queued', 'running') ORDER BY r.created_us, r.id"
RECENT: Final = _RECORD + " WHERE r.function = :function ORDER BY r.created_us DESC LIMIT :limit"

BY_IDEMPOTENCY_KEY: Final = """
SELECT id, body_hash FROM requests WHERE tenant = :tenant AND idempotency_key = :idempotency_key"""

SEALED: Final = "SELECT tenant, sealed FROM requests WHERE id = :id"

WHOSE: Final = "SELECT owner, epoch, state FROM requests WHERE id = :id"

STANDING: Final = """
SELECT owner, epoch, state, last_seq, durability, tenant, key_id, function, revision, model, replica_id, prefill_us,
    decode_us
FROM requests WHERE id = :id"""

ASSIGN: Final = """
UPDATE requests SET epoch = epoch + 1, state = 'running', replica_id = :replica_id, slot_id = :slot_id,
    assigned_us = :now, prefill_us = 0, decode_us = 0
WHERE id = :id AND owner = :me AND epoch = :epoch AND state IN ('queued', 'running')"""

OPEN_ATTEMPT: Final = """
INSERT INTO attempts (request_id, epoch, replica_id, slot_id, gateway, after_seq, assigned_us)
VALUES (:id, :epoch + 1, :replica_id, :slot_id, :me, :last_seq, :now)"""

REQUEUE: Final = """
UPDATE requests SET state = 'queued', replica_id = NULL, slot_id = NULL
WHERE id = :id AND owner = :me AND epoch = :epoch AND state = 'running'"""

TAKEN: Final = """
UPDATE attempts SET loaded_tokens = :loaded_tokens, recomputed_tokens = :recomputed_tokens, exact = :exact,
    load_us = :load_us, detail = :detail
WHERE request_id = :id AND epoch = :epoch AND loaded_tokens IS NULL
RETURNING after_seq"""

READ_LOG: Final = """
WITH RECURSIVE chain (id, previous, first_seq, last_seq, payload) AS (
    SELECT id, previous, first_seq, last_seq, payload FROM token_log
    WHERE id = (SELECT log_head FROM requests WHERE id = :id)
    UNION ALL
    SELECT t.id, t.previous, t.first_seq, t.last_seq, t.payload FROM token_log t JOIN chain c ON t.id = c.previous
    WHERE t.last_seq > :after)
SELECT first_seq, payload FROM chain WHERE last_seq > :after ORDER BY first_seq"""

SEAL: Final = """
INSERT INTO request_kv (request_id, number, epoch, counted, chunks)
SELECT :id, (SELECT COALESCE(MAX(number), 0) + 1 FROM request_kv WHERE request_id = :id), :epoch,
    CASE WHEN EXISTS (SELECT 1 FROM requests
        WHERE id = :id AND owner = :me AND epoch = :epoch AND state = 'running') THEN 1 ELSE 0 END, :chunks
RETURNING counted"""

READ_KV: Final = """
SELECT chunks FROM request_kv WHERE request_id = :id AND counted = 1 ORDER BY number"""

RETIRED_KV: Final = """
SELECT k.request_id, k.number, k.chunks FROM request_kv k
WHERE k.counted = 0 OR NOT EXISTS
    (SELECT 1 FROM requests r WHERE r.id = k.request_id AND r.state IN ('queued', 'running'))
LIMIT :limit"""

LIVE_KV: Final = """
SELECT k.chunks FROM request_kv k JOIN requests r ON r.id = k.request_id
WHERE k.counted = 1 AND r.state IN ('queued', 'running')"""

FORGET_KV: Final = "DELETE FROM request_kv WHERE request_id = :id AND number = :number"

FINISH: Final = """
UPDATE requests SET state = :state, outcome = :outcome, finished_us = :now, kept_us = :kept_us,
    expires_us = :now + COALESCE(:kept_us, (SELECT s.value FROM tenant_settings s
        WHERE s.tenant = requests.tenant AND s.name = 'log_us'), :log_us),
    idempotency_key = CASE WHEN :state = 'refused' THEN NULL ELSE idempotency_key END
WHERE id = :id AND owner = :me AND epoch = :epoch AND state IN ('queued', 'running')
    AND (durability = 'off' OR last_seq = COALESCE(:last_seq, last_seq))
RETURNING owner, epoch, CASE WHEN replica_id IS NULL THEN 'queued' ELSE 'running' END, last_seq, durability, tenant,
    key_id, function, revision, model, replica_id, prefill_us, decode_us"""
"""What it returns is how the request stood before, as `STANDING` would have said: one that runs has a replica."""

CLOSE_ATTEMPT: Final = """
UPDATE attempts SET ended_us = :now, reason = :reason, last_seq = :last_seq, prefill_us = :prefill_us,
    decode_us = :decode_us
WHERE request_id = :id AND epoch = :epoch AND ended_us IS NULL"""

ATTEMPTS: Final = """
SELECT epoch, replica_id, slot_id, gateway, after_seq, assigned_us, ended_us, last_seq, reason, loaded_tokens,
    recomputed_tokens, exact, load_us, detail, prefill_us, decode_us
FROM attempts WHERE request_id = :id ORDER BY epoch"""

ATTEMPTS_OF_REPLICA: Final = """
SELECT request_id, epoch FROM attempts WHERE replica_id = :replica_id ORDER BY assigned_us DESC LIMIT :limit"""

EXPIRED: Final = """
SELECT r.id, r.finished_us, r.expires_us, COALESCE((SELECT s.value FROM tenant_settings s
    WHERE s.tenant = r.tenant AND s.name = 'request_us'), :request_us)
FROM requests r WHERE r.expires_us < :now ORDER BY r.expires_us LIMIT :limit"""

LOG_HEAD: Final = "SELECT log_head FROM requests WHERE id = :id"
STATE_OF_TENANT: Final = "SELECT state FROM requests WHERE id = :id AND tenant = :tenant"
EXPIRE_LATER: Final = "UPDATE requests SET expires_us = :expires_us WHERE id = :id"
DROP_LOG_HEAD: Final = "UPDATE requests SET log_head = NULL, log_tail = NULL WHERE id = :id"
DROP_INPUT: Final = "DELETE FROM request_inputs WHERE request_id = :id"
DROP_ATTEMPTS: Final = "DELETE FROM attempts WHERE request_id = :id"
DROP_REQUEST: Final = "DELETE FROM requests WHERE id = :id"
