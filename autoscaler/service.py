"""How fast one replica serves: the seconds of an engine step by what runs in it, and what follows for requests.

A step computes one token for each running request; prompts are prefilled first, one after another, and steps pause
meanwhile (as vLLM's and Stoker's schedulers do). So n requests at once each occupy a place for n prefills and their own
output's steps. Limits: prefill is taken as linear in tokens; what a prefix cache saves is for the caller to subtract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """`running` counts the request asked about."""

    prefill_tokens_per_s: float
    step_base_s: float
    """Of a step, whatever is in it: weights are read once."""
    step_per_request_s: float
    step_per_context_token_s: float = 0.0
    """For each token of context that any running request attends to."""
    max_requests: int = 32
    kv_tokens: int = 0
    """Tokens of KV that fit; 0: not a limit."""
    devices: int = 1

    def step_s(self, running: int, context_tokens: int = 0) -> float:
        return (
            self.step_base_s
            + self.step_per_request_s * max(running, 1)
            + self.step_per_context_token_s * context_tokens
        )

    def first_token_s(self, prompt_tokens: int, running: int = 1) -> float:
        """From being admitted among `running` that decode to the first token, if no other prompt is ahead."""
        return prompt_tokens / self.prefill_tokens_per_s + self.step_s(running, running * prompt_tokens)

    def service_s(self, prompt_tokens: int, output_tokens: int, running: int = 1) -> float:
        """Seconds a request occupies a place while `running` like it do: during its stay each of the other places is
        taken anew once, and prefilled."""
        running = max(running, 1)
        context = running * (prompt_tokens + output_tokens // 2)
        prefill_s = prompt_tokens / self.prefill_tokens_per_s
        return running * prefill_s + max(output_tokens, 1) * self.step_s(running, context)

    def full_batch(self, prompt_tokens: int, output_tokens: int) -> int:
        """Requests like this one that run at once at most."""
        if self.kv_tokens <= 0:
            return self.max_requests
        return max(min(self.max_requests, self.kv_tokens // max(prompt_tokens + output_tokens, 1)), 1)

    def full_batch_device_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """The least device-seconds this request can be served with: its share of replicas that are always full."""
        batch = self.full_batch(prompt_tokens, output_tokens)
        return self.devices * self.service_s(prompt_tokens, output_tokens, batch) / batch

    @staticmethod
    def fitted(
        samples: Sequence[tuple[int, int, float]],
        *,
        max_requests: int = 32,
        kv_tokens: int = 0,
        devices: int = 1,
    ) -> ServiceModel | None:
        """The model that fits measured steps best: (running, tokens, seconds), `tokens` counting one for each request
        that decoded and every prompt token prefilled in the step. None: too few, or all alike.

        Non-negative least squares by the active set (Lawson and Hanson, 1974, chapter 23; three unknowns): a
        coefficient that comes out negative is held at zero. Without steps that prefilled, prefill is taken to be as
        fast as the tokens of a full batch.
        """
        import numpy as np

        if len(samples) < 8:
            return None
        measured = np.asarray(samples, dtype=np.float64)
        running, tokens, seconds = measured[:, 0], measured[:, 1], measured[:, 2]
        columns = np.stack([np.ones_like(running), running, np.maximum(tokens - running, 0.0)], axis=1)
        # Relative errors: a long prefill must not drown a thousand short steps.
        weights = 1.0 / np.maximum(seconds, 1e-9)
        scale = np.maximum(np.abs(columns).max(axis=0), 1e-12)
        passive = [index for index in range(3) if columns[:, index].any()]
        found = np.zeros(3)
        while passive:
            part = columns[:, passive] / scale[passive] * weights[:, None]
            solved, _, rank, _ = np.linalg.lstsq(part, seconds * weights, rcond=None)
            if rank < len(passive):
                passive.pop()
                continue
            worst = int(np.argmin(solved))
            if solved[worst] >= 0:
                found[passive] = solved / scale[passive]
                break
            passive.pop(worst)
        if not found[0] + found[1] > 0:
            return None
        step_full_s = float(found[0] + found[1] * max_requests)
        per_token_s = float(found[2]) if found[2] > 0 else step_full_s / max_requests
        return ServiceModel(1.0 / per_token_s, float(found[0]), float(found[1]), 0.0, max_requests, kv_tokens, devices)
