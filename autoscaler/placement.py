"""Where work goes: expected seconds to the first token for every home, the least of them, and the runner-up.

Two questions with one answer type: `place_request` chooses among ready replicas, `place_replica` among slots.
Expected seconds = queue + weights from the best tier + min(prefill, load of stored KV). Limits: link and device
contention, and load predicted for the horizon, are not modelled yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Placement:
    choice: str
    """Replica or slot id."""
    expected_s: float
    reason: str
    runner_up: str | None = None
    runner_up_s: float | None = None
    inputs: dict[str, dict[str, float | int | str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaHome:
    """A ready replica as a home for a request."""

    replica_id: str
    in_flight: int
    max_requests: int
    step_s: float = 0.05
    """Measured seconds of an engine step."""
    prefill_tokens_per_s: float = 500.0
    cached_tokens: int = 0
    """Tokens of this prompt whose KV the replica is believed to hold."""


@dataclass(frozen=True, slots=True)
class SlotHome:
    """A slot as a home for a new replica."""

    slot_id: str
    replicas: int
    free_bytes: int
    needed_bytes: int
    warm_workers: int
    weights_in_pool: bool
    prepare_s: float = 1.0
    """Measured (or estimated) seconds to make the prepared form when the pool lacks it."""
    start_s: float = 0.1
    """Measured seconds from a warm worker to ready."""
    fork_s: float = 1.5
    """Measured seconds when no worker waits."""


def _best(scores: list[tuple[float, str, dict[str, float | int | str]]], reason: str) -> Placement | None:
    if not scores:
        return None
    scores.sort(key=lambda score: (score[0], score[1]))
    first = scores[0]
    second = scores[1] if len(scores) > 1 else None
    return Placement(
        choice=first[1],
        expected_s=first[0],
        reason=reason,
        runner_up=second[1] if second else None,
        runner_up_s=second[0] if second else None,
        inputs={name: inputs for _, name, inputs in scores[:4]},
    )


def place_request(prompt_tokens: int, stored_kv_s: float | None, homes: Sequence[ReplicaHome]) -> Placement | None:
    """The ready replica with room where the first token comes soonest; None: none has room.

    `stored_kv_s`: seconds to load this request's stored KV, or None if there is none.
    """
    scores: list[tuple[float, str, dict[str, float | int | str]]] = []
    for home in homes:
        if home.in_flight >= home.max_requests:
            continue
        queue_s = home.in_flight * home.step_s
        prefill_s = max(prompt_tokens - home.cached_tokens, 1) / home.prefill_tokens_per_s
        kv_s = prefill_s if stored_kv_s is None else min(prefill_s, stored_kv_s)
        inputs: dict[str, float | int | str] = {
            "in_flight": home.in_flight,
            "queue_s": round(queue_s, 4),
            "prefill_s": round(prefill_s, 4),
            "cached_tokens": home.cached_tokens,
        }
        scores.append((queue_s + kv_s, home.replica_id, inputs))
    return _best(scores, "least expected seconds to the first token")


def place_replica(homes: Sequence[SlotHome]) -> Placement | None:
    """The slot where a new replica is ready soonest; None: the memory of none suffices."""
    scores: list[tuple[float, str, dict[str, float | int | str]]] = []
    for home in homes:
        if home.free_bytes < home.needed_bytes:
            continue
        weights_s = 0.0 if home.weights_in_pool else home.prepare_s
        worker_s = home.start_s if home.warm_workers > 0 else home.fork_s
        inputs: dict[str, float | int | str] = {
            "weights_s": round(weights_s, 4),
            "worker_s": round(worker_s, 4),
            "replicas": home.replicas,
            "warm_workers": home.warm_workers,
            "tier": "pool" if home.weights_in_pool else "disk",
        }
        # Preparing and forking overlap; a slot that already runs replicas shares its cores.
        scores.append((max(weights_s, worker_s) * (1 + 0.1 * home.replicas), home.slot_id, inputs))
    return _best(scores, "least expected seconds to a ready replica")
