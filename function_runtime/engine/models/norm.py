"""RMS normalisation, in as few operations as torch allows.

In float32 the root of the mean square is `hypot(length, sqrt(n * eps)) / sqrt(n)`: a norm, a hypot, a division and a
product, a third of what the general operation was measured to take on one row. Limits: other dtypes take the latter.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


class RmsNorm:
    __slots__ = ("_eps", "_floor", "_scaled", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self._weight = weight
        self._eps = eps
        self._scaled: Tensor | None = None
        """Made at the first use: the weight may still be on its way."""
        self._floor = torch.tensor(math.sqrt(size * eps), dtype=weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        if self._scaled is None:
            self._scaled = self._weight * math.sqrt(self._weight.shape[0])
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.div(x, torch.hypot(length, self._floor)).mul_(self._scaled)
