"""An OpenTelemetry collector for tests: takes OTLP over HTTP on the loopback address and keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.patience import PATIENCE_S, NotInTime


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    trace: str
    id: str
    parent: str
    """Empty: none."""
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """Span ids."""
    kind: int
    error: str


class Collector:
    """`with` starts and ends it."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self.rfile.read(int(self.headers["Content-Length"])))
                body = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="collector", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        told = ExportTraceServiceRequest.FromString(body)
        with self._news:
            for group in told.resource_spans:
                self.resources.append(_attributes(group.resource.attributes))
                for scope in group.scope_spans:
                    self._spans += [_span(span) for span in scope.spans]
            self._news.notify_all()

    @property
    def spans(self) -> list[Span]:
        with self._news:
            return list(self._spans)

    def wait(self, enough: Callable[[list[Span]], bool], within_s: float = PATIENCE_S) -> list[Span]:
        """Blocks until what has come is enough."""
        deadline_s = time.monotonic() + within_s
        with self._news:
            while not enough(self._spans):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise NotInTime(f"not enough after {within_s} s: {[span.name for span in self._spans]}")
                self._news.wait(left_s)
            return list(self._spans)


def _span(span: Any) -> Span:
    return Span(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
        kind=span.kind,
        error=span.status.message if span.status.code == 2 else "",
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
