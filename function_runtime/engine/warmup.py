"""What a process can do before it knows its checkpoint: start the threads, fault in the code every model runs.

Limits: for workers that wait, after the fork; a template must not call it.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from function_runtime.engine.matrix import Matrix, hire
from function_runtime.engine.memory import keep_freed_memory
from function_runtime.engine.models.norm import RmsNorm
from function_runtime.engine.models.rope import Rotation


def warm_up(threads: int = 0) -> None:
    keep_freed_memory()
    crew = hire(threads or len(os.sched_getaffinity(0)), torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        matrix, norm = Matrix(torch.ones(256, 2048), crew), RmsNorm(torch.ones(256), 1e-5)
        slots = torch.zeros(2, 64, 64)
        for count in (8, 1):
            hidden = matrix(norm(torch.ones(count, 256)))
            hidden = F.silu(hidden[:, :1024]) * hidden[:, 1024:]
            rotate = Rotation(torch.ones(32), torch.arange(count), torch.float32)
            heads = rotate(hidden[:, :512].view(count, 8, 64))
            slots.index_copy_(1, torch.arange(count), heads[:, :2].transpose(0, 1))
            mixed = heads.view(count, 2, 4, 64).permute(1, 2, 0, 3)
            keys = slots[:, :count].unsqueeze(1).expand(-1, 4, -1, -1)
            F.scaled_dot_product_attention(mixed, keys, keys, is_causal=count > 1)
            hidden.index_select(0, torch.tensor([0])).max(dim=-1)
