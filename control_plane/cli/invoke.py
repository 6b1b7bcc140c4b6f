"""`stoker invoke` and `resume`: one request, read to its end whatever breaks on the way.

Ctrl-C (and a reader of our output that leaves) cancels the request in the service: it was given an Idempotency-Key so
that it can be attached to, and such a request would otherwise run on without us.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from control_plane.cli.connection import connect
from control_plane.cli.failure import CommandError
from control_plane.cli.output import note, print_json, seconds
from control_plane.client import Client, ClientError, Stream

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"


def ask(
    data_dir: Path | None,
    url: str | None,
    name: str,
    prompt: str,
    system: str | None,
    sampling: dict[str, Any],
    streamed: bool,
    raw: bool,
    as_json: bool,
) -> None:
    client = connect(data_dir, url)
    text = sys.stdin.read() if prompt == "-" else prompt
    path, body = request_body(name, text, system, sampling, raw)
    stream = client.stream(path, body, idempotency_key=uuid4().hex, on_status=_status_shower(streamed and not as_json))
    with cancelled_when_left(client, path, stream):
        if streamed:
            show_stream(stream, as_json)
            return
        answer = collected(stream, path, name)
    if as_json:
        print_json(answer)
    else:
        choice = answer["choices"][0]
        print(choice["message"]["content"] if "message" in choice else choice["text"])


def read_on(data_dir: Path | None, url: str | None, request_id: str, after: int, as_json: bool) -> None:
    if not request_id.startswith(("chatcmpl-", "cmpl-")):
        raise CommandError(
            f"{request_id} is no request id", "they start with chatcmpl- or cmpl-", code="bad_request_id"
        )
    path = CHAT if request_id.startswith("chatcmpl-") else TEXT
    # Whoever reads on did not start the request: leaving does not cancel it.
    show_stream(connect(data_dir, url).resume(path, request_id, after), as_json)


def request_body(
    name: str, prompt: str, system: str | None, sampling: dict[str, Any], raw: bool
) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": name, "stream_options": {"include_usage": True}}
    body |= {key: value for key, value in sampling.items() if value is not None}
    if raw:
        return TEXT, {**body, "prompt": prompt}
    messages = [{"role": "system", "content": system}] if system else []
    return CHAT, {**body, "messages": [*messages, {"role": "user", "content": prompt}]}


@contextmanager
def cancelled_when_left(client: Client, path: str, stream: Stream) -> Iterator[None]:
    """Leaving before the end cancels. SIGTERM and a closed terminal leave too."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError):
        if stream.request_id is not None:
            try:
                client.cancel(path, stream.request_id)
                note(f"\nrequest {stream.request_id} is cancelled")
            except ClientError as error:
                note(f"\nrequest {stream.request_id} may still run: {error}")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_stream(stream: Stream, as_json: bool) -> None:
    began_us = time.monotonic_ns() // 1000
    first_us: int | None = None
    usage: dict[str, Any] = {}
    for event in stream:
        usage = event.body.get("usage") or usage
        if as_json:
            print(json.dumps({"seq": event.seq, "data": event.body}, ensure_ascii=False), flush=True)
            continue
        if text := event.text():
            first_us = first_us or time.monotonic_ns() // 1000
            print(text, end="", flush=True)
    if as_json:
        return
    print(flush=True)
    ended_us = time.monotonic_ns() // 1000
    parts = [f"{usage.get('completion_tokens', '?')} tokens in {seconds(ended_us - began_us)}"]
    if first_us:
        parts.append(f"the first after {seconds(first_us - began_us)}")
    if cached := (usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
        parts.append(f"{cached} prompt tokens from cache")
    if stream.resumes:
        parts.append(f"resumed {stream.resumes} times")
    note(f"[{', '.join(parts)}; stoker why {stream.request_id}]")


def collected(stream: Stream, path: str, name: str) -> dict[str, Any]:
    """A stream as the answer that would have come without streaming."""
    texts: dict[int, str] = {}
    reasons: dict[int, Any] = {}
    head: dict[str, Any] = {}
    usage: dict[str, Any] | None = None
    for event in stream:
        head = head or event.body
        usage = event.body.get("usage") or usage
        for item in event.body.get("choices", ()):
            index = int(item.get("index", 0))
            texts[index] = texts.get(index, "") + event.text(index)
            reasons[index] = item.get("finish_reason") or reasons.get(index)
    chat = path == CHAT
    choices = [
        {
            "index": index,
            **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
            "finish_reason": reasons.get(index),
        }
        for index, text in sorted(texts.items())
    ]
    return {
        "id": stream.request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": head.get("created"),
        "model": head.get("model", name),
        "choices": choices or [{"index": 0, "text": "", "finish_reason": None}],
        "usage": usage,
    }


def _status_shower(shown: bool) -> Any:
    """Tells, once each, what a held request waits for; only to a terminal."""
    if not (shown and sys.stderr.isatty()):
        return None
    seen: set[str] = set()

    def show(text: str) -> None:
        if text and text != "heartbeat" and text not in seen:
            seen.add(text)
            note(f"[{text}]")

    return show
