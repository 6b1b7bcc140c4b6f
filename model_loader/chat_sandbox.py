"""The jinja2 environment chat templates run in. Imported at the first template only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's own words for training; here it only stands for its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Products, powers and formats are bounded, so that one expression cannot take all memory."""

    intercepted_binops = frozenset({"*", "**", "%"})
    max_product = 0

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(value, int | float) and abs(value) <= 1024 for value in (left, right)):
                raise SecurityError("powers of numbers over 1024")
        elif operator == "*":
            sizes = [len(v) if isinstance(v, str | bytes | list | tuple) else abs(v) for v in (left, right)]
            if sizes[0] * sizes[1] > self.max_product and not all(isinstance(v, int | float) for v in (left, right)):
                raise SecurityError(f"a repetition over {self.max_product} items")
        elif isinstance(left, str) and any(isinstance(v, int) and abs(v) > self.max_product for v in _flat(right)):
            raise SecurityError("a format with a width out of bounds")
        return super().call_binop(context, operator, left, right)


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def make_environment(
    to_json: Callable[..., str], raise_exception: Callable[[str], None], max_product: int
) -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.max_product = max_product
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment
