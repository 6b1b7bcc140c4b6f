"""Replicas that are asked for: where, with what, what each start was due to, and how it went.

Every start has a cause: nobody had one (`from_zero`), more were needed (`scale_out`), a forecast or a schedule wanted
it (`prewarm`, `forecast`, `schedule`), a new revision, a replica's death, or its having had to give way (`eviction`).
Limits: a stop under one leader and the start under the next are not seen as a restart.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from autoscaler.decision import Decision, Reason
from control_plane.decisions import Decisions
from control_plane.demand import Refusals
from control_plane.dispatch import Dispatcher
from control_plane.errors import StokerError
from control_plane.fleet import GONE, TERMINATING, Fleet, new_replica_spec
from control_plane.functions import Revision
from control_plane.lanes import FunctionKey
from control_plane.peers import Refusal
from control_plane.records import OutcomeError
from control_plane.serving import Serving
from control_plane.settings import Settings
from control_plane.starts import StartRecord
from function_runtime.protocol import ReplicaState, ReplicaStatus

LOST_S: Final = 60.0
"""How long after a loss a start is put down to it."""
HOUR_S: Final = 3600.0
RESTARTS_KEPT: Final = 1000
_AHEAD: Final = {
    Reason.PREWARM: "prewarm",
    Reason.SCHEDULE: "schedule",
    Reason.FORECAST_FLOOR: "forecast",
}


class Starting:
    def __init__(
        self,
        settings: Settings,
        serving: Serving,
        dispatcher: Dispatcher,
        fleet: Fleet,
        decisions: Decisions,
        ask_again: Callable[[FunctionKey, float], None],
    ) -> None:
        self._settings = settings
        self._store_uri = settings.store_uri  # NOTE: where it is a folder each look resolves it, at half a millisecond
        self._serving = serving
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._decisions = decisions
        self._ask_again = ask_again
        self._records: dict[tuple[FunctionKey, int], StartRecord] = {}
        self.refused = Refusals(self.unusable_identity)
        self.causes: Counter[tuple[str, str]] = Counter()
        """Starts by function and cause."""
        self.ahead: Counter[tuple[str, str]] = Counter()
        """What became of replicas that were started ahead of need: (function, used | wasted)."""
        self.restarts: Counter[str] = Counter()
        self._ahead: set[str] = set()
        self._lost: dict[FunctionKey, tuple[float, str]] = {}
        self._meant: set[str] = set()
        self._stopped: set[FunctionKey] = set()
        self._restarted_s: dict[FunctionKey, deque[float]] = {}

    # --- how starts went ---

    def record(self, key: FunctionKey, revision: int) -> StartRecord:
        return self._records.setdefault((key, revision), StartRecord())

    def failed(self, key: FunctionKey, status: ReplicaStatus, *, leads: bool) -> None:
        error = status.error
        if error is None or error.code in ("agent_gone", TERMINATING):
            return  # the slot's end says nothing of the function
        record, now_s = self.record(key, status.revision), time.monotonic()
        record.failed(error, now_s)
        if leads:
            self._decisions.record(
                "start_failed", status.function, status.replica_id, None, f"{error.code}: {error.message}",
                {"retry": error.retry, "failures": record.failures, "pause_s": round(record.not_before_s - now_s, 3)},
                tenant=key[0],
            )  # fmt: skip
        reason = record.unusable(now_s)
        if reason:
            lane = self._dispatcher.lanes.of(key, status.spec.identity)
            self._dispatcher.fail_waiting(lane, OutcomeError(503, "model_unusable", reason))
        self._ask_again(key, record.not_before_s)

    def error(self, key: FunctionKey, revision: int) -> str:
        """The last start's error, for people; empty if it went well."""
        record = self._records.get((key, revision))
        return "" if record is None or record.error is None else f"{record.error.code}: {record.error.message}"

    def unusable(self, key: FunctionKey, revision: int) -> str:
        record = self._records.get((key, revision))
        return "" if record is None else record.unusable(time.monotonic())

    def unusable_identity(self, key: FunctionKey, identity: str) -> str:
        lane = self._dispatcher.lanes.find(key, identity)
        if lane is not None and lane.ready:
            return ""
        revision = self._serving.with_identity(key, identity)
        return "" if revision is None else self.unusable(key, revision.revision)

    # --- what became of them ---

    def seen(self, status: ReplicaStatus) -> None:
        """Any news of a replica: whether one that was started ahead has been of use."""
        if status.replica_id not in self._ahead:
            return
        if status.time.attributed_us > 0:
            self._ahead.discard(status.replica_id)
            self.ahead[status.function, "used"] += 1
        elif status.state in GONE:
            self._ahead.discard(status.replica_id)
            self.ahead[status.function, "wasted"] += 1

    def meant(self, replica_id: str) -> None:
        """It is to end by a decision about its function: that is no loss."""
        self._meant.add(replica_id)

    def left(self, key: FunctionKey, status: ReplicaStatus) -> None:
        """A replica drains or is gone. If no decision about its function meant it to, it has died or had to give way;
        the next start is put down to that."""
        if status.replica_id in self._meant:
            if status.state in GONE:
                self._meant.discard(status.replica_id)
        elif status.ready_us and status.state is not ReplicaState.ENDED:
            kind = "death" if status.state is ReplicaState.FAILED else "eviction"
            self._lost.setdefault(key, (time.monotonic(), kind))

    def stopped(self, key: FunctionKey) -> None:
        """A replica was stopped by a decision."""
        self._stopped.add(key)

    def restarts_of(self, key: FunctionKey, now_s: float) -> tuple[int, float | None]:
        """Starts of the last hour that followed a stop, and when the oldest of them will be an hour old."""
        times = self._restarted_s.get(key)
        while times and now_s - times[0] > HOUR_S:
            times.popleft()
        return (len(times), times[0] + HOUR_S) if times else (0, None)

    async def restore(self) -> None:
        """The restarts of the last hour under earlier leaders: a budget of them is not spent anew by a failover."""
        now_s, now_us = time.monotonic(), time.time_ns() // 1000
        found: dict[FunctionKey, deque[float]] = {}
        for tenant, function, at_us in await self._decisions.restarts(now_us - round(HOUR_S * 1e6)):
            times = found.setdefault((tenant, function), deque(maxlen=RESTARTS_KEPT))
            times.append(now_s - (now_us - at_us) / 1e6)
        self._restarted_s = found

    def _cause(self, key: FunctionKey, revision: Revision, decision: Decision | None) -> str:
        if decision is None:
            return "older_revision"
        if decision.reason in _AHEAD:
            return _AHEAD[decision.reason]
        lost = self._lost.pop(key, None)
        if lost is not None and time.monotonic() - lost[0] < LOST_S:
            return lost[1]
        living = self._fleet.living(key)
        if any(status.revision == revision.revision for status in living):
            return "scale_out"
        return "revision" if living else "from_zero"

    def _note(self, key: FunctionKey, replica_id: str, cause: str) -> bool:
        """Whether it is a restart."""
        self.causes[key[1], cause] += 1
        if cause in _AHEAD.values():
            self._ahead.add(replica_id)
        restart = key in self._stopped
        if restart:
            self._stopped.discard(key)
            self.restarts[key[1]] += 1
            self._restarted_s.setdefault(key, deque(maxlen=RESTARTS_KEPT)).append(time.monotonic())
        return restart

    # --- starting ---

    def start(self, key: FunctionKey, revision: Revision, count: int, decision: Decision | None) -> None:
        from control_plane.spec import resolve_environment

        record, now_s = self.record(key, revision.revision), time.monotonic()
        if record.pausing(now_s):
            self._ask_again(key, record.not_before_s)
            return
        for left in range(count, 0, -1):
            try:
                environment = resolve_environment(revision.spec, self._settings.data_dir)
            except StokerError as error:
                self._refuse(key, revision, error)
                return
            spec = new_replica_spec(
                function=revision.function,
                revision=revision.revision,
                tenant=revision.tenant,
                manifest_path=revision.manifest_path or "",
                identity=revision.identity or "",
                options=revision.spec.to_engine_options(),
                env=environment,
                kv_store="" if revision.spec.durability == "off" else self._store_uri,
                start_timeout_s=revision.spec.timeouts.cold_start_s,
                shares_kv=revision.spec.share_prefixes == "all",
            )
            waiting = decision.inputs.get("waiting") if decision is not None else 1
            placement = self._fleet.place(spec, count=left, waiting=int(waiting or 0))
            if placement is None:
                self._ask_again(key, now_s + self._fleet.placing.again_s)
                return
            cause = self._cause(key, revision, decision)
            restart = self._note(key, spec.replica_id, cause)
            self._decisions.record(
                "start", revision.function, spec.replica_id, None,
                decision.detail if decision is not None else "requests of an older revision wait",
                {
                    "cause": cause,
                    "restart": restart or None,
                    "slot": placement.choice,
                    "expected_s": placement.expected_s,
                    "runner_up": placement.runner_up,
                    "slots": placement.inputs,
                    **(decision.inputs if decision is not None else {}),
                },
                tenant=key[0],
            )  # fmt: skip
            self._fleet.start_replica(placement, spec)

    def _refuse(self, key: FunctionKey, revision: Revision, error: StokerError) -> None:
        outcome = OutcomeError(503, error.code, error.message)
        identity = revision.identity or ""
        self.refused.note(Refusal(*key, identity, error.code, error.message))
        self._dispatcher.fail_waiting(self._dispatcher.lanes.of(key, revision.identity or ""), outcome)
