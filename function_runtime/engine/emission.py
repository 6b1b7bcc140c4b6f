"""From a sampled token to its place in the log: text, ending and log-probabilities.

A choice ends with an end-of-text token, a stop token, a stop string or its limit, in that order of precedence; what the
detokenizer still held back goes out with the last token. Limits: deterministic from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from function_runtime.engine.request import Choice, Request
from function_runtime.engine.sampler import Row, Sampled
from function_runtime.protocol import FinishReason, TokenEvent, TokenLogprob
from model_loader.tokenizer import Tokenizer


class Emitter:
    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)

    def row(self, request: Request, choice: Choice) -> Row:
        """What the sampler has to know for the next token of a choice."""
        sampling = request.work.sampling
        forbidden: tuple[int, ...] = ()
        if len(choice.tokens) < sampling.min_tokens:
            forbidden = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos))
        position = len(request.prompt) + len(choice.tokens)
        return Row(sampling, choice.index, position, request.prompt, choice.tokens, forbidden)

    def emit(self, request: Request, choice: Choice, sampled: Sampled) -> TokenEvent:
        """Appends the token to its choice and gives its event."""
        sampling = request.work.sampling
        token = sampled.token_id
        choice.tokens.append(token)
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        if token in self._eos and not sampling.ignore_eos:
            finish = FinishReason.STOP
            text = choice.detokenizer.flush()
        elif token in sampling.stop_token_ids:
            finish, stop_reason = FinishReason.STOP, token
            text = choice.detokenizer.flush()
        else:
            text = choice.detokenizer.push(token)
            if choice.detokenizer.stopped is not None:
                finish, stop_reason = FinishReason.STOP, choice.detokenizer.stopped
            elif len(choice.tokens) >= request.limit:
                finish = FinishReason.LENGTH
                text += choice.detokenizer.flush()
        choice.finish = finish
        if sampling.logprobs is None:
            return TokenEvent(choice.index, token, text, finish, stop_reason)
        top = tuple(TokenLogprob(i, self._tokenizer.token_text(i), p) for i, p in sampled.top)
        return TokenEvent(
            choice.index, token, text, finish, stop_reason, sampled.logprob, top, self._tokenizer.token_text(token)
        )
