"""A replica's refusal as the request's error: whose fault it is, its status, and the field it is about.

Limits: by the code alone; whether another replica may do better is the replica's own word.
"""

from __future__ import annotations

from typing import Final

from control_plane.records import OutcomeError
from function_runtime.protocol import Failed, Sampling

GRAMMAR_FAULTS: Final = frozenset({"invalid_grammar", "grammar_stuck"})
CLIENT_FAULTS: Final = GRAMMAR_FAULTS | {
    "context_length_exceeded", "invalid_request", "prompt_too_long", "invalid_request_error",
}  # fmt: skip
"""Codes of a replica's refusals that are about the request itself."""


def error_of(failed: Failed, sampling: Sampling) -> OutcomeError:
    status = 400 if failed.code in CLIENT_FAULTS else 500
    grammar = sampling.grammar if failed.code in GRAMMAR_FAULTS else None
    return OutcomeError(status, failed.code, failed.message, failed.retry, (grammar.field or None) if grammar else None)
