"""The demo's voice and memory: what it says as it goes, what it promised, and whether that held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Story:
    """Tells, and remembers what was promised and whether it held."""

    quiet: bool
    promises: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def say(self, text: str = "", end: str = "\n") -> None:
        if not self.quiet:
            print(text, end=end, flush=True)

    def chapter(self, title: str) -> None:
        self.say(f"\n== {title}")

    def check(self, promise: str, kept: bool, detail: str = "") -> None:
        self.promises.append({"promise": promise, "kept": kept, "detail": detail})
        self.say(f"   {'✓' if kept else '✗ BROKEN:'} {promise}{f' ({detail})' if detail else ''}")

    @property
    def broken(self) -> list[dict[str, Any]]:
        return [item for item in self.promises if not item["kept"]]
