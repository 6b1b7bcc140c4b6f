"""What an installation lacks, looked at from inside: each check says that all is well, or what is wrong and what to do.

    database, store, secrets, cluster (where slots are pods), slots, devices, models, gateways

Nothing is changed and nothing is asked of anyone: it is what this gateway knows already. Limits: a check is as old as
what it looks at (the store's at most five minutes); what the cluster thinks of pods is as its watches told last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from control_plane.errors import InvalidRequest
from control_plane.functions import Function, ImportState
from control_plane.spec import resolve_environment

if TYPE_CHECKING:
    from control_plane.context import AppContext

CLOCK_OFF_S: Final = 30.0
UNSCHEDULABLE: Final = "unschedulable"
"""The phase of `SlotWait` in which the cluster has no node for a slot."""
SLOT_LATE_S: Final = 300.0
"""A slot that was asked for so long ago will hardly come by itself: a node and an image take minutes."""
UNPLACED_S: Final = 30.0
"""A slot that has found no node for so long waits for one that has to come, if there is anything that makes one."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    says: str
    do: str = ""
    """What to do next; empty where all is well."""


def examine(context: AppContext) -> tuple[Check, ...]:
    functions = context.functions.list()
    return (
        _database(context),
        _store(context),
        *_secrets(context, functions),
        *_cluster(context, functions),
        _slots(context, functions),
        *_devices(context, functions),
        *_models(context, functions),
        _gateways(context),
    )


def _database(context: AppContext) -> Check:
    label = context.db.driver.label
    if context.db.fault is not None:
        return Check(
            "database", False, f"{label} cannot be used: {context.db.fault}",
            "bring the server back, or free space; it recovers by itself, and nothing accepted is lost",
        )  # fmt: skip
    kind = "PostgreSQL" if context.settings.shared else "SQLite, so there is one gateway"
    return Check("database", True, f"{label} ({kind})")


def _store(context: AppContext) -> Check:
    store = context.store
    if not store.usable:
        return Check(
            "object store", False, f"{store.uri} cannot be used ({store.problem}): {store.reason}",
            "requests run without stored KV meanwhile; what each problem means is in docs/operations.md, The object "
            "store",
        )  # fmt: skip
    known = "was read and written" if store.state.value == "usable" else "is being looked at for the first time"
    return Check("object store", True, f"{store.uri} {known}")


def _secrets(context: AppContext, functions: list[Function]) -> Iterator[Check]:
    faulty = False
    for function in functions:
        try:
            resolve_environment(function.spec, context.settings.data_dir)
        except InvalidRequest as error:
            faulty = True
            yield Check("secrets", False, error.message, "make the secret, or deploy the function without it")
    if not faulty:
        count = sum(len(function.spec.secrets) for function in functions)
        yield Check("secrets", True, f"all {count} that functions name are there" if count else "no function names any")


def _cluster(context: AppContext, functions: list[Function]) -> Iterator[Check]:
    if context.cluster is None:
        return
    told, kinds = context.cluster.body(), context.cluster.backend.kinds
    faults = [(told["problem"], "look at the API server, the Role and the agents' secret")] if told["problem"] else []
    faults += [(f"the SlotPool {name}: {why}", "correct its spec") for name, why in told["refused_pools"].items()]
    faults += [
        (f"slots of class {each['name']}: {each['trouble']}", f"kubectl describe slotpool {each['pool']}")
        for each in told["classes"]
        if each["trouble"]
    ]
    unplaced = {
        wait.words: f"slots of class {wait.class_name}: {wait.words} (for {wait.since_s:.0f} s)"
        for wait in context.cluster.backend.waits
        if wait.phase == UNSCHEDULABLE and wait.since_s >= UNPLACED_S
    }
    faults += [
        (says, "if no node autoscaler is at work: give a node what is missing, or lower what the SlotPool asks for")
        for says in unplaced.values()
    ]
    faults += [
        (f"{function.name}: {why}", "make the pool, or name another")
        for function in functions
        if not told["problem"] and (why := kinds.why_none((function.tenant, function.name)))
    ]
    for says, do in faults:
        yield Check("cluster", False, says, do)
    if not faults:
        pools = ", ".join(told["pools"]) or "none"
        yield Check("cluster", True, f"in sight; slot pools: {pools}")


def _slots(context: AppContext, functions: list[Function]) -> Check:
    fleet, backend = context.fleet, context.fleet.backend
    ready, coming, least = len(fleet.slots), len(backend.coming), sum(each.least for each in backend.classes)
    most = sum(each.most for each in backend.classes)
    there = f"{ready} there, {coming} coming, {most} at most"
    errors = {
        error
        for function in functions
        if (error := context.loop.start_error((function.tenant, function.name), function.revision))
    }
    if errors:
        return Check(
            "slots", False, f"{there}; the last start failed: {'; '.join(sorted(errors))}",
            "`stoker ps` and `stoker why NAME` have the whole story",
        )  # fmt: skip
    if most == 0:
        return Check(
            "slots", False, "there are none, and there can be none: nothing can run",
            "start a gateway with --slots, or make a SlotPool",
        )  # fmt: skip
    late_s = max(backend.coming.values(), default=0.0)
    if ready + coming < least or late_s > SLOT_LATE_S:
        late = f", one of them for {late_s:.0f} s" if late_s > SLOT_LATE_S else ""
        return Check(
            "slots", False, f"{there}{late}; there should always be {least}",
            "look at the agent's log (slots/N/agent.log), or on Kubernetes: kubectl get slotpools,pods",
        )  # fmt: skip
    return Check("slots", True, there if ready else f"{there}: one comes with the first request")


def _devices(context: AppContext, functions: list[Function]) -> Iterator[Check]:
    kinds: dict[str, int] = {}
    elastic = any(each.elastic for each in context.fleet.backend.classes)
    for state in context.fleet.slots.values():
        for device in state.devices:
            kinds[device.kind] = kinds.get(device.kind, 0) + 1
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none seen yet"
    told = all(state.devices for state in context.fleet.slots.values())
    wanting = sorted(
        function.name
        for function in functions
        if kinds and told and function.spec.device.partition(":")[0] not in kinds and not elastic
    )
    if wanting:
        yield Check(
            "devices", False, f"{found}; {', '.join(wanting)} need others",
            "give slots such devices (in the chart: slot.devices, slots.pools), or deploy with --device cpu",
        )  # fmt: skip
    else:
        yield Check("devices", True, found)


def _models(context: AppContext, functions: list[Function]) -> Iterator[Check]:
    failed = [each for each in functions if each.current.state is ImportState.FAILED]
    for function in failed:
        error = function.current.error
        why = f"{error.code}: {error.message}" if error is not None else "no reason was kept"
        yield Check(
            "models", False, f"{function.spec.model} of {function.name} was not imported: {why}",
            f"correct the model and deploy it again; `stoker models import {function.spec.model}` tries it alone",
        )  # fmt: skip
    if not failed:
        yield Check("models", True, f"{len(functions)} functions, none whose model failed")


def _gateways(context: AppContext) -> Check:
    gateways = context.gateways
    if not gateways.held:
        return Check(
            "gateways", False, "this gateway cannot renew its lease, and takes no requests",
            "look at the database; it recovers by itself",
        )  # fmt: skip
    if not gateways.alone and not gateways.leader:
        return Check(
            "gateways", False, "none leads: nothing at zero is woken",
            f"wait {context.settings.gateway.lead_within_s:g} s; if it stays so, look at the database",
        )  # fmt: skip
    off_s = context.db.clock.ahead_s
    if abs(off_s) > CLOCK_OFF_S:
        return Check(
            "gateways", False,
            f"this machine's clock is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} the "
            "database's: what Stoker writes goes by the database's, signatures for an S3 bucket do not",
            "set it right (NTP)",
        )  # fmt: skip
    count = len(gateways.peers) + 1
    leads = "this one leads" if gateways.leads else f"{gateways.leader} leads"
    return Check("gateways", True, "the only one" if gateways.alone else f"{count}; {leads}")
