"""Times as the API writes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def now() -> datetime:
    return datetime.now(UTC)


def stamp(at: datetime | None = None) -> str:
    """Whole seconds (metav1.Time)."""
    return (at or now()).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(at: datetime | None = None) -> str:
    """metav1.MicroTime."""
    return (at or now()).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read(text: str) -> datetime:
    return datetime.fromisoformat(text)


def seconds_since(text: str) -> float:
    return (now() - read(text)).total_seconds()


def age(text: str | None) -> str:
    """As `kubectl get` shows it (`apimachinery/pkg/util/duration`, HumanDuration)."""
    if not text:
        return "<unknown>"
    passed = timedelta(seconds=max(int(seconds_since(text)), 0))
    seconds = int(passed.total_seconds())
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    return f"{days}d"
