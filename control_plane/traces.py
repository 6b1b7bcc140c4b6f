"""Spans for OpenTelemetry, told to a collector by OTLP over HTTP: requests, starts of replicas, loads of checkpoints.

    recorder (`request_trace`) or agent's stages -> spans, made when they have ended -> bounded queue -> a thread sends

Only where the usual variables ask for it (`OTEL_TRACES_EXPORTER` or `OTEL_EXPORTER_OTLP_ENDPOINT`) is anything
imported. Agents and replicas hand over what they measured by the protocol there is, and need no way to a collector.
What the queue does not hold is dropped; a collector that is gone costs nothing but its spans. Limits: one resource for
all; clocks of slots on other machines are taken as they are.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from control_plane.trace_context import TraceSeed, parse_traceparent, span_id, trace_id
from function_runtime.protocol import ReplicaState, ReplicaStatus, SlotState

if TYPE_CHECKING:
    from control_plane.errors import StokerError
    from control_plane.live_request import Origin
    from control_plane.request_trace import RequestTrace

logger = logging.getLogger(__name__)

ASKED_BY: Final = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
CLOSE_S: Final = 2.0
"""How long the end of this process waits for what is still to be sent."""
STARTS_KEPT: Final = 256
"""Starts of replicas that requests may still be told to have waited for."""
START: Final = "start"
_MICRO: Final = 1000
_randomness: Final = random.Random(secrets.randbits(256))
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


def open_traces(environ: Mapping[str, str], share: float = 1.0, instance: str = "") -> Traces | None:
    """None where nobody asked, or what is needed is not installed (said once). `share`: of the requests that bring no
    trace of their own, how many begin one."""
    asked = [name for name in ASKED_BY if environ.get(name)]
    if not asked or environ.get("OTEL_TRACES_EXPORTER") == "none" or environ.get("OTEL_SDK_DISABLED") == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("event=traces_off reason='%s is set, but %s; pip install stoker[traces]'", asked[0], error)
        return None
    own = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "stoker"}
    resource = Resource.create({**own, **({"service.instance.id": instance} if instance else {})})
    exporter = OTLPSpanExporter()
    # The SDK's own: bounded, drops what does not fit, sends from a thread (OTEL_BSP_*).
    return Traces(BatchSpanProcessor(exporter), resource, share, stop_sending=exporter.shutdown)


@dataclass(frozen=True, slots=True)
class SpanRef:
    trace_id: int
    span_id: int


@dataclass(frozen=True, slots=True)
class Told:
    """A span that has ended. Times are nanoseconds of the wall clock."""

    name: str
    at: SpanRef
    parent: int
    """Of the same trace; 0: none."""
    begin_ns: int
    end_ns: int
    attributes: Attributes
    links: tuple[SpanRef, ...] = ()
    error: str = ""
    is_server: bool = False
    parent_is_remote: bool = False


class Traces:
    def __init__(
        self,
        processor: Any,
        resource: Any = None,
        share: float = 1.0,
        *,
        stop_sending: Callable[[], None] = lambda: None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`processor` takes ended spans (`on_end`) without blocking."""
        self._processor = processor
        self._resource = resource
        self._share = share
        self._stop_sending = stop_sending
        self.now_ns = now_ns
        self._starts: OrderedDict[str, ReplicaStatus] = OrderedDict()
        self.leads: Callable[[], bool] = lambda: True
        """Whether this gateway tells of starts: all of them hear of each."""

    # --- requests ---

    def seed(self, traceparents: Sequence[str], began_ns: int) -> TraceSeed | None:
        """What a new request is traced by; None: it is not. A caller's own decision is followed."""
        caller = parse_traceparent(traceparents[0]) if len(traceparents) == 1 else None
        if caller is None:
            if _randomness.random() >= self._share:
                return None
            return TraceSeed(f"{_randomness.getrandbits(128) or 1:032x}", "", began_ns // _MICRO)
        return TraceSeed(caller.trace_id, caller.parent, began_ns // _MICRO) if caller.sampled else None

    def request(self, origin: Origin) -> RequestTrace | None:
        """What takes down the life of this request, at whichever gateway; None: it is not traced."""
        if origin.trace is None:
            return None
        from control_plane.request_trace import RequestTrace

        return RequestTrace(self, origin, origin.trace)

    def refused(self, origin: Origin, error: StokerError) -> None:
        """It was not accepted."""
        trace = self.request(origin)
        if trace is not None:
            trace.refused(error)

    def tell(self, span: Told) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        sampled = TraceFlags(TraceFlags.SAMPLED)
        parent = None
        if span.parent:
            parent = SpanContext(span.at.trace_id, span.parent, span.parent_is_remote, sampled)
        links = [Link(SpanContext(ref.trace_id, ref.span_id, False, sampled)) for ref in span.links]
        self._processor.on_end(
            ReadableSpan(
                span.name,
                SpanContext(span.at.trace_id, span.at.span_id, False, sampled),
                parent,
                self._resource,
                dict(span.attributes),
                links=links,
                kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=span.begin_ns,
                end_time=max(span.end_ns, span.begin_ns),
                instrumentation_scope=InstrumentationScope("stoker"),
            )
        )

    def child(
        self,
        name: str,
        parent: SpanRef,
        begin_ns: int,
        end_ns: int,
        attributes: Attributes,
        *,
        error: str = "",
        links: tuple[SpanRef, ...] = (),
    ) -> SpanRef:
        """One below another, with an id of no meaning."""
        at = SpanRef(parent.trace_id, _randomness.getrandbits(64) or 1)
        self.tell(Told(name, at, parent.span_id, begin_ns, end_ns, attributes, links, error))
        return at

    # --- starts of replicas ---

    def replica_changed(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        """Tells of a start when it is over, whichever way."""
        if status.state is ReplicaState.READY and status.replica_id not in self._starts:
            self._starts[status.replica_id] = status
            while len(self._starts) > STARTS_KEPT:
                self._starts.popitem(last=False)
        # One that is found as it is was told of by whoever saw it start.
        if before is None or status.state is before.state or not self.leads():
            return
        if status.state not in (ReplicaState.READY, ReplicaState.FAILED):
            return
        if status.state is ReplicaState.FAILED and status.ready_us:
            return
        try:
            at = self._own_trace(status.replica_id)
            self._tell_start(status, at, 0)
        except Exception as error:
            # Whoever watches must not hinder what is watched.
            logger.warning("event=trace_lost replica=%s error=%s", status.replica_id, error)

    def awaited_start(self, replica_id: str, since_ns: int, parent: SpanRef) -> bool:
        """A start of this replica that ended after `since_ns` is told below `parent`, too, linked to its own trace."""
        status = self._starts.get(replica_id)
        if status is None or status.ready_us * _MICRO <= since_ns:
            return False
        at = SpanRef(parent.trace_id, _randomness.getrandbits(64) or 1)
        self._tell_start(status, at, parent.span_id, (self._own_trace(replica_id),))
        return True

    @staticmethod
    def _own_trace(replica_id: str) -> SpanRef:
        return SpanRef(trace_id(replica_id), span_id(replica_id, START))

    def _tell_start(self, status: ReplicaStatus, at: SpanRef, parent: int, links: tuple[SpanRef, ...] = ()) -> None:
        end_us = status.ready_us or status.ended_us or status.created_us
        for stage in status.stages:
            if status.ready_us and stage.start_us > status.ready_us:
                continue
            stage_end_us = stage.start_us + stage.duration_us
            self.child(
                stage.name,
                at,
                stage.start_us * _MICRO,
                stage_end_us * _MICRO,
                {
                    "stoker.bytes": stage.nbytes,
                    "stoker.tier": stage.tier,
                    "stoker.detail": stage.detail,
                    **_rate(stage.nbytes, stage.duration_us),
                },
            )
            end_us = max(end_us, stage_end_us) if not status.ready_us else end_us
        error = f"{status.error.code}: {status.error.message}" if status.error is not None else ""
        self.tell(
            Told(
                f"cold start {status.function}",
                at,
                parent,
                status.created_us * _MICRO,
                end_us * _MICRO,
                {
                    "stoker.function": status.function,
                    "stoker.revision": status.revision,
                    "stoker.replica": status.replica_id,
                    "stoker.checkpoint": status.spec.identity,
                    "stoker.warm_worker": status.warm_worker,
                },
                links,
                error,
            )
        )

    # --- loads ---

    def slot_changed(self, state: SlotState, before: SlotState | None) -> None:
        """Tells of each form that came into a pool, for a replica or ahead of one: a trace of one span."""
        if before is None or before.incarnation != state.incarnation or not self.leads():
            return
        known = {entry.key for entry in before.pool if entry.state == "ready"}
        for entry in state.pool:
            if entry.key in known or entry.state != "ready" or not entry.load_s:
                continue
            end_ns, duration_us = self.now_ns(), int(entry.load_s * 1e6)
            attributes: Attributes = {
                "stoker.slot": state.slot_id,
                "stoker.checkpoint": entry.identity,
                "stoker.dtype": entry.dtype,
                "stoker.bytes": entry.nbytes,
                "stoker.detail": entry.load,
                **_rate(entry.nbytes, duration_us),
            }
            at = SpanRef(_randomness.getrandbits(128) or 1, _randomness.getrandbits(64) or 1)
            try:
                self.tell(Told(f"load {entry.identity[:12]}", at, 0, end_ns - duration_us * _MICRO, end_ns, attributes))
            except Exception as error:
                logger.warning("event=trace_lost slot=%s error=%s", state.slot_id, error)

    def close(self) -> None:
        """Sends what is waiting, for as long as `CLOSE_S`."""
        sending = threading.Thread(target=self._processor.force_flush, name="last spans", daemon=True)
        sending.start()
        sending.join(CLOSE_S)
        self._stop_sending()


def _rate(nbytes: int, duration_us: int) -> dict[str, float]:
    return {"stoker.bytes_per_s": nbytes * 1e6 / duration_us} if nbytes and duration_us else {}
