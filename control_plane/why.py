"""What happened to a request, a replica or a function, and why: one timeline put together from what was recorded.

Sources: journal (times, attempts), ledger (stages and costs), decisions (with reason and inputs) and the fleet's mirror
(starts by stage). Limits: as far back as retention goes; a replica's stages only while the fleet remembers it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from control_plane.context import AppContext
from control_plane.decisions import Decision
from control_plane.errors import NotFound
from control_plane.ledger import LedgerRow
from control_plane.records import Attempt, RequestRecord
from control_plane.slot_pools import in_pools
from control_plane.why_scaling import scaling_body
from function_runtime.protocol import ReplicaStatus

Event = dict[str, Any]


async def explain(context: AppContext, what: str, tenant: str) -> dict[str, Any]:
    """By request id, replica id or function name."""
    if what.startswith(("chatcmpl-", "cmpl-", "resp_")):
        return await _request(context, what, tenant)
    if what.startswith("rep-"):
        return await _replica(context, what, tenant)
    return await _function(context, what, tenant)


async def _request(context: AppContext, request_id: str, tenant: str) -> dict[str, Any]:
    record = await context.journal.get(request_id, tenant)
    if record is None:
        raise NotFound(f"there is no request {request_id[:80]}")
    attempts = await context.journal.attempts(request_id)
    rows = await context.ledger.of_request(request_id)
    events = [_event(record.created_us, "accepted", f"{record.input_tokens} prompt tokens for {record.function}")]
    for attempt in attempts:
        events += _attempt_events(attempt)
    if record.first_token_us is not None:
        events.append(_event(record.first_token_us, "first token", ""))
    if record.finished_us is not None:
        events.append(_event(record.finished_us, record.state.value, _ending(record)))
    events += [decision_event(decision) for decision in await context.decisions.of_request(request_id)]
    replicas = [context.fleet.replicas.get(attempt.replica_id) for attempt in attempts]
    return {
        "object": "why",
        "kind": "request",
        "id": request_id,
        "function": record.function,
        "revision": record.revision,
        "model": record.model,
        "state": record.state.value,
        "epoch": record.epoch,
        "tokens": record.last_seq,
        "input_tokens": record.input_tokens,
        "cached_tokens": record.cached_tokens,
        "created_us": record.created_us,
        "finished_us": record.finished_us,
        "error": None if record.outcome is None else msgspec.to_builtins(record.outcome.error),
        "stages_us": None if record.outcome is None else _all_fields(record.outcome.stages),
        "attempts": [_attempt_body(attempt) for attempt in attempts],
        "replicas": [replica_body(context, status) for status in replicas if status is not None],
        "ledger": [asdict(row) for row in rows],
        "cost_microusd": _cost(rows),
        "timeline": _sorted(events),
    }


async def _replica(context: AppContext, replica_id: str, tenant: str) -> dict[str, Any]:
    status = context.fleet.replicas.get(replica_id)
    if status is not None and status.spec.tenant != tenant:
        status = None
    rows = [row for row in await context.ledger.of_replica(replica_id) if row.tenant == tenant]
    decisions = [d for d in await context.decisions.of_replica(replica_id) if d.tenant in (None, tenant)]
    if status is None and not rows:
        raise NotFound(f"there is no replica {replica_id[:80]}")
    events = [decision_event(decision) for decision in decisions]
    if status is not None:
        events += _life(status)
    return {
        "object": "why",
        "kind": "replica",
        "id": replica_id,
        "replica": None if status is None else replica_body(context, status),
        "requests": [
            {"request_id": request_id, "epoch": epoch}
            for request_id, epoch in await context.journal.attempts_of_replica(replica_id)
        ],
        "ledger": [asdict(row) for row in rows],
        "cost_microusd": _cost(rows),
        "timeline": _sorted(events),
    }


async def _function(context: AppContext, name: str, tenant: str) -> dict[str, Any]:
    function = context.functions.get(name, tenant)
    decisions = [d for d in await context.decisions.of_function(name) if d.tenant in (None, tenant)]
    events = [decision_event(decision) for decision in decisions]
    replicas = [
        status for status in context.fleet.replicas.values() if (status.spec.tenant, status.function) == (tenant, name)
    ]
    for status in replicas:
        events += _life(status)
    requests = [record for record in await context.journal.recent(name) if record.tenant == tenant]
    return {
        "object": "why",
        "kind": "function",
        "id": name,
        "revision": function.revision,
        "import": {
            "state": function.current.state.value,
            "error": None if function.current.error is None else asdict(function.current.error),
        },
        "start_error": context.loop.start_error((tenant, name), function.revision) or None,
        "scaling": scaling_body(context, function, decisions),
        "pools": [
            {name: value for name, value in each.items() if name != "holders"}  # who else uses it is not told
            for each in in_pools(context.fleet.slots, function.current.identity)
        ],
        "slots": None if context.cluster is None else context.cluster.slots_of((tenant, name)),
        "replicas": [replica_body(context, status) for status in replicas],
        "requests": [
            {"request_id": r.id, "state": r.state.value, "created_us": r.created_us, "tokens": r.last_seq}
            for r in requests
        ],
        "timeline": _sorted(events),
    }


def replica_body(context: AppContext, status: ReplicaStatus) -> dict[str, Any]:
    """A replica as the API shows it: neither its token nor its environment."""
    seat = context.seating.seat(status.replica_id)
    return {
        "object": "replica",
        "replica_id": status.replica_id,
        "function": status.function,
        "revision": status.revision,
        "tenant": status.spec.tenant,
        "identity": status.spec.identity,
        "slot_id": context.fleet.slot_of.get(status.replica_id),
        "state": status.state.value,
        "pid": status.pid,
        "host": status.host,
        "port": status.port,
        "engine": status.spec.options.engine,
        "device": status.spec.options.device,
        "warm_worker": status.warm_worker,
        "running": seat.taken if seat is not None else 0,
        "accepting": seat is not None and seat.accepting,
        "created_us": status.created_us,
        "ready_us": status.ready_us,
        "ended_us": status.ended_us,
        "stages": [_all_fields(stage) for stage in status.stages],
        "time": _all_fields(status.time),
        "memory": _all_fields(status.memory),
        "store": _all_fields(status.store),
        "error": None if status.error is None else _all_fields(status.error),
        "exit": status.exit,
        "end_reason": status.end_reason,
        "memory_returned": status.memory_returned,
    }


def _all_fields(value: msgspec.Struct) -> dict[str, Any]:
    """Defaults included, which the wire leaves out."""
    return {name: getattr(value, name) for name in value.__struct_fields__}


def _attempt_body(attempt: Attempt) -> dict[str, Any]:
    return {**asdict(attempt), "device": _all_fields(attempt.device)}


def _attempt_events(attempt: Attempt) -> list[Event]:
    where = f"replica {attempt.replica_id} on {attempt.slot_id}"
    after = f", after token {attempt.after_seq}" if attempt.after_seq else ""
    events = [_event(attempt.assigned_us, "assigned", f"epoch {attempt.epoch}, {where}{after}")]
    if attempt.loaded_tokens is not None:
        events.append(
            _event(
                attempt.assigned_us,
                "resumed",
                f"epoch {attempt.epoch}: KV of {attempt.loaded_tokens} tokens loaded, "
                f"{attempt.recomputed_tokens} recomputed, exact: {bool(attempt.exact)}",
            )
        )
    if attempt.ended_us is not None:
        events.append(_event(attempt.ended_us, "attempt ended", f"epoch {attempt.epoch}: {attempt.reason}"))
    return events


def _life(status: ReplicaStatus) -> list[Event]:
    events = [_event(status.created_us, "replica asked for", status.replica_id)]
    for stage in status.stages:
        tier = f" from {stage.tier}" if stage.tier else ""
        size = f", {stage.nbytes} bytes" if stage.nbytes else ""
        events.append(
            _event(
                stage.start_us,
                f"stage {stage.name}",
                f"{stage.duration_us / 1e6:.3f} s{tier}{size} {stage.detail}".rstrip(),
                status.replica_id,
            )
        )
    if status.ready_us:
        seconds = (status.ready_us - status.created_us) / 1e6
        events.append(_event(status.ready_us, "replica ready", f"after {seconds:.3f} s", status.replica_id))
    if status.ended_us:
        text = "; ".join(part for part in (status.end_reason, status.exit) if part)
        if status.error is not None:
            text = f"{status.error.code}: {status.error.message}"
        events.append(_event(status.ended_us, f"replica {status.state}", text, status.replica_id))
    return events


def _ending(record: RequestRecord) -> str:
    outcome = record.outcome
    if outcome is None:
        return ""
    if outcome.error is not None:
        return f"{outcome.error.code}: {outcome.error.message}"
    return f"{outcome.output_tokens} tokens, {', '.join(outcome.finish_reasons)}"


def decision_event(decision: Decision) -> Event:
    event = _event(decision.at_us, decision.kind, decision.reason, decision.replica_id)
    event["inputs"] = decision.inputs
    return event


def _event(at_us: int, what: str, detail: str, replica_id: str | None = None) -> Event:
    event: Event = {"at_us": at_us, "what": what, "detail": detail}
    if replica_id is not None:
        event["replica_id"] = replica_id
    return event


def _sorted(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: int(event["at_us"]))


def _cost(rows: list[LedgerRow]) -> int:
    return sum(row.cost_microusd for row in rows)
