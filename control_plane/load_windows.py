"""Windows of load on their way: from a gateway to the leader, and into the database.

A `ClosedWindow` is ten seconds of one gateway: what came to each function there, and what ran on each slot; the quiet
ones are left out. Limits: values only; `autoscaler.windows` gives them their meaning.
"""

from __future__ import annotations

from typing import Final

import msgspec

STORED: Final = (
    "arrivals", "refused", "peak_concurrency", "mean_concurrency", "prompt_tokens", "output_tokens", "peak_queue",
    "kv_used_share", "first_token_s_sum", "first_token_count", "first_token_s_max", "token_s_sum", "token_count",
    "late", "ended", "ended_output_tokens", "service_s_sum", "ended_output_tokens_sq",
)  # fmt: skip
"""The order of a window's values wherever they have no names. Only ever appended to."""


SLOTS: Final = ""
"""Stands for the tenant in the windows of slots: no tenant is called so."""


class FunctionWindow(msgspec.Struct, frozen=True):
    tenant: str
    function: str
    """Of a slot: its name."""
    values: tuple[float, ...]
    """By `STORED`; what an older gateway has not is 0."""
    busy: tuple[tuple[float, float], ...] = ()
    """Times with at least one request waiting or running, by the wall clock."""


class ClosedWindow(msgspec.Struct, frozen=True):
    start_s: float
    """On the wall clock."""
    whole: bool
    """False: the gateway began within it."""
    functions: tuple[FunctionWindow, ...] = ()
    """Functions, and slots; an older leader passes over those, as it knows no function of theirs."""
