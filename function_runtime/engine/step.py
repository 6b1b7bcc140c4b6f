"""One step's arithmetic: from a schedule to rows, through the model, to what was sampled.

Rows are decode rows, longest context first, then chunks. Logits are computed for the rows whose next token is not known
yet, and for all rows of a request if for any, so that a replay has the shapes of the first run. Limits: reads requests,
changes none; KV memory is what it writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from function_runtime.engine.attention.interface import Attention, Rows
from function_runtime.engine.emission import Emitter
from function_runtime.engine.models.llama import Llama
from function_runtime.engine.request import Choice, Request
from function_runtime.engine.restoring import Gate, Race
from function_runtime.engine.sampler import Row, Sampled, sample
from function_runtime.engine.scheduler import Chunk, Schedule, blocks_for


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a choice; None: its logits are not numbers."""

    request: Request
    choice: Choice
    sampled: Sampled | None


class StepRunner:
    def __init__(self, model: Llama, attention: Attention, emitter: Emitter, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._emitter = emitter
        self._device = device

    def run(self, schedule: Schedule, gate: Gate | Race | None = None) -> list[Drawn]:
        decodes = [(request, choice) for request, choices in schedule.decodes for choice in choices]
        decodes += [(chunk.request, chunk.choice) for chunk in schedule.chunks if chunk.is_step]
        decodes.sort(key=lambda pair: -pair[1].computed)
        chunks = [chunk for chunk in schedule.chunks if not chunk.is_step]
        sampling = {request.request_id for request, choices in schedule.decodes if _samples(request, choices)}
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        wanted: list[tuple[Request, Choice, int]] = []
        """Choice and the place of its logits among those computed."""
        for request, choice in decodes:
            index = choice.computed - len(request.prompt)
            if request.request_id in sampling:
                if choice.finish is None and index + 1 == len(choice.tokens):
                    wanted.append((request, choice, len(logit_rows)))
                logit_rows.append(len(tokens))
            tokens.append(choice.tokens[index] if index >= 0 else request.prompt[choice.computed])
            positions.append(choice.computed)
        for chunk in chunks:
            request = chunk.request
            own = request.known(chunk.choice)[chunk.start : chunk.end]
            # More rows than tokens: the shape is what matters, and nobody looks at those behind.
            tokens += own + [own[0]] * (chunk.rows - len(own))
            positions += range(chunk.start, chunk.end)
            first = [choice for choice in request.choices if choice.finish is None and not choice.tokens]
            if chunk.upto == len(request.prompt) and first:
                wanted += [(request, choice, len(logit_rows)) for choice in first]
                logit_rows.append(len(tokens) - 1 - (chunk.end - chunk.upto))
        plan = self._attention.plan(
            [Rows(choice.computed, choice.computed + 1, choice.blocks) for _, choice in decodes],
            [Rows(chunk.start, chunk.end, _table(chunk)) for chunk in chunks],
        )
        logits = self._model.forward(
            self._tensor(tokens),
            self._tensor(positions),
            self._attention,
            plan,
            self._tensor(logit_rows) if logit_rows else None,
            gate,
        )
        return self._draw(logits, wanted)

    def _draw(self, logits: Tensor | None, wanted: list[tuple[Request, Choice, int]]) -> list[Drawn]:
        if logits is None or not wanted:
            return []
        places = [place for _, _, place in wanted]
        if places != list(range(logits.shape[0])):
            logits = logits.index_select(0, self._tensor(places))
        rows: list[Row] = [self._emitter.row(request, choice) for request, choice, _ in wanted]
        return [
            Drawn(request, choice, sampled)
            for (request, choice, _), sampled in zip(wanted, sample(logits, rows), strict=True)
        ]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _table(chunk: Chunk) -> list[int]:
    """The choice's blocks; rows beyond them all write to its last one, which holds nothing that counts yet."""
    blocks = chunk.choice.blocks
    return blocks + [blocks[-1]] * (blocks_for(chunk.end) - len(blocks))


def _samples(request: Request, choices: list[Choice]) -> bool:
    prompt = len(request.prompt)
    return any(choice.finish is None and choice.computed - prompt + 1 == len(choice.tokens) for choice in choices)
