"""What computes here, in a few words: engines of equal words give equal bits for equal passes.

Engine format, device, what multiplies on it, dtype, and the releases of the libraries. Limits: of processors the
instruction set and, where numpy's OpenBLAS multiplies, its name; a microcode's own ways are not seen.
"""

from __future__ import annotations

import numpy as np
import torch

from function_runtime.engine import openblas

ENGINE_FORMAT = "native-2"
"""How this engine fills KV; part of the identity of what it stores."""


def computed_by(device: torch.device, dtype: torch.dtype) -> str:
    numbers = str(dtype).removeprefix("torch.")
    library = f"torch {torch.__version__}"
    if device.type != "cpu":
        return f"{ENGINE_FORMAT}/{device.type}/{torch.cuda.get_device_name(device)}/{numbers}/{library}"
    if dtype is torch.float32 and openblas.is_faster():
        library += f", numpy {np.__version__}"
    return f"{ENGINE_FORMAT}/cpu/{torch.backends.cpu.get_cpu_capability()}/{numbers}/{library}"
