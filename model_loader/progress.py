"""Progress of long work, and how a subprocess tells it: one JSON object a line on stdout.

`{"event":"progress","stage","done_bytes","total_bytes"}` while it works, then one of `{"event":"done",...}` and
`{"event":"error","code","message","retry"}` (exit status 1). Reports are thinned to one per `MIN_INTERVAL_S`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from model_loader.errors import LoaderError, from_os_error

MIN_INTERVAL_S: Final = 0.05
LEFT: Final = "left"
"""The stage that says that what was arriving will not come, and that another way is tried."""


@dataclass(frozen=True, slots=True)
class Progress:
    stage: str
    """resolve | check | waiting | download | fetch | extract | read | arriving | left | prepare | verify"""
    done_bytes: int
    total_bytes: int
    """0 where it is not known."""
    path: str = ""
    """Of `arriving`: the temporary name under which the form can be mapped from now on."""


class Reporter:
    """Counts bytes from any thread and reports now and then."""

    def __init__(self, stage: str, total_bytes: int, report: Callable[[Progress], None] | None) -> None:
        self._stage, self.total_bytes, self._report = stage, total_bytes, report
        self._done_bytes = 0
        self._last_s = 0.0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._report is None:
            return
        with self._lock:
            self._done_bytes += nbytes
            now_s = time.monotonic()
            if now_s - self._last_s >= MIN_INTERVAL_S:
                self._last_s = now_s
                self._report(Progress(self._stage, self._done_bytes, self.total_bytes))

    def finish(self) -> None:
        if self._report is not None:
            self._report(Progress(self._stage, self._done_bytes, self.total_bytes))


def say_event(event: Mapping[str, object]) -> None:
    """One line of a subprocess's answer; from the thread that reports only."""
    sys.stdout.write(json.dumps(event, ensure_ascii=True) + "\n")
    sys.stdout.flush()


def run_reporting(work: Callable[[Callable[[Progress], None]], Mapping[str, object]]) -> int:
    """Runs `work` as the body of a subprocess; gives the exit status."""

    def report(progress: Progress) -> None:
        say_event({
            "event": "progress",
            "stage": progress.stage,
            "done_bytes": progress.done_bytes,
            "total_bytes": progress.total_bytes,
            **({"path": progress.path} if progress.path else {}),
        })  # fmt: skip

    try:
        result = work(report)
        say_event({"event": "done", **result})
        return 0
    except BrokenPipeError:
        # Whoever asked is gone; nobody reads the outcome.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except LoaderError as error:
        say_event({"event": "error", "code": error.code, "message": str(error), "retry": error.retry})
    except OSError as error:
        known = from_os_error(error, error.filename or "the model")
        say_event({"event": "error", "code": known.code, "message": str(known), "retry": known.retry})
    return 1
