"""What the engine refuses or gives up on.

    EngineError
    ├── InvalidWork        the request cannot be served by this engine, whatever is tried again
    ├── InvalidGrammar     the grammar of the answer does not compile
    ├── GrammarStuck       no token can follow, and the grammar may not end here
    ├── ContextExceeded    the prompt does not fit the context or the KV memory
    ├── NumericError       the model's logits are not numbers
    ├── OutOfMemory        weights, KV or workspace do not fit
    └── UnusableModel      the prepared checkpoint is not one this engine computes

`code` is stable and machine readable; `retry` says whether another replica may do better.
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    code: ClassVar[str] = "engine_error"
    retry: ClassVar[bool] = False

    @property
    def message(self) -> str:
        return str(self)


class InvalidWork(EngineError):
    code = "invalid_request"


class InvalidGrammar(EngineError):
    code = "invalid_grammar"


class GrammarStuck(EngineError):
    code = "grammar_stuck"


class ContextExceeded(EngineError):
    code = "context_length_exceeded"


class NumericError(EngineError):
    code = "engine_numeric_error"


class OutOfMemory(EngineError):
    code = "engine_out_of_memory"
    retry = True


class UnusableModel(EngineError):
    code = "model_unusable"
