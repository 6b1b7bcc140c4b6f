"""What a request says its answer must look like, in whichever field it says so, as one `Grammar`.

`response_format` is OpenAI's, `guided_*` and `structured_outputs` are vLLM's; two of them at once are refused, because
each would mean something else. Limits: checked here is what costs nothing (kinds, sizes, that a schema is a JSON
object); whether a grammar compiles is known by the replica, which says so before the first token (`invalid_grammar`).
"""

from __future__ import annotations

import json
from typing import Any, Final

from control_plane.errors import InvalidRequest
from control_plane.gateway.wire import CommonBody
from function_runtime.protocol import Grammar, GrammarKind

MAX_GRAMMAR_BYTES: Final = 256 * 1024
MAX_SCHEMA_NAME_CHARS: Final = 64

_STRUCTURED: Final = ("json", "json_object", "regex", "choice", "grammar")


def grammar_of(wire: CommonBody) -> Grammar | None:
    """The one grammar a body asks for; None: any text will do."""
    asked = [
        grammar
        for grammar in (
            format_grammar(wire.response_format, "response_format"),
            _schema(wire.guided_json, "guided_json"),
            _text(wire.guided_regex, GrammarKind.REGEX, "guided_regex"),
            _choice(wire.guided_choice, "guided_choice"),
            _text(wire.guided_grammar, GrammarKind.LARK, "guided_grammar"),
            *_structured(wire.structured_outputs),
        )
        if grammar is not None
    ]
    if len(asked) > 1:
        first, second = asked[0].field, asked[1].field
        raise InvalidRequest(f"{first} and {second} are both given; an answer follows one of them", param=second)
    return asked[0] if asked else None


def format_grammar(form: Any, field: str) -> Grammar | None:
    """OpenAI's `response_format`."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{field} must be an object with a type", param=field)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT, field=field)
    if kind != "json_schema":
        raise InvalidRequest(
            f"{field}.type is {kind[:40]!r}; it must be text, json_object or json_schema",
            param=f"{field}.type",
            code="unsupported_parameter",
        )
    described = form.get("json_schema")
    if not isinstance(described, dict):
        raise InvalidRequest(
            f"{field}.json_schema must be an object with name and schema", param=f"{field}.json_schema"
        )
    name = described.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_SCHEMA_NAME_CHARS:
        raise InvalidRequest(
            f"{field}.json_schema.name must have 1 to {MAX_SCHEMA_NAME_CHARS} characters",
            param=f"{field}.json_schema.name",
        )
    if described.get("strict") not in (None, True, False):
        raise InvalidRequest(f"{field}.json_schema.strict must be true or false", param=f"{field}.json_schema.strict")
    where = f"{field}.json_schema.schema"
    if described.get("schema") is None:
        raise InvalidRequest(f"{where} is missing", param=where)
    return _schema(described["schema"], where)


def _structured(value: Any) -> tuple[Grammar | None, ...]:
    """vLLM's `structured_outputs`: one of its members says what the answer is."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise InvalidRequest("structured_outputs must be an object", param="structured_outputs")
    given = {name: member for name, member in value.items() if member is not None}
    for name in given:
        if name not in _STRUCTURED:
            where = f"structured_outputs.{name[:40]}"
            raise InvalidRequest(
                f"{where} is not supported here; there are {', '.join(_STRUCTURED)}",
                param=where,
                code="unsupported_parameter",
            )
    if not given:
        raise InvalidRequest(
            f"structured_outputs is empty; give one of {', '.join(_STRUCTURED)}", param="structured_outputs"
        )
    whole = given.get("json_object", False)
    if whole not in (True, False):
        raise InvalidRequest("structured_outputs.json_object must be true", param="structured_outputs.json_object")
    return (
        Grammar(GrammarKind.JSON_OBJECT, field="structured_outputs.json_object") if whole else None,
        _schema(given.get("json"), "structured_outputs.json"),
        _text(given.get("regex"), GrammarKind.REGEX, "structured_outputs.regex"),
        _choice(given.get("choice"), "structured_outputs.choice"),
        _text(given.get("grammar"), GrammarKind.LARK, "structured_outputs.grammar"),
    )


def _schema(value: Any, field: str) -> Grammar | None:
    """A schema as an object, or as the text of one; the order of its properties is kept, because it is that of the
    answer."""
    if value is None:
        return None
    if isinstance(value, str):
        _within_size(value, field)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not valid JSON: {error}", param=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be a JSON schema: an object", param=field)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is no JSON schema that can be read: {error}", param=field) from None
    return _text(text, GrammarKind.JSON_SCHEMA, field)


def _choice(value: Any, field: str) -> Grammar | None:
    """One of several texts, as an expression in which nothing but letters and digits stands for itself."""
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(f"{field} must be a list of texts, none of them empty", param=field)
    options = ("".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text) for text in value)
    return _text(f"({'|'.join(options)})", GrammarKind.REGEX, field)


def _text(value: Any, kind: GrammarKind, field: str) -> Grammar | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{field} must be a text that is not empty", param=field)
    _within_size(value, field)
    return Grammar(kind, value, field)


def _within_size(text: str, field: str) -> None:
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field} is no valid Unicode: it holds half of a surrogate pair", param=field) from None
    if nbytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{field} has {nbytes} bytes; at most {MAX_GRAMMAR_BYTES} are taken", param=field)
