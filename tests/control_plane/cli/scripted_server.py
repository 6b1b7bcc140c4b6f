"""An HTTP server that breaks where its script says: one request's log, cut into connections."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from control_plane.client import Endpoint

REQUEST_ID = "chatcmpl-" + "0" * 32


@dataclass
class Script:
    """`tokens` is the log; each connection takes one entry of `cuts`: how many events it sends before it dies
    (None: all, with the end mark), or an (status, headers, body) to answer instead."""

    tokens: list[str]
    cuts: list[Any] = field(default_factory=list)
    tell_id: bool = True
    repeat: int = 0
    """Events before the cursor that are sent again."""
    calls: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)


class ScriptedServer:
    def __init__(self, script: Script) -> None:
        self.script = script

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._answer(0)

            def do_GET(self) -> None:
                self._answer(int(parse_qs(urlsplit(self.path).query).get("starting_after", ["0"])[0]))

            def do_DELETE(self) -> None:
                script.cancelled.append(self.path)
                self._whole(200, {"Content-Type": "application/json"}, b"{}")

            def _whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def _answer(self, cursor: int) -> None:
                script.calls.append((self.command, self.path, dict(self.headers)))
                cut = script.cuts.pop(0) if script.cuts else None
                if isinstance(cut, tuple):
                    self._whole(*cut)
                    return
                if cut == -1:
                    self._break()
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                if script.tell_id:
                    self.send_header("x-request-id", REQUEST_ID)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self._chunk(b": waiting for a replica\n\n")
                for number, seq in enumerate(range(max(0, cursor - script.repeat), len(script.tokens))):
                    if number == cut:
                        self._break()
                        return
                    delta = {"index": 0, "delta": {"content": script.tokens[seq]}, "finish_reason": None}
                    data = json.dumps({"id": REQUEST_ID, "choices": [delta]})
                    self._chunk(f"id: {seq + 1}\ndata: {data}\n\n".encode())
                if cut is not None:
                    self._break()
                    return
                end = {"index": 0, "delta": {}, "finish_reason": "stop"}
                self._chunk(f"id: {len(script.tokens)}\ndata: {json.dumps({'choices': [end]})}\n\n".encode())
                usage = {"choices": [], "usage": {"completion_tokens": len(script.tokens)}}
                self._chunk(f"id: {len(script.tokens)}\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
                self.wfile.write(b"0\r\n\r\n")

            def _break(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def _chunk(self, data: bytes) -> None:
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.endpoint = Endpoint(self.url, "sk-stoker-test")

    def __enter__(self) -> ScriptedServer:
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
