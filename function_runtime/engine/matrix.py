"""A weight matrix `[inputs, outputs]`, and rows times it, by whatever multiplies fastest here.

float32 on a CPU where numpy's OpenBLAS was measured to be faster goes through numpy, on the same memory; all else
through torch. Limits: the choice is made once per matrix; each gives the same result for the same rows, but its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from function_runtime.engine import openblas


class Matrix:
    __slots__ = ("_array", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        by_numpy = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and openblas.is_faster()
        self._array: Any = tensor.numpy() if by_numpy else None

    def __call__(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._array is not None:
            product = torch.from_numpy(rows.numpy() @ self._array)
        else:
            product = torch.mm(rows, self.tensor)
        return product if bias is None else product.add_(bias)


def use_threads(count: int) -> None:
    """Threads of both libraries in this process.

    NOTE: while both have threads, the ones of torch must not spin between its operations (OMP_WAIT_POLICY=passive, set
    before torch is loaded), or every product waits for a core.
    """
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    openblas.set_threads(count)
