"""Bodies of `/v1/responses`: what is taken, and the chat request that is behind it.

A response is a conversation rendered by the model's template like any other; what it says of itself beside its text
(`Traits`) is kept with it. Limits: text in, text out; a parameter that would change the answer and is not served is
refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec

from control_plane.errors import InvalidRequest
from control_plane.gateway.parsing import Endpoint, GenerationRequest, chat_request, decode
from control_plane.gateway.wire import ChatBody, ChatMessage, CommonBody, ContentPart

LOGPROBS: Final = "message.output_text.logprobs"
MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
_ROLES: Final = frozenset({"user", "assistant", "system", "developer"})
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal"})
_REFUSED: Final = ("conversation", "prompt", "context_management", "moderation", "image", "access_programs")
_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
}
"""Chat's fields, as this endpoint calls them."""


class InputItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the conversation."""

    role: str
    parts: tuple[str, ...]


class Traits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a response says of itself beside its text."""

    items: tuple[InputItem, ...] = ()
    """The whole conversation before the answer, without the instructions."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    form: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})
    """`text.format` as it was given."""
    metadata: dict[str, str] = {}
    store: bool = True
    background: bool = False
    previous_response_id: str | None = None
    top_logprobs: int | None = None
    logprobs: bool = False
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class Item(msgspec.Struct, frozen=True):
    """An item of `input`; messages only."""

    content: str | list[ContentPart] | None = None
    role: str | None = None
    type: str = "message"


class TextConfig(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None


class ResponsesBody(CommonBody, frozen=True, kw_only=True):
    input: str | list[Item] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    truncation: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    # refused by name when given
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None
    access_programs: Any = None


_decoder: Final = msgspec.json.Decoder(ResponsesBody)
encode_traits: Final = msgspec.msgpack.Encoder().encode
decode_traits: Final = msgspec.msgpack.Decoder(Traits).decode


def parse_body(body: bytes) -> ResponsesBody:
    """Typed, and without anything that is not served here."""
    wire = decode(_decoder, body)
    for name in _REFUSED:
        if getattr(wire, name) is not None:
            raise _unsupported(name)
    if wire.truncation not in (None, "disabled"):
        raise _unsupported("truncation")
    if wire.n not in (None, 1):
        raise InvalidRequest("a response has one answer: n must be 1", param="n")
    if wire.max_tokens is not None:
        raise InvalidRequest("max_tokens is called max_output_tokens here", param="max_tokens")
    if wire.response_format is not None:
        raise InvalidRequest("response_format is called text.format here", param="response_format")
    if wire.background and wire.store is False:
        raise InvalidRequest("a background response has to be stored: leave store out", param="store")
    metadata = wire.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        not 1 <= len(name) <= MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS
        for name, value in metadata.items()
    ):
        raise InvalidRequest(
            f"metadata takes {MAX_METADATA} pairs, keys of 1 to {MAX_METADATA_KEY_CHARS} characters, values of up to "
            f"{MAX_METADATA_VALUE_CHARS}",
            param="metadata",
        )
    return wire


def generation(wire: ResponsesBody, before: tuple[InputItem, ...]) -> tuple[GenerationRequest, Traits]:
    """The request behind a response that follows the conversation `before`."""
    items = (*before, *_items(wire.input))
    logprobs = LOGPROBS in (wire.include or ()) or wire.top_logprobs is not None
    form = (wire.text.format if wire.text is not None else None) or {"type": "text"}
    messages = [ChatMessage("system", wire.instructions)] if wire.instructions else []
    messages += [ChatMessage(item.role, "".join(item.parts)) for item in items]
    common = {name: getattr(wire, name) for name in CommonBody.__struct_fields__}
    chat = ChatBody(
        **{
            **common,
            "messages": messages,
            "max_completion_tokens": wire.max_output_tokens,
            "response_format": _chat_format(form),
            "logprobs": logprobs or None,
            "top_logprobs": wire.top_logprobs,
            "tools": wire.tools,
            "tool_choice": wire.tool_choice,
        }
    )
    try:
        parsed = chat_request(chat)
    except InvalidRequest as error:
        raise _renamed(error) from None
    traits = Traits(
        items=items,
        instructions=wire.instructions,
        max_output_tokens=wire.max_output_tokens,
        temperature=1.0 if wire.temperature is None else wire.temperature,
        top_p=1.0 if wire.top_p is None else wire.top_p,
        form=form,
        metadata=wire.metadata or {},
        store=wire.store is not False,
        background=bool(wire.background),
        previous_response_id=wire.previous_response_id,
        top_logprobs=wire.top_logprobs,
        logprobs=logprobs,
        user=wire.user,
        prompt_cache_key=wire.prompt_cache_key,
        safety_identifier=wire.safety_identifier,
    )
    options = msgspec.structs.replace(
        parsed.options, endpoint=Endpoint.RESPONSES, response=encode_traits(traits), include_usage=False
    )
    sampling, grammar = parsed.sampling, parsed.sampling.grammar
    if grammar is not None:
        sampling = replace(sampling, grammar=msgspec.structs.replace(grammar, field=_own_name(grammar.field)))
    return replace(parsed, options=options, sampling=sampling), traits


def _items(value: str | list[Item] | None) -> tuple[InputItem, ...]:
    if isinstance(value, str):
        return (InputItem("user", (value,)),)
    if not value:
        raise InvalidRequest("input is empty: give a text or at least one message", param="input")
    items: list[InputItem] = []
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if item.type != "message" or item.role is None:
            raise InvalidRequest(
                f"{where} is of type {item.type[:40]!r}; this endpoint takes messages only", param=where
            )
        if item.role not in _ROLES:
            raise InvalidRequest(
                f"{where}.role is {item.role[:40]!r}; it must be one of {', '.join(sorted(_ROLES))}",
                param=f"{where}.role",
            )
        items.append(InputItem(item.role, _parts(item.content, where)))
    return tuple(items)


def _parts(content: str | list[ContentPart] | None, where: str) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    parts: list[str] = []
    for index, part in enumerate(content or ()):
        if part.type not in _TEXT_PARTS:
            raise InvalidRequest(
                f"{where}.content[{index}].type is {part.type[:40]!r}; this model reads text only",
                param=f"{where}.content[{index}].type",
            )
        parts.append(part.text or "")
    if not parts:
        raise InvalidRequest(f"{where}.content is empty", param=f"{where}.content")
    return tuple(parts)


def _chat_format(form: dict[str, Any]) -> dict[str, Any]:
    """`text.format` as chat's `response_format`, which has a schema's fields one level deeper."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _renamed(error: InvalidRequest) -> InvalidRequest:
    param = error.param and _own_name(error.param)
    return InvalidRequest(_own_name(error.message), param=param, code=error.code)


def _own_name(text: str) -> str:
    for theirs, ours in _NAMES.items():
        text = text.replace(theirs, ours)
    return text


def _unsupported(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is not supported here, and leaving it out would change the answer",
        param=name,
        code="unsupported_parameter",
    )
