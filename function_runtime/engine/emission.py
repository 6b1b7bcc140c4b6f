"""From a sampled token to its place in the log: text, ending and log-probabilities; and what the next token may be.

A choice ends with an end-of-text token, a stop token, a stop string, where its grammar is complete, or with its limit,
in that order of precedence; what the detokenizer still held back goes out with the last token. A grammar decides over
end-of-text and stop tokens too: they are allowed where the answer may end. Limits: deterministic from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from function_runtime.engine.errors import GrammarStuck
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
        position = len(request.prompt) + len(choice.tokens)
        forbidden = self._forbidden(request, choice)
        return Row(sampling, choice.index, position, request.prompt, choice.tokens, forbidden, choice.allowed)

    def _forbidden(self, request: Request, choice: Choice) -> tuple[int, ...]:
        sampling = request.work.sampling
        if len(choice.tokens) >= sampling.min_tokens:
            return ()
        return (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos))

    def permit(self, request: Request, choice: Choice) -> bool:
        """Sets what the next token may be; False: nothing may follow, and the answer is complete.

        Raises `GrammarStuck` where it is not complete either."""
        guide = choice.guide
        if guide is None:
            return True
        sampling = request.work.sampling
        allowed = guide.allowed
        forbidden = list(self._forbidden(request, choice))
        ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos)]
        if forbidden:
            allowed[forbidden] = False
        elif guide.may_end and allowed.any():
            allowed[ends] = True
        choice.allowed = allowed
        if allowed.any():
            return True
        if guide.may_end:
            return False
        raise GrammarStuck(
            f"choice {choice.index} of {request.request_id} is at a place of its grammar after {len(choice.tokens)} "
            "tokens where no token of this model can follow"
        )

    def emit(self, request: Request, choice: Choice, sampled: Sampled) -> TokenEvent:
        """Appends the token to its choice and gives its event. Raises `GrammarStuck`."""
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
            elif not self._goes_on(request, choice, token):
                finish = FinishReason.STOP
                text += choice.detokenizer.flush()
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

    def _goes_on(self, request: Request, choice: Choice, token: int) -> bool:
        if choice.guide is None:
            return True
        try:
            choice.guide.advance(token)
            return self.permit(request, choice)
        except GrammarStuck:
            if len(choice.tokens) >= request.limit:
                return True
            raise
