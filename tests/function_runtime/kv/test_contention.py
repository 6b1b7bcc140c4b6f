"""Weights and stored KV by one line: what is chosen is as quick as the better of loading and computing, all counted.

Simulated as in `test_steering`: the line is shared by connections, no pass ends before the weights are here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from function_runtime.kv.contention import Coming, ComingWeights
from function_runtime.kv.plan import Candidate, Costs, plan
from function_runtime.kv.speeds import Measured
from function_runtime.kv.steering import Steering
from function_runtime.kv.supply import Item, Order, Supply
from model_loader.pace import Pace
from model_loader.prepared import PreparedFile
from model_loader.prepared_layout import TensorPlan
from model_loader.prepared_writer import PreparedWriter
from model_loader.ranges.source import ReadStats, Tier
from tests.function_runtime.kv.test_steering import COMPUTING, TOKEN_BYTES, measured_of, prompt, resume, store

WEIGHTS_BYTES = 98e6


@pytest.mark.parametrize("tokens", [256, 536, 2048])
@pytest.mark.parametrize(
    ("megabytes_per_s", "believed_mb_s"), [(6, 0), (6, 200), (20, 0), (100, 0), (1000, 0), (1000, 50)]
)
def test_the_choice_is_within_a_tenth_of_the_better_with_weights_on_the_same_line(
    tokens: int, megabytes_per_s: float, believed_mb_s: float
) -> None:
    known, real = prompt(tokens), store(0.02, megabytes_per_s)
    measured = measured_of(store(0.02, believed_mb_s) if believed_mb_s else real)
    took = resume(known, real, measured, weights_bytes=WEIGHTS_BYTES)
    loaded = resume(known, real, measured_of(real), loads=True, weights_bytes=WEIGHTS_BYTES)
    costs = Costs(known, COMPUTING)
    weights_s = WEIGHTS_BYTES / real.bytes_per_s
    recomputed_s = Coming(weights_s, True).computed_s(costs.between(0, known.total), costs.between(0, min(512, tokens)))
    assert took.seconds <= 1.1 * min(loaded.seconds, recomputed_s)


def test_a_plan_that_does_not_know_of_the_weights_takes_the_line_from_them() -> None:
    known, real = prompt(2048), store(0.02, 6)
    unaware = resume(known, real, measured_of(real), weights_bytes=WEIGHTS_BYTES, knows_weights=False)
    aware = resume(known, real, measured_of(real), weights_bytes=WEIGHTS_BYTES)
    assert aware.seconds < 0.9 * unaware.seconds
    quick, known = store(0.02, 1000), prompt(536)
    took = resume(known, quick, measured_of(quick), weights_bytes=WEIGHTS_BYTES)
    assert not took.computed_tokens, "where they are here before a pass is over, order makes no difference"


def test_what_the_weights_hide_is_not_loaded() -> None:
    known, speeds = prompt(512), store(0.02, 50)
    chunks = [Candidate(at, at + 32, 32 * TOKEN_BYTES) for at in range(0, 512, 32)]
    alone, beside = plan(known, chunks, speeds), plan(known, chunks, speeds, Coming(5.0, True))
    assert alone.loads and not beside.loads
    assert beside.predicted_s == pytest.approx(5.0 + Costs(known, speeds).between(512, 516), rel=0.01)


def test_nothing_is_read_until_the_weights_are_here_and_then_it_is() -> None:
    known, speeds = prompt(1024), store(0.001, 1)
    weights = [Coming(2.0, True)]
    supply = Supply([Item(0, 0, 0, 1024, "p", 0, (0, 10**6))], Order.FRONT, lambda: speeds)
    steering = Steering(supply, known, lambda: speeds, probes=1, coming=lambda: weights[0])
    assert steering.leaves_link and not steering.wants_more(0) and steering.take() is None
    assert not steering.waits(0, True), "the first pass follows the weights"
    weights[0] = Coming(2.0, False)
    assert not steering.leaves_link and steering.wants_more(0) and steering.take() is not None


def test_what_must_be_loaded_is_read_beside_the_weights() -> None:
    known, speeds = prompt(1024), store(0.001, 1000)
    supply = Supply([Item(0, 0, 0, 1024, "p", 0, (0, 10**6))], Order.FRONT, lambda: speeds)
    steering = Steering(supply, known, lambda: speeds, must=True, coming=lambda: Coming(2.0, True))
    assert not steering.leaves_link and steering.take() is not None


@pytest.mark.parametrize(
    ("far_bytes", "came_bytes", "waiting", "is_kept", "left_s"),
    [
        (0, 0, 0.0, False, 6.0),  # not over a network: by the form's own bytes
        (1000, 0, 0.0, True, 10.0),  # nothing yet: as the network is believed to be
        (1000, 500, 0.9, True, 2.0),
        (1000, 500, 0.1, False, 2.0),  # it is making the form that takes the time
        (1000, 1000, 0.9, False, 6.0),
    ],
)
def test_whether_the_link_keeps_the_weights(
    far_bytes: int, came_bytes: int, waiting: float, is_kept: bool, left_s: float
) -> None:
    pace = Pace(2.0, 1000, 4000, far_bytes, came_bytes, waiting)
    assert pace.is_kept_by_link is is_kept and pace.left_s(100.0) == pytest.approx(left_s)


def test_a_loader_tells_its_replica_how_its_weights_come(tmp_path: Path) -> None:
    stats, measured = ReadStats(), Measured()
    with PreparedWriter(tmp_path / "form", "i", "r", "float32", [TensorPlan("w", "float32", (1 << 20,))]) as writer:
        form = PreparedFile.open_arriving(writer.temporary)
        coming = ComingWeights(form, measured, by_network=True, lately_s=60.0)
        assert form.pace is None, "it has not begun"
        writer.follow(stats, 8_000_000, 2)
        first = coming()
        assert first is not None and first.has_link
        assert first.left_s == pytest.approx(8_000_000 / measured.speeds.bytes_per_s)
        stats.moved(Tier.STORE, 200, 1e6)
        writer.moved(1 << 20)
        told = coming()
        assert told is not None and told.has_link
        assert measured.speeds.bytes_per_s < 50e6, "the store is expected to be as quick as the weights come"
        elsewhere = ComingWeights(form, measured, by_network=False, lately_s=60.0)()
        assert elsewhere is not None and not elsewhere.has_link
        measured.read(1e12, 1, 1.0)
        lately = ComingWeights(form, measured, by_network=True, lately_s=60.0)()
        assert lately is not None and not lately.has_link, "there is room"
        writer.complete()
        assert coming() is None
        writer.commit()
