"""A response as OpenAI's clients read it: one object, whatever state it is in, made from the request's log and end.

Everything in it follows from what the journal keeps, so that it is the same whoever makes it and whenever. Limits: one
output message with one part of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from control_plane.gateway.reading import Answer
from control_plane.gateway.rendering import chat_logprob
from control_plane.gateway.responses_body import InputItem, Traits, decode_traits
from control_plane.records import OutcomeError, RequestState
from control_plane.request_log import End
from function_runtime.protocol import FinishReason, TokenEvent

QUEUED: Final = "queued"
IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"


@dataclass(frozen=True, slots=True)
class ResponseView:
    """What never changes about a response."""

    answer: Answer
    traits: Traits

    @classmethod
    def of(cls, answer: Answer) -> ResponseView:
        return cls(answer, decode_traits(answer.options.response))

    @property
    def id(self) -> str:
        return self.answer.head.request_id

    @property
    def item_id(self) -> str:
        """Of its output message."""
        return "msg_" + self.id.removeprefix("resp_")

    def body(
        self,
        status: str,
        output: Sequence[dict[str, Any]] = (),
        end: End | None = None,
        completed_at: int | None = None,
    ) -> dict[str, Any]:
        traits, head = self.traits, self.answer.head
        return {
            "id": head.request_id,
            "object": "response",
            "created_at": head.created_s,
            "status": status,
            "background": traits.background,
            "completed_at": completed_at if status == COMPLETED else None,
            "error": error_body(end.error) if status == FAILED and end is not None else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "instructions": traits.instructions,
            "max_output_tokens": traits.max_output_tokens,
            "max_tool_calls": None,
            "metadata": traits.metadata,
            "model": head.model,
            "output": list(output),
            "parallel_tool_calls": True,
            "previous_response_id": traits.previous_response_id,
            "prompt_cache_key": traits.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": traits.safety_identifier,
            "service_tier": "default",
            "store": traits.store,
            "temperature": traits.temperature,
            "text": {"format": traits.form},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": traits.top_logprobs or 0,
            "top_p": traits.top_p,
            "truncation": "disabled",
            "usage": None if end is None else self._usage(end),
            "user": traits.user,
        }

    def _usage(self, end: End) -> dict[str, Any]:
        usage = self.answer.usage(end)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def part(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def message(self, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": list(content),
        }

    def at_end(self, end: End, completed_at: int | None = None) -> dict[str, Any]:
        """The whole of a response that has ended."""
        events = self.answer.log.events
        return self.body(status_of(end, events), self.output(end), end, completed_at)

    def output(self, end: End) -> tuple[dict[str, Any], ...]:
        events = self.answer.log.events
        if not events:
            return ()
        text = "".join([event.text for event in events])
        status = COMPLETED if status_of(end, events) == COMPLETED else INCOMPLETE
        return (self.message(status, (self.part(text, self.logprobs(events)),)),)

    def logprobs(self, events: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        return [chat_logprob(event) for event in events] if self.traits.logprobs else []

    def input_items(self) -> list[dict[str, Any]]:
        stem = "msg_in" + self.id.removeprefix("resp_")
        return [_input_item(f"{stem}{index:04d}", item) for index, item in enumerate(self.traits.items)]


def _input_item(item_id: str, item: InputItem) -> dict[str, Any]:
    kind = "output_text" if item.role == "assistant" else "input_text"
    content = [
        {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})} for text in item.parts
    ]
    return {"id": item_id, "type": "message", "role": item.role, "status": "completed", "content": content}


def status_of(end: End, events: Sequence[TokenEvent]) -> str:
    match end.state:
        case RequestState.DONE:
            return INCOMPLETE if events and events[-1].finish is FinishReason.LENGTH else COMPLETED
        case RequestState.CANCELLED:
            return CANCELLED
        case _:
            return FAILED


def error_body(error: OutcomeError | None) -> dict[str, Any]:
    """OpenAI's codes are few; ours is told beside as `type`."""
    if error is None:
        return {"code": "server_error", "message": "the response ended without a reason", "type": "internal_error"}
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.http_status, "server_error")
    return {"code": code, "message": error.message, "type": error.code}
