"""From messages or text to the tokens a replica gets: the checkpoint's own tokenizer and template, torch-free.

One `PromptMaker` per checkpoint, loaded once in a thread and kept; short inputs are made on the event loop (tens of
microseconds), long ones in a thread. Limits: text only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from control_plane.errors import InvalidRequest, ModelUnusable, ObjectStoreUnavailable
from control_plane.gateway.parsing import GenerationRequest, SamplingRequest
from function_runtime.protocol import Sampling

if TYPE_CHECKING:
    from model_loader.chat import ChatTemplate
    from model_loader.manifest import Manifest
    from model_loader.tokenizer import Tokenizer

THREAD_CHARS: Final = 8192
"""Inputs longer than this are tokenised in a thread: about a millisecond's work."""
CHARS_PER_TOKEN_MAX: Final = 64
"""A prompt with more characters than this per token of context cannot fit, whatever the tokenizer."""
KEPT: Final = 16


class PromptMaker:
    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.manifest = manifest
        self.vocab_size = manifest.config.vocab_size
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, manifest_path: str, locate: Callable[[str], Path] = Path) -> PromptMaker:
        from model_loader.chat import ChatTemplate
        from model_loader.errors import LoaderError, StoreUnavailable
        from model_loader.manifest import Manifest
        from model_loader.tokenizer import Tokenizer

        try:
            manifest = Manifest.load(locate(manifest_path))
            tokenizer = Tokenizer.load(manifest.directory)
            template = None
            if manifest.chat_template is not None:
                template = ChatTemplate(manifest.chat_template, manifest.bos_token or "", manifest.eos_token or "")
        except StoreUnavailable as error:
            raise ObjectStoreUnavailable(f"the checkpoint's manifest cannot be had now: {error}") from error
        except LoaderError as error:
            raise ModelUnusable(f"the checkpoint's tokenizer cannot be used: {error}") from error
        return cls(manifest, tokenizer, template)

    async def prompts(self, request: GenerationRequest, context_tokens: int) -> tuple[tuple[int, ...], ...]:
        """The tokens of each prompt, every one of them within the context and the vocabulary."""
        nchars = _characters(request)
        if nchars > CHARS_PER_TOKEN_MAX * context_tokens:
            raise InvalidRequest(
                f"the input has {nchars} characters, more than any {context_tokens} tokens of context can hold",
                param=_input_name(request),
                code="context_length_exceeded",
            )
        if nchars > THREAD_CHARS:
            made = await asyncio.to_thread(self._make, request)
        else:
            made = self._make(request)
        for tokens in made:
            if not tokens:
                raise InvalidRequest("the prompt holds no token", param=_input_name(request))
        return made

    def _make(self, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        if request.messages:
            return (tuple(self._tokenizer.encode(self._render(request), add_special_tokens=False)),)
        made: list[tuple[int, ...]] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                made.append(tuple(self._tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)))
            else:
                self._check_ids("prompt", prompt)
                made.append(prompt)
        return tuple(made)

    def _render(self, request: GenerationRequest) -> str:
        from model_loader.errors import TemplateError

        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        try:
            return self._template.render(list(request.messages), add_generation_prompt=request.add_generation_prompt)
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None

    def _check_ids(self, name: str, ids: Any) -> None:
        if ids and max(ids) >= self.vocab_size:
            raise InvalidRequest(
                f"{name} has token id {max(ids)}, the vocabulary ends at {self.vocab_size - 1}", param=name
            )

    def text(self, tokens: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def sampling(self, wanted: SamplingRequest, prompt_tokens: int, context_tokens: int, seed: int) -> Sampling:
        """What the engine is asked: token limit resolved against the context, ids against the vocabulary."""
        self._check_ids("logit_bias", wanted.logit_bias)
        self._check_ids("stop_token_ids", wanted.stop_token_ids)
        room = context_tokens - prompt_tokens
        asked = wanted.max_tokens
        if room < 1 or (asked is not None and asked > room):
            answer = "" if asked is None else f" and {asked} for the answer"
            raise InvalidRequest(
                f"the model's context is {context_tokens} tokens; the request has {prompt_tokens} in its input{answer}",
                param="messages" if asked is None or room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        limit = room if asked is None else asked
        if wanted.min_tokens > limit:
            raise InvalidRequest(f"min_tokens is {wanted.min_tokens}; only {limit} tokens fit", param="min_tokens")
        return Sampling(
            seed=seed if wanted.seed is None else wanted.seed,
            max_tokens=limit,
            min_tokens=wanted.min_tokens,
            n=wanted.n,
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty,
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            logit_bias=wanted.logit_bias,
            stop=wanted.stop,
            stop_token_ids=wanted.stop_token_ids,
            ignore_eos=wanted.ignore_eos,
            logprobs=wanted.logprobs,
            grammar=wanted.grammar,
        )


class PromptMakers:
    """The makers of the checkpoints in use, by manifest path; each is loaded once however many ask."""

    def __init__(self) -> None:
        self._loading: OrderedDict[str, asyncio.Future[PromptMaker]] = OrderedDict()
        self.locate: Callable[[str], Path] = Path
        """Where a manifest lies on this machine; called in a thread."""

    async def get(self, manifest_path: str) -> PromptMaker:
        future = self._loading.get(manifest_path)
        if future is None:
            loading = asyncio.to_thread(lambda: PromptMaker.load(manifest_path, self.locate))
            future = asyncio.ensure_future(loading)
            self._loading[manifest_path] = future
            future.add_done_callback(lambda done: self._forget_failure(manifest_path, done))
            while len(self._loading) > KEPT:
                self._loading.popitem(last=False)
        elif future.done():
            self._loading.move_to_end(manifest_path)
            return future.result()
        return await asyncio.shield(future)

    def _forget_failure(self, manifest_path: str, done: asyncio.Future[PromptMaker]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._loading.pop(manifest_path, None)


def _input_name(request: GenerationRequest) -> str:
    return "messages" if request.messages else "prompt"


def _characters(request: GenerationRequest) -> int:
    total = 0
    for message in request.messages:
        total += len(message["content"]) + 16
    for prompt in request.prompts:
        total += len(prompt) * (1 if isinstance(prompt, str) else 0)
    return total
