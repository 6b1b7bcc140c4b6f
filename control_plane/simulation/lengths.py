"""How long prompts and answers are, where a trace does not say: log-normal, from medians and spreads.

The default is fitted to `azure_llm_2023_conv` of the Azure LLM traces (logarithms' median and spread). Limits: prompt
and answer are independent, and all functions alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from control_plane.simulation.trace import Ints


@dataclass(frozen=True, slots=True)
class TokenLengths:
    prompt_p50: float = 1020.0
    prompt_sigma: float = 0.99
    output_p50: float = 129.0
    output_sigma: float = 0.86
    prompt_most: int = 32_768
    output_most: int = 4_096

    def drawn(self, requests: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Prompts and answers, at least one token each."""
        prompt = self.prompt_p50 * np.exp(self.prompt_sigma * rng.standard_normal(requests))
        output = self.output_p50 * np.exp(self.output_sigma * rng.standard_normal(requests))
        return (
            np.clip(np.rint(prompt), 1, self.prompt_most).astype(np.int32),
            np.clip(np.rint(output), 1, self.output_most).astype(np.int32),
        )

    def told(self) -> str:
        return (
            f"prompts log-normal around {self.prompt_p50:g} tokens (sigma {self.prompt_sigma:g}), "
            f"answers around {self.output_p50:g} (sigma {self.output_sigma:g})"
        )
