"""What has run on a slot lately, as its windows tell, for `GET /api/v1/slots`.

    requests given to its replicas, most and mean at once, tokens, KV in use, seconds to first tokens and between tokens

Limits: known to the gateway that leads; requests that wait for a replica are no slot's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from control_plane.load_meter import WINDOW_S

if TYPE_CHECKING:
    from control_plane.observations import Observations

SPANS_S: Final = {"minute": 60, "hour": 3600}
_TOLD: Final = {
    "requests": "arrivals",
    "most_at_once": "peak_concurrency",
    "mean_at_once": "mean_concurrency",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "most_waiting_in_a_replica": "peak_queue",
    "kv_used_share": "kv_used_share",
}


def slot_load(observations: Observations, slot_id: str, wall_s: float) -> dict[str, Any] | None:
    """Of the last whole windows; None: nothing has run there that is known of."""
    load = observations.on_slot(slot_id)
    if load is None:
        return None
    until_s = wall_s // WINDOW_S * WINDOW_S
    return {name: _within(load.history.total, until_s - span_s, until_s) for name, span_s in SPANS_S.items()}


def _within(total: Any, since_s: float, until_s: float) -> dict[str, float | None]:
    def of(name: str) -> float:
        return float(total(name, WINDOW_S, since_s, until_s))

    def mean(name: str, count: str) -> float | None:
        number = of(count)
        return round(of(name) / number, 6) if number else None

    return {
        **{told: round(of(name), 6) for told, name in _TOLD.items()},
        "first_token_s": mean("first_token_s_sum", "first_token_count"),
        "token_s": mean("token_s_sum", "token_count"),
    }
