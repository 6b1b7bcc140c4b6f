"""A service whose slots are pods that run: from zero to an answer, an eviction under a stream, and zero again, with the
rights of the chart and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kubernetes.town import POOL, Town, town
from tests.support.checkpoints import make_tiny_llama

pytestmark = pytest.mark.e2e

TOKENS = 300
BODY = {"model": "fn", "prompt": list(range(20, 120)), "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
        "stream": True, "logprobs": 0}  # fmt: skip


def stream(place: Town, act: Callable[[], None] | None = None) -> tuple[str, list[int], str]:
    """Text, places and id of the answer; `act` is called once a quarter of it has come."""
    text, places, request_id = "", list[int](), ""
    for at, event in place.service.events("/v1/completions", BODY):
        assert "error" not in event, (event, place.service.tail())
        request_id = event["id"]
        places.append(at)
        text += "".join(choice["text"] for choice in event["choices"])
        if act is not None and at >= TOKENS // 4:
            act, _ = None, act()
    return text, places, request_id


def test_pods_come_are_lost_under_a_stream_and_go_again(tmp_path: Path) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny", layers=2, hidden=64)
    # No grace: what half of an answer takes is not to be within it.
    with town(tmp_path, {**POOL, "graceSeconds": 0}) as place:
        options = {"threads": 1, "kv_bytes": 32 << 20}
        place.service.deploy("fn", f"file://{checkpoint}", scaling={"keep_alive": 5}, engine_options=options)
        assert place.pods() == [], "nobody called it yet"
        whole, places, _ = stream(place)
        assert places == list(range(1, TOKENS + 1))
        assert len(place.pods()) == 1

        first = place.name_of_slot()
        text, places, request_id = stream(place, lambda: place.cluster.api.evict(first))
        assert (text, places) == (whole, list(range(1, TOKENS + 1)))
        attempts = place.service.call("GET", f"/api/v1/why/{request_id}")["attempts"]
        assert len(attempts) == 2 and place.name_of_slot() != first

        place.cluster.wait(lambda: place.pods() == [], "zero is zero: no slot is left", 60)
