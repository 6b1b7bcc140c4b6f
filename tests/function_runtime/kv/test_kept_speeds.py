"""A slot's next replica expects what the last one measured, the less the longer ago, and nothing from damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from function_runtime.kv import kept_speeds
from function_runtime.kv.kept_speeds import MODEL_HALF_S, STORE_HALF_S, KeptSpeeds
from function_runtime.kv.speeds import PRIOR, Measured

SLOW = replace(PRIOR, latency_s=0.5, bytes_per_s=2e6, prefill_s=0.01, decode_s=0.2)


class Slot:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 1e9

    def kept(self, store: str = "s3://bucket/a", model: str = "m cpu float32 2") -> KeptSpeeds:
        return KeptSpeeds(self.folder, store, model, lambda: self.now_s)


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    return Slot(tmp_path / "speeds")


def test_speeds_are_kept_by_store_and_by_model(slot: Slot) -> None:
    assert slot.kept().load(PRIOR) == PRIOR
    slot.kept().save(SLOW, store=True, model=True)
    found = slot.kept().load(PRIOR)
    assert found.latency_s == pytest.approx(0.5) and found.prefill_s == pytest.approx(0.01)
    other = slot.kept(store="file:///elsewhere").load(PRIOR)
    assert other.latency_s == PRIOR.latency_s and other.prefill_s == pytest.approx(0.01)
    assert slot.kept(model="m cuda bfloat16 8").load(PRIOR).prefill_s == PRIOR.prefill_s


def test_what_was_not_measured_is_not_kept(slot: Slot) -> None:
    slot.kept().save(SLOW, store=False, model=True)
    assert slot.kept().load(PRIOR).latency_s == PRIOR.latency_s


def test_what_was_measured_long_ago_fades_into_the_prior(slot: Slot) -> None:
    slot.kept().save(SLOW, store=True, model=True)
    slot.now_s += STORE_HALF_S
    found = slot.kept().load(PRIOR)
    assert found.bytes_per_s == pytest.approx((2e6 * PRIOR.bytes_per_s) ** 0.5)
    assert found.prefill_s == pytest.approx(SLOW.prefill_s, rel=0.05)
    slot.now_s += 20 * MODEL_HALF_S
    assert slot.kept().load(PRIOR).prefill_s == pytest.approx(PRIOR.prefill_s, rel=0.01)


def damaged(text: str) -> list[str]:
    content = json.loads(text)
    values = content["values"]
    wrong = [
        {**content, "version": 2},
        {**content, "at_s": content["at_s"] + 1e6},
        {**content, "at_s": "soon"},
        {**content, "values": {name: -value for name, value in values.items()}},
        {**content, "values": dict.fromkeys(values, "x")},
        {**content, "values": {}},
    ]
    return ["", "[]", "{", text[: len(text) // 2], text.replace("0.5", "NaN").replace("0.01", "1e999")] + [
        json.dumps(item) for item in wrong
    ]


def test_damage_is_no_speed(slot: Slot) -> None:
    slot.kept().save(SLOW, store=True, model=True)
    paths = sorted(slot.folder.iterdir())
    assert len(paths) == 2, "and nothing temporary is left"
    whole = {path: path.read_text() for path in paths}
    for number in range(len(damaged(whole[paths[0]]))):
        for path in paths:
            path.write_text(damaged(whole[path])[number])
        assert slot.kept().load(PRIOR) == PRIOR, number


def test_a_place_that_cannot_be_written_to_costs_nothing_else(slot: Slot) -> None:
    slot.folder.write_text("not a folder")
    slot.kept().save(SLOW, store=True, model=True)
    assert slot.kept().load(PRIOR) == PRIOR


def test_a_replica_begins_with_what_the_one_before_it_measured(slot: Slot) -> None:
    first = Measured()
    slot.kept().follow(first)
    for _ in range(10):
        first.read(10_000_000, 1, 5.0)
        first.prefilled(0, 100, 3.0)
        first.decoded(100, 0.3)
    slot.kept().keep(first)
    second = Measured()
    slot.kept().follow(second)
    assert float(second.speeds.reading_s(10_000_000, 1)) == pytest.approx(5.0, rel=0.1)
    assert second.speeds.prefill_s > 10 * PRIOR.prefill_s
    assert not second.has_read, "what was measured by others is not measured again"


def test_what_is_read_is_kept_without_waiting_for_the_end(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_speeds, "SAVE_EVERY_S", -1.0)
    killed = Measured()
    slot.kept().follow(killed)
    for _ in range(5):
        killed.read(10_000_000, 1, 5.0)
    assert float(slot.kept().load(PRIOR).reading_s(10_000_000, 1)) == pytest.approx(5.0, rel=0.1)
