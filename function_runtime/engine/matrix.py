"""A weight matrix `[inputs, outputs]`, and rows times it, by whatever multiplies fastest here.

float32 on a CPU where numpy's OpenBLAS was measured to be faster goes through a crew, on the same memory; all else
through torch. Limits: the choice is made once per matrix; each gives the same result for the same rows, but its own.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from function_runtime.engine import openblas
from function_runtime.engine.crew import Crew, Floats


class Matrix:
    __slots__ = ("_array", "_crew", "tensor")

    def __init__(self, tensor: Tensor, crew: Crew | None) -> None:
        self.tensor = tensor
        self._crew = crew
        self._array: Floats | None = tensor.numpy() if crew is not None else None

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._crew is not None and self._array is not None:
            product = torch.empty(rows.shape[0], self.tensor.shape[1])
            self._crew.multiply(rows.numpy(), self._array, product.numpy())
        else:
            product = torch.mm(rows, self.tensor)
        return product if bias is None else product.add_(bias)


def hire(threads: int, dtype: torch.dtype, device: torch.device) -> Crew | None:
    """A crew, where it is the faster way. `threads` is how many torch uses in this process from now on, too.

    NOTE: the threads of torch must not spin between its operations (OMP_WAIT_POLICY=passive, set before torch is
    loaded), or every product waits for a core.
    """
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if dtype is not torch.float32 or device.type != "cpu" or not openblas.is_faster():
        return None
    return _crew(threads)


@cache
def _crew(threads: int) -> Crew:
    """One for the process: what waited for a checkpoint before is what multiplies after."""
    return Crew(threads)
