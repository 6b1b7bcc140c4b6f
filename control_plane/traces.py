"""Spans of cold starts for OpenTelemetry: one for a replica's way to ready, one below it for each stage.

Only where the usual variables ask for it (`OTEL_TRACES_EXPORTER` or `OTEL_EXPORTER_OTLP_ENDPOINT`) is anything
imported; spans are made of what the agent measured, after the fact. Limits: one resource for all slots; requests are
told by `stoker why` and the usage API, not here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from function_runtime.protocol import ReplicaState, ReplicaStatus

logger = logging.getLogger(__name__)

ASKED_BY: Final = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def open_traces(environ: Mapping[str, str]) -> Traces | None:
    """None where nobody asked, or what is needed is not installed (said once)."""
    asked = [name for name in ASKED_BY if environ.get(name)]
    if not asked or environ.get("OTEL_TRACES_EXPORTER") == "none" or environ.get("OTEL_SDK_DISABLED") == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("event=traces_off reason='%s is set, but %s; pip install stoker[traces]'", asked[0], error)
        return None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


class Traces:
    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("stoker")

    def replica_changed(self, status: ReplicaStatus, before: ReplicaStatus | None) -> None:
        """Tells of a start when it is over, whichever way."""
        was = before.state if before is not None else None
        if status.state is was or status.state not in (ReplicaState.READY, ReplicaState.FAILED):
            return
        if status.state is ReplicaState.FAILED and status.ready_us:
            return
        try:
            self._tell(status)
        except Exception as error:
            # Whoever watches must not hinder what is watched.
            logger.warning("event=trace_lost replica=%s error=%s", status.replica_id, error)

    def _tell(self, status: ReplicaStatus) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        start = self._tracer.start_span(
            f"cold start {status.function}",
            start_time=status.created_us * 1000,
            attributes={
                "stoker.function": status.function,
                "stoker.revision": status.revision,
                "stoker.replica": status.replica_id,
                "stoker.checkpoint": status.spec.identity,
                "stoker.warm_worker": status.warm_worker,
            },
        )
        within = set_span_in_context(start)
        end_us = status.ready_us or status.ended_us or status.created_us
        for stage in status.stages:
            if status.ready_us and stage.start_us > status.ready_us:
                continue
            span = self._tracer.start_span(
                stage.name,
                context=within,
                start_time=stage.start_us * 1000,
                attributes={
                    "stoker.bytes": stage.nbytes,
                    "stoker.tier": stage.tier,
                    "stoker.detail": stage.detail,
                    **_rate(stage.nbytes, stage.duration_us),
                },
            )
            span.end(end_time=(stage.start_us + stage.duration_us) * 1000)
            end_us = max(end_us, stage.start_us + stage.duration_us) if not status.ready_us else end_us
        if status.error is not None:
            start.set_status(Status(StatusCode.ERROR, f"{status.error.code}: {status.error.message}"))
        start.end(end_time=end_us * 1000)

    def close(self) -> None:
        """Sends what is waiting."""
        self._provider.shutdown()


def _rate(nbytes: int, duration_us: int) -> dict[str, float]:
    return {"stoker.bytes_per_s": nbytes * 1e6 / duration_us} if nbytes and duration_us else {}
