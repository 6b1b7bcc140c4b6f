"""`stoker up --slots 0..2`: no agent while nobody asks, one when somebody does, none again afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.service import Service

pytestmark = pytest.mark.e2e


def test_a_machine_without_slots_gets_one_for_a_request_and_gives_it_back(tmp_path: Path) -> None:
    checkpoint = make_tiny_llama(tmp_path / "tiny")
    env = {"STOKER_SLOT_HOLD_S": "1", "STOKER_WARM_WORKERS": "0"}
    with Service(tmp_path / "data", env=env, args=("--slots", "0..2")) as service:
        service.deploy("stub", f"file://{checkpoint}", engine="stub", scaling={"keep_alive": 1})
        assert service.call("GET", "/api/v1/slots")["data"] == []
        answer = service.call("POST", "/v1/completions", {"model": "stub", "prompt": "hello", "max_tokens": 3})
        assert answer["choices"][0]["text"]
        slots = service.call("GET", "/api/v1/slots")["data"]
        assert [slot["slot_id"] for slot in slots] == ["slot-0"]
        pid = slots[0]["agent_pid"]
        deadline = time.monotonic() + 15
        while service.call("GET", "/api/v1/slots")["data"]:
            assert time.monotonic() < deadline, "its slot is still there"
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()
