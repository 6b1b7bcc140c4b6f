"""Weights onto a device while they arrive: through a ring of pinned memory, on a stream of their own, in groups.

    mapping -> (copy) -> a slot of the ring -> (copy stream) -> device tensors -> an event per group

One thread fills slots in the order the model needs the groups; a slot is filled again when the copy out of it is over.
The model's stream waits for a group's event, the host only until that event has been recorded. The ring belongs to the
worker, as the device's context does, and is given up with the last group. Limits: one device; the rate of one thread's
copies into pinned memory.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from model_loader.prepared import PreparedFile
from model_loader.prepared_layout import PreparedTensor

SLOT_BYTES: Final = 16 * 1024 * 1024
SLOTS: Final = 4
_TYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LOOK_S: Final = 0.25


class Event(Protocol):
    def synchronize(self) -> None:
        """The host waits for it."""
        ...


class Device(Protocol):
    """What is asked of a device and its stream of copies."""

    def empty(self, nbytes: int) -> Tensor: ...
    def pinned(self, nbytes: int) -> Tensor: ...
    def copy(self, to: Tensor, pinned: Tensor) -> None:
        """Queued on the stream of copies."""
        ...

    def record(self) -> Event:
        """After everything queued so far."""
        ...

    def hold_up(self, event: Event) -> None:
        """What is computed from now on comes after `event`."""
        ...


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, to: Tensor, pinned: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(pinned, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def hold_up(self, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(event)


class Staging:
    """`tensors` are on the device at once; `wait` says when what is in them is."""

    def __init__(self, file: PreparedFile, device: Device, *, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self._file = file
        self._device = device
        self._slot_bytes = slot_bytes
        self._slots = slots
        names = file.keys()
        infos = {name: file.info(name) for name in names}
        self._raw = {name: device.empty(info.nbytes) for name, info in infos.items()}
        self.tensors: Mapping[str, Tensor] = {name: _shaped(self._raw[name], info) for name, info in infos.items()}
        self._members = [[name for name in names if infos[name].group == g] for g in range(len(file.groups))]
        self._recorded: list[Event | None] = [None] * len(file.groups)
        self._news = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._copy_all, name="staging", daemon=True)
        self._thread.start()

    def wait(self, group: int, while_waiting: Callable[[], None] | None = None) -> None:
        with self._news:
            while self._recorded[group] is None:
                if self._error is not None:
                    raise self._error
                self._news.wait(_LOOK_S)
                if while_waiting is not None:
                    while_waiting()
            event = self._recorded[group]
        if event is not None:
            self._device.hold_up(event)

    def _copy_all(self) -> None:
        try:
            ring = [self._device.pinned(self._slot_bytes) for _ in range(self._slots)]
            used: list[Event | None] = [None] * self._slots
            at = 0
            for group, names in enumerate(self._members):
                self._file.wait(group)
                for name in names:
                    source = _bytes_of(self._file, name)
                    for begin in range(0, source.numel(), self._slot_bytes):
                        slot, before = ring[at], used[at]
                        if before is not None:
                            before.synchronize()
                        piece = source[begin : begin + self._slot_bytes]
                        slot[: piece.numel()].copy_(piece)
                        self._device.copy(self._raw[name][begin : begin + piece.numel()], slot[: piece.numel()])
                        used[at] = self._device.record()
                        at = (at + 1) % self._slots
                self._tell(group, self._device.record())
            for event in used:
                if event is not None:
                    event.synchronize()
        except BaseException as error:
            with self._news:
                self._error = error
                self._news.notify_all()

    def _tell(self, group: int, event: Event) -> None:
        with self._news:
            self._recorded[group] = event
            self._news.notify_all()


def _bytes_of(file: PreparedFile, name: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(file.raw(name), dtype=torch.uint8)


def _shaped(raw: Tensor, info: PreparedTensor) -> Tensor:
    values = raw.view(_TYPES[info.dtype])
    return values.view(info.shape[::-1]).t() if info.by_columns else values.view(info.shape)
