"""From a request's bytes to a `GenerationRequest` whose every value is in bounds, or an error that names the field.

Pure functions; tokens and the context limit come later (`prompts`). Limits: one prompt per stream; token ids are
checked against the vocabulary where it is known.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from control_plane.errors import InvalidRequest
from control_plane.gateway.grammars import grammar_of
from control_plane.gateway.wire import ChatBody, ChatMessage, CommonBody, CompletionBody
from function_runtime.protocol import Grammar

MAX_CHOICES: Final = 16
MAX_PROMPTS: Final = 128
MAX_STOP: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_MODEL_CHARS: Final = 256
MAX_CACHE_KEY_CHARS: Final = 256
MAX_LOGIT_BIAS: Final = 4096
MAX_TOP_LOGPROBS: Final = 20
MAX_TOKENS: Final = 1 << 31
DEFAULT_COMPLETION_TOKENS: Final = 16
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

Body = TypeVar("Body", bound=CommonBody)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)

_REFUSED_COMMON: Final = ("guided_whitespace_pattern", "allowed_token_ids", "bad_words")
_REFUSED_CHAT: Final = (*_REFUSED_COMMON, "audio", "web_search_options", "chat_template")
_REFUSED_COMPLETION: Final = (*_REFUSED_COMMON, "prompt_embeds")


class Endpoint(enum.StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"

    @property
    def id_prefix(self) -> str:
        return _ID_PREFIXES[self]

    def way_back(self, request_id: str, last_seq: int) -> str:
        """How a reader asks for the rest."""
        if self is Endpoint.RESPONSES:
            return f"GET /v1/responses/{request_id}?stream=true&starting_after=N, N being the last sequence_number"
        path = "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"
        return f"GET {path}/{request_id}/stream and Last-Event-ID: {last_seq}"


_ID_PREFIXES: Final = {Endpoint.CHAT: "chatcmpl-", Endpoint.COMPLETIONS: "cmpl-", Endpoint.RESPONSES: "resp_"}


class RenderOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the answer is to look; kept in the journal, so that any gateway renders it alike."""

    endpoint: Endpoint
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    echo: str = ""
    """Text to put before a completion's own (the prompt, when asked to echo it)."""
    response: bytes = b""
    """What a response says of itself beside its text (`responses_body.Traits`, msgpack)."""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """What the client asked of sampling; the seed and the token limit may still be open."""

    seed: int | None
    max_tokens: int | None
    min_tokens: int
    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    model: str
    sampling: SamplingRequest
    options: RenderOptions
    messages: tuple[dict[str, Any], ...] = ()
    """Chat: plain messages for the template."""
    add_generation_prompt: bool = True
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Completions: each becomes a request of its own."""
    echo: bool = False
    add_special_tokens: bool = True
    prompt_cache_key: str = ""
    """Names the conversation this belongs to: its KV is then more likely to be kept."""


def parse_chat(body: bytes) -> GenerationRequest:
    return chat_request(decode(_chat_decoder, body))


def chat_request(wire: ChatBody) -> GenerationRequest:
    _refuse_given(wire, _REFUSED_CHAT)
    if wire.tools or wire.functions:
        raise _unsupported("tools" if wire.tools else "functions")
    if wire.tool_choice not in (None, "none", "auto") or wire.function_call not in (None, "none", "auto"):
        raise _unsupported("tool_choice" if wire.tool_choice is not None else "function_call")
    if wire.modalities not in (None, ["text"]):
        raise _unsupported("modalities")
    if wire.continue_final_message:
        raise _unsupported("continue_final_message")
    if wire.max_tokens is not None and wire.max_completion_tokens not in (None, wire.max_tokens):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
        )
    top_logprobs = wire.top_logprobs or 0
    if top_logprobs and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    _within("top_logprobs", top_logprobs, 0, MAX_TOP_LOGPROBS)
    options = _options(wire, Endpoint.CHAT, bool(wire.logprobs), top_logprobs)
    limit = wire.max_completion_tokens if wire.max_completion_tokens is not None else wire.max_tokens
    name = "max_completion_tokens" if wire.max_completion_tokens is not None else "max_tokens"
    return GenerationRequest(
        model=_model(wire.model),
        sampling=_sampling(wire, limit, name, top_logprobs if wire.logprobs else None),
        options=options,
        messages=_messages(wire.messages),
        add_generation_prompt=wire.add_generation_prompt is not False,
        prompt_cache_key=_cache_key(wire.prompt_cache_key),
    )


def parse_completion(body: bytes) -> GenerationRequest:
    wire = decode(_completion_decoder, body)
    _refuse_given(wire, _REFUSED_COMPLETION)
    if wire.suffix:
        raise _unsupported("suffix")
    prompts = _prompts(wire.prompt)
    logprobs = wire.logprobs
    if logprobs is not None:
        _within("logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
        if wire.echo:
            raise InvalidRequest("logprobs of the prompt are not supported: use echo or logprobs", param="echo")
    if wire.stream and len(prompts) > 1:
        raise InvalidRequest(f"a stream takes one prompt, not {len(prompts)}", param="prompt")
    limit = DEFAULT_COMPLETION_TOKENS if wire.max_tokens is None else wire.max_tokens
    return GenerationRequest(
        model=_model(wire.model),
        sampling=_sampling(wire, limit, "max_tokens", logprobs),
        options=_options(wire, Endpoint.COMPLETIONS, logprobs is not None, logprobs or 0),
        prompts=prompts,
        echo=bool(wire.echo),
        add_special_tokens=wire.add_special_tokens is not False,
        prompt_cache_key=_cache_key(wire.prompt_cache_key),
    )


def _cache_key(key: str | None) -> str:
    if key is not None and len(key) > MAX_CACHE_KEY_CHARS:
        raise InvalidRequest(
            f"prompt_cache_key has {len(key)} characters; at most {MAX_CACHE_KEY_CHARS} are allowed",
            param="prompt_cache_key",
        )
    return key or ""


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Raises `InvalidRequest` naming the field."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        if found is None:
            missing = re.search(r"required field `(\w+)`", text)
            raise InvalidRequest(text, param=missing.group(1) if missing else None) from None
        message = text[: found.start()]
        missing = re.search(r"required field `(\w+)`", message)
        path = found.group(1) + (f".{missing.group(1)}" if missing else "")
        raise InvalidRequest(f"{path}: {message}", param=path or None) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _unsupported(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is not supported here, and leaving it out would change the answer",
        param=name,
        code="unsupported_parameter",
    )


def _refuse_given(wire: CommonBody, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(wire, name) is not None:
            raise _unsupported(name)
    if wire.use_beam_search:
        raise _unsupported("use_beam_search")
    if wire.prompt_logprobs is not None:
        raise _unsupported("prompt_logprobs")
    if wire.best_of is not None and wire.best_of != (wire.n or 1):
        raise _unsupported("best_of")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", param=name)


def _number(name: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    _within(name, value, low, high)
    return float(value)


def _model(name: str) -> str:
    if not name or len(name) > MAX_MODEL_CHARS:
        raise InvalidRequest(f"model must have 1 to {MAX_MODEL_CHARS} characters", param="model")
    return name


def _options(wire: CommonBody, endpoint: Endpoint, logprobs: bool, top_logprobs: int) -> RenderOptions:
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    stream_options = wire.stream_options
    return RenderOptions(
        endpoint=endpoint,
        stream=bool(wire.stream),
        include_usage=stream_options is not None and stream_options.include_usage,
        continuous_usage=stream_options is not None and stream_options.continuous_usage_stats,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def _sampling(wire: CommonBody, limit: int | None, limit_name: str, logprobs: int | None) -> SamplingRequest:
    if limit is not None:
        _within(limit_name, limit, 1, MAX_TOKENS)
    min_tokens = wire.min_tokens or 0
    _within("min_tokens", min_tokens, 0, MAX_TOKENS)
    if limit is not None and min_tokens > limit:
        raise InvalidRequest(f"min_tokens is {min_tokens}, above {limit_name} {limit}", param="min_tokens")
    n = 1 if wire.n is None else wire.n
    _within("n", n, 1, MAX_CHOICES)
    seed = wire.seed
    if seed is not None:
        _within("seed", seed, -(2**63), 2**64 - 1)
        seed &= 2**63 - 1
    top_k = wire.top_k or 0
    if top_k == -1:
        top_k = 0
    _within("top_k", top_k, 0, MAX_TOKENS)
    repetition = _number("repetition_penalty", wire.repetition_penalty, 1.0, 0.01, 10.0)
    temperature = _number("temperature", wire.temperature, 1.0, 0.0, 2.0)
    top_p = _number("top_p", wire.top_p, 1.0, 0.0, 1.0)
    if top_p == 0.0:
        top_p, temperature = 1.0, 0.0  # only the best token remains
    return SamplingRequest(
        seed=seed,
        max_tokens=limit,
        min_tokens=min_tokens,
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=_number("min_p", wire.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=repetition,
        presence_penalty=_number("presence_penalty", wire.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", wire.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(wire.logit_bias),
        stop=_stop(wire.stop),
        stop_token_ids=_stop_token_ids(wire.stop_token_ids),
        ignore_eos=bool(wire.ignore_eos),
        logprobs=logprobs,
        grammar=grammar_of(wire),
    )


def _stop(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOP:
        raise InvalidRequest(f"stop has {len(stops)} strings; at most {MAX_STOP} are allowed", param="stop")
    for text in stops:
        if not text or len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
    return stops


def _stop_token_ids(value: list[int] | None) -> tuple[int, ...]:
    ids = tuple(value or ())
    if len(ids) > MAX_STOP or any(not 0 <= token_id < MAX_TOKENS for token_id in ids):
        raise InvalidRequest(f"stop_token_ids takes up to {MAX_STOP} token ids", param="stop_token_ids")
    return ids


def _logit_bias(value: dict[str, float] | None) -> dict[int, float]:
    if not value:
        return {}
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias has the key {key[:40]!r}, which is no token id", param="logit_bias")
        _within("logit_bias", bias, -100.0, 100.0)
        biases[int(key)] = float(bias)
    return biases


def _messages(wire: list[ChatMessage]) -> tuple[dict[str, Any], ...]:
    if not wire:
        raise InvalidRequest("messages is empty; give at least one", param="messages")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(wire):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise InvalidRequest(
                f"{where}.role is {message.role[:40]!r}; it must be one of {', '.join(sorted(ROLES))}",
                param=f"{where}.role",
            )
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        plain: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": _content(message, where),
        }
        if message.name is not None:
            plain["name"] = message.name
        if message.tool_calls:
            plain["tool_calls"] = message.tool_calls
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        messages.append(plain)
    return tuple(messages)


def _content(message: ChatMessage, where: str) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for index, part in enumerate(message.content):
        if part.type not in ("text", "input_text", "refusal"):
            raise InvalidRequest(
                f"{where}.content[{index}].type is {part.type[:40]!r}; this model reads text only",
                param=f"{where}.content[{index}].type",
            )
        texts.append(part.text or "")
    return "".join(texts)


def _prompts(value: str | list[Any]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if not value:
        raise InvalidRequest("prompt is empty; give at least one", param="prompt")
    if all(type(item) is int for item in value):
        return (_token_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(value)} entries; at most {MAX_PROMPTS}", param="prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in value):
        return tuple(_token_ids(item) for item in value)
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists", param="prompt"
    )


def _token_ids(value: list[int]) -> tuple[int, ...]:
    if any(not 0 <= token_id < MAX_TOKENS for token_id in value):
        raise InvalidRequest("prompt holds numbers that are no token ids", param="prompt")
    return tuple(value)
