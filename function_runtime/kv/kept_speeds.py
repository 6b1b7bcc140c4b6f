"""Speeds that outlive the replica that measured them: a slot's next replica expects of store and device what was so.

    speeds/store-HASH.json    latency, bandwidth           of one store, seen from this slot
    speeds/model-HASH.json    prefill and decode           of one checkpoint on one kind of device, in one dtype

Written whole or not at all. What was measured long ago counts less: it fades into the prior by half in `STORE_HALF_S`
or `MODEL_HALF_S`. Limits: a file that is damaged, of another version or of the future is none; whichever replica wrote
last is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from function_runtime.kv.speeds import Measured, Speeds

VERSION: Final = 1
STORE_HALF_S: Final = 3600.0
MODEL_HALF_S: Final = 7 * 24 * 3600.0
SAVE_EVERY_S: Final = 5.0
_FUTURE_S: Final = 60.0
_STORE: Final = ("latency_s", "bytes_per_s")
_MODEL: Final = ("prefill_s", "prefill_position_s", "decode_s", "decode_position_s")
_LEAST, _MOST = 1e-15, 1e15


class KeptSpeeds:
    def __init__(self, folder: Path, store: str, model: str, clock: Callable[[], float] = time.time) -> None:
        """`store`, `model`: what names them, however long. `clock`: seconds since 1970."""
        self._store = folder / f"store-{_name(store)}.json"
        self._model = folder / f"model-{_name(model)}.json"
        self._clock = clock
        self._saved_s = 0.0

    def follow(self, measured: Measured) -> None:
        """What is kept is expected from here on, and what is read is measured and kept, now and then: a replica may be
        killed at any time."""
        measured.expect(self.load(measured.speeds))
        measured.after_read = lambda: self._tend(measured)
        self._saved_s = time.monotonic()

    def _tend(self, measured: Measured) -> None:
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self.keep(measured)

    def keep(self, measured: Measured) -> None:
        self._saved_s = time.monotonic()
        self.save(measured.speeds, store=measured.has_read, model=measured.has_computed)

    def load(self, prior: Speeds) -> Speeds:
        found = _faded(self._read(self._store, _STORE), _STORE, prior, STORE_HALF_S)
        return _faded(self._read(self._model, _MODEL), _MODEL, found, MODEL_HALF_S)

    def save(self, speeds: Speeds, *, store: bool, model: bool) -> None:
        """`store`, `model`: which of them were measured. What cannot be written costs the next replica a guess."""
        for path, names, is_measured in ((self._store, _STORE, store), (self._model, _MODEL, model)):
            if is_measured:
                self._write(path, {name: getattr(speeds, name) for name in names})

    def _read(self, path: Path, names: tuple[str, ...]) -> tuple[float, dict[str, float]] | None:
        """Age in seconds, and values."""
        try:
            content = json.loads(path.read_text())
            values = {name: float(content["values"][name]) for name in names}
            age_s = self._clock() - float(content["at_s"])
            version = content["version"]
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
        sound = all(0 <= value < _MOST for value in values.values()) and values.get("bytes_per_s", 1.0) > 0
        if version != VERSION or not sound or not -_FUTURE_S <= age_s < math.inf:
            return None
        return max(age_s, 0.0), values

    def _write(self, path: Path, values: dict[str, float]) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"version": VERSION, "at_s": self._clock(), "values": values}))
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _faded(
    found: tuple[float, dict[str, float]] | None, names: tuple[str, ...], prior: Speeds, half_s: float
) -> Speeds:
    if found is None:
        return prior
    age_s, values = found
    share = 0.5 ** (age_s / half_s)

    def mixed(name: str) -> float:
        kept, before = max(values[name], _LEAST), max(float(getattr(prior, name)), _LEAST)
        return math.exp(share * math.log(kept) + (1 - share) * math.log(before))

    return replace(prior, **{name: mixed(name) for name in names})  # type: ignore[arg-type]
