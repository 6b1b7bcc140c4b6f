"""Chat templates: messages to the text a model was trained on, in a sandbox.

A template is code that came with a checkpoint. It runs in jinja2's immutable sandbox with transformers' dialect (block
trimming, loop controls, `tojson`, `raise_exception`, `strftime_now`, `generation` blocks) and with bounds on its size,
its output and the values it may multiply. Limits: a template that loops without output is only bounded per `range`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from model_loader.errors import TemplateError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS: Final = 1024 * 1024
MAX_OUTPUT_CHARS: Final = 16 * 1024 * 1024
_MAX_PRODUCT: Final = 1024 * 1024

_lock = threading.Lock()
_environment: ImmutableSandboxedEnvironment | None = None


class ChatTemplate:
    """A compiled template. `render` may be called from several threads."""

    def __init__(self, template: str, bos: str | None, eos: str | None) -> None:
        if len(template) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"the chat template has {len(template)} characters, over {MAX_TEMPLATE_CHARS}")
        self._bos, self._eos = bos or "", eos or ""
        self._template = _compile(template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: Callable[[], datetime] = datetime.now,
        **variables: Any,
    ) -> str:
        """The prompt's text. `variables` are the template's own switches (transformers' `chat_template_kwargs`)."""
        import jinja2

        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                **{
                    **variables,
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                    "bos_token": self._bos,
                    "eos_token": self._eos,
                    "strftime_now": lambda form: now().strftime(form),
                }
            ):
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise TemplateError(f"the chat template wrote over {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except TemplateError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise TemplateError(f"the chat template did what is not allowed: {error}") from error
        except jinja2.exceptions.TemplateError as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        except (
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise TemplateError(f"the chat template failed on these messages: {error}") from error
        return "".join(pieces)


def _compile(source: str) -> Template:
    import jinja2

    with _lock:
        try:
            return _sandbox().from_string(source)
        except (jinja2.exceptions.TemplateError, RecursionError) as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error


def _sandbox() -> ImmutableSandboxedEnvironment:
    """One environment for all templates; made at the first use, because jinja2 takes a tenth of a second to import."""
    global _environment
    if _environment is None:
        from model_loader.chat_sandbox import make_environment

        _environment = make_environment(_to_json, _raise_exception, _MAX_PRODUCT)
    return _environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the chat template refused the messages: {message}")
