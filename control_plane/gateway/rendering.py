"""From a request's token events to what OpenAI clients read: events of a stream, or one whole answer.

Everything that stays the same is encoded once per stream; a token costs one JSON string and a few joins. Each event's
`id:` is the place in the request's log of the last token it covers, one sequence over all choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from control_plane.gateway.parsing import Endpoint, RenderOptions
from function_runtime.protocol import FinishReason, TokenEvent

DONE: Final = b"data: [DONE]\n\n"
_json: Final = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer says about it."""

    request_id: str
    model: str
    """As the client named it."""
    created_s: int


def comment(text: str) -> bytes:
    """A heartbeat: readers ignore it, proxies see traffic.

    No empty line behind it: stock clients remember the last `id:` and take an empty line for an event without data."""
    return b": " + text.encode().replace(b"\n", b" ") + b"\n"


def error_event(body: dict[str, Any]) -> bytes:
    return b"data: " + _json(body) + b"\n\n"


def finish_text(finish: FinishReason | None) -> bytes:
    if finish is None:
        return b"null"
    return b'"length"' if finish is FinishReason.LENGTH else b'"stop"'


def chat_logprob(event: TokenEvent) -> dict[str, Any]:
    token = event.token_text or ""
    return {
        "token": token,
        "logprob": event.logprob,
        "bytes": list(token.encode()),
        "top_logprobs": [
            {"token": top.text, "logprob": top.logprob, "bytes": list(top.text.encode())} for top in event.top
        ],
    }


def completion_logprobs(events: Sequence[TokenEvent], offset: int, top: int) -> dict[str, Any]:
    offsets: list[int] = []
    for event in events:
        offsets.append(offset)
        offset += len(event.token_text or "")
    return {
        "tokens": [event.token_text or "" for event in events],
        "token_logprobs": [event.logprob for event in events],
        "top_logprobs": [{t.text: t.logprob for t in event.top} for event in events] if top else None,
        "text_offset": offsets,
    }


class EventStream:
    """Renders the events of one reader's stream, from its cursor on."""

    __slots__ = (
        "_chat",
        "_continuous",
        "_head",
        "_middle",
        "_offsets",
        "_options",
        "_prompt_tokens",
        "_started",
        "_tail",
    )

    def __init__(
        self, head: Head, options: RenderOptions, prompt_tokens: int, before: Iterable[TokenEvent] = ()
    ) -> None:
        """`before`: the events up to the reader's cursor, which it has had already."""
        self._options = options
        self._chat = options.endpoint is Endpoint.CHAT
        self._prompt_tokens = prompt_tokens
        self._continuous = options.continuous_usage
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._head = (
            b'data: {"id":'
            + _json(head.request_id)
            + b',"object":"'
            + kind.encode()
            + b'","created":%d,"model":' % head.created_s
            + _json(head.model)
            + b',"system_fingerprint":null,"choices":['
        )
        self._middle = b',"delta":{"content":' if self._chat else b',"text":'
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._started: set[int] = set()
        self._offsets: dict[int, int] = {}
        for event in before:
            self._started.add(event.choice)
            self._advance(event)

    def _advance(self, event: TokenEvent) -> int:
        offset = self._offsets.get(event.choice, len(self._options.echo))
        self._offsets[event.choice] = offset + len(event.token_text or "")
        return offset

    def render(self, events: Iterable[TokenEvent], first_seq: int) -> bytes:
        """The events that readers see of these tokens; nothing for those whose text is still held back."""
        parts: list[bytes] = []
        seq = first_seq
        for event in events:
            self._render_one(parts, event, seq)
            seq += 1
        return b"".join(parts)

    def _render_one(self, parts: list[bytes], event: TokenEvent, seq: int) -> None:
        options = self._options
        choice = event.choice
        first = choice not in self._started
        if not (event.text or event.finish is not None or options.logprobs or (first and self._chat)):
            return
        text = event.text
        middle = self._middle
        if first:
            self._started.add(choice)
            if self._chat:
                middle = b',"delta":{"role":"assistant","content":'
            elif options.echo:
                text = options.echo + text
        parts.append(b"id: %d\n" % seq)
        parts.append(self._head)
        parts.append(b'{"index":%d' % choice)
        parts.append(middle)
        parts.append(_json(text))
        if self._chat:
            parts.append(b"}")
        if options.logprobs:
            parts.append(b',"logprobs":')
            if self._chat:
                parts.append(_json({"content": [chat_logprob(event)], "refusal": None}))
            else:
                parts.append(_json(completion_logprobs((event,), self._advance(event), options.top_logprobs)))
            parts.append(b',"finish_reason":')
        else:
            parts.append(b',"logprobs":null,"finish_reason":')
        parts.append(finish_text(event.finish))
        if event.stop_reason is not None:
            parts.append(b',"stop_reason":' + _json(event.stop_reason))
        parts.append(b"}]")
        if self._continuous:
            usage = Usage(self._prompt_tokens, seq, 0)
            parts.append(b',"usage":' + _json(usage.as_json()) + b"}\n\n")
        else:
            parts.append(self._tail)

    def end(self, usage: Usage, last_seq: int) -> bytes:
        """The usage chunk, if asked for, and the end mark."""
        if not self._options.include_usage:
            return DONE
        return b"id: %d\n" % last_seq + self._head + b'],"usage":' + _json(usage.as_json()) + b"}\n\n" + DONE


def whole_answer(head: Head, options: RenderOptions, events: Sequence[TokenEvent], usage: Usage, n: int) -> bytes:
    """The answer to a request that does not stream."""
    chat = options.endpoint is Endpoint.CHAT
    return _json(
        {
            "id": head.request_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": head.created_s,
            "model": head.model,
            "system_fingerprint": None,
            "choices": choices_of(options, events, n, 0),
            "usage": usage.as_json(),
        }
    )


def choices_of(options: RenderOptions, events: Sequence[TokenEvent], n: int, first_index: int) -> list[dict[str, Any]]:
    by_choice: list[list[TokenEvent]] = [[] for _ in range(n)]
    for event in events:
        by_choice[event.choice].append(event)
    return [_choice(options, mine, first_index + index) for index, mine in enumerate(by_choice)]


def _choice(options: RenderOptions, events: Sequence[TokenEvent], index: int) -> dict[str, Any]:
    text = "".join([event.text for event in events])
    last = events[-1] if events else None
    finish = "length" if last is not None and last.finish is FinishReason.LENGTH else "stop"
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
    if options.endpoint is Endpoint.CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        if options.logprobs:
            choice["logprobs"] = {"content": [chat_logprob(event) for event in events], "refusal": None}
    else:
        choice["text"] = options.echo + text
        if options.logprobs:
            choice["logprobs"] = completion_logprobs(events, len(options.echo), options.top_logprobs)
    if last is not None and last.stop_reason is not None:
        choice["stop_reason"] = last.stop_reason
    return choice
