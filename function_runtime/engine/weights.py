"""A prepared checkpoint as tensors: on CPUs the mapping itself, on other devices a copy.

Limits: the mapping is read-only, and torch cannot know; nothing in the engine writes to a weight.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from model_loader.prepared import PreparedFile

_RAW: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def map_weights(prepared: Path | PreparedFile, device: torch.device) -> dict[str, Tensor]:
    file = prepared if isinstance(prepared, PreparedFile) else PreparedFile.open(prepared, verify=False)
    weights: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        names = file.keys()
        for name in names:
            tensor = torch.from_numpy(file.tensor(name))
            raw = _RAW.get(file.info(name).dtype)
            if raw is not None:
                tensor = tensor.view(raw)
            weights[name] = tensor if device.type == "cpu" else tensor.to(device)
    return weights
