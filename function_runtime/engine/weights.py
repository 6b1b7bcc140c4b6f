"""A prepared checkpoint as tensors: on CPUs the mapping itself, on other devices copies; both may still be arriving.

The model asks `Arrival` for each group (embedding, layers, norm and head) before it computes with it, and is held up
only at the layer that is not there yet; once everything is, nobody asks any more. Limits: the mapping is read-only, and
torch cannot know; nothing in the engine writes to a weight.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from function_runtime.engine.staging import CudaDevice, Staging
from model_loader.prepared import PreparedFile

_RAW: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Groups(Protocol):
    """What can be waited for, group by group. Raises what kept it."""

    def wait(self, group: int, while_waiting: Callable[[], None] | None = None) -> None: ...


@dataclass(slots=True)
class Arrival:
    """Weights on their way to one model, and what they cost it."""

    source: Groups
    groups: int
    while_waiting: Callable[[], None] | None = None
    asked_ns: dict[int, int] = field(default_factory=dict)
    """When the model first came to need a group, on the machine's monotonic clock: what comes before it was computed
    by then."""
    waited_ns: int = 0
    """Since somebody took it."""

    def wait(self, group: int) -> None:
        begin_ns = time.monotonic_ns()
        self.asked_ns.setdefault(group, begin_ns)
        self.source.wait(group, self.while_waiting)
        self.waited_ns += time.monotonic_ns() - begin_ns

    def take_waited_s(self) -> float:
        waited_ns, self.waited_ns = self.waited_ns, 0
        return waited_ns / 1e9


@dataclass(frozen=True, slots=True)
class Weights:
    tensors: Mapping[str, Tensor]
    arrival: Arrival | None
    """None: they are all there."""


def map_weights(prepared: Path | PreparedFile, device: torch.device) -> Weights:
    """Touches no byte of a tensor that may be on its way."""
    file = prepared if isinstance(prepared, PreparedFile) else PreparedFile.open_arriving(prepared)
    is_here = file.board is None or file.board.is_complete
    if device.type == "cpu":
        arrival = None if is_here else Arrival(file, len(file.groups))
        return Weights({name: _mapped(file, name) for name in file.keys()}, arrival)  # noqa: SIM118
    staging = Staging(file, CudaDevice(device))
    return Weights(staging.tensors, Arrival(staging, len(file.groups)))


def _mapped(file: PreparedFile, name: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(file.tensor(name)).view(_RAW[file.info(name).dtype])
