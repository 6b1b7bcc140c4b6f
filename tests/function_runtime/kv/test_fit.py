"""Speeds come out of measurements as they are, whatever the store and the device, and follow them when they change."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from function_runtime.kv.fit import Fit
from function_runtime.kv.plan import Costs, Known
from function_runtime.kv.speeds import PRIOR, Measured, Speeds

WITHIN = 0.25
AFTER = 40
"""Measurements."""
ASKED = ((1, 300_000), (1, 2_000_000), (8, 30_000_000), (16, 4_000_000), (32, 100_000_000))
"""(reads, bytes) whose time is predicted."""

latencies = st.one_of(st.just(0.0), st.floats(-5, math.log10(0.5)).map(lambda power: 10**power))
bandwidths = st.floats(6, 10).map(lambda power: 10**power)
seeds = st.integers(0, 2**32)
devices = st.builds(
    Speeds,
    prefill_s=st.floats(-6, -2).map(lambda power: 10**power),
    prefill_position_s=st.floats(-10, -6).map(lambda power: 10**power),
    decode_s=st.floats(-4, -0.7).map(lambda power: 10**power),
    decode_position_s=st.floats(-9, -5).map(lambda power: 10**power),
    latency_s=latencies,
    bytes_per_s=bandwidths,
)


def read(found: Measured, real: Speeds, count: int, seed: int, noise: Callable[[random.Random], float]) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        nbytes, reads = int(10 ** chance.uniform(5.5, 7.5)), chance.choice((1, 1, 4, 12, 30))
        found.read(nbytes, reads, float(real.reading_s(nbytes, reads)) * noise(chance))


def off_by(found: Speeds, real: Speeds) -> float:
    """The worst of the predictions, as a factor less 1."""
    ratios = [float(found.reading_s(b, r)) / float(real.reading_s(b, r)) for r, b in ASKED]
    return max(max(ratio, 1 / ratio) for ratio in ratios) - 1


def exactly(_: random.Random) -> float:
    return 1.0


@settings(deadline=None, max_examples=60)
@given(devices, seeds)
def test_a_store_of_any_latency_and_bandwidth_is_known_after_a_few_tens_of_reads(real: Speeds, seed: int) -> None:
    found = Measured()
    read(found, real, AFTER, seed, exactly)
    assert off_by(found.speeds, real) < WITHIN
    share = real.latency_s / float(real.reading_s(300_000, 1))
    if share > 0.5:
        assert found.speeds.latency_s == pytest.approx(real.latency_s, rel=WITHIN)
    if real.latency_s * real.bytes_per_s < 1e7:
        assert found.speeds.bytes_per_s == pytest.approx(real.bytes_per_s, rel=WITHIN)


@settings(deadline=None, max_examples=60)
@given(devices, seeds)
def test_prefill_and_decode_are_known_too(real: Speeds, seed: int) -> None:
    found, chance = Measured(), random.Random(seed)
    for _ in range(AFTER):
        start = chance.randrange(3000)
        end = start + chance.randrange(64, 512)
        found.prefilled(start, end, Costs(Known(10**6, 10**6), real).between(start, end))
        found.decoded(end, real.decode_s + real.decode_position_s * end)
    now = found.speeds
    for end in (256, 2000, 4000):
        known = Known(end, end)
        assert Costs(known, now).between(0, end) == pytest.approx(Costs(known, real).between(0, end), rel=WITHIN)
        decode_s = real.decode_s + real.decode_position_s * end
        assert now.decode_s + now.decode_position_s * end == pytest.approx(decode_s, rel=WITHIN)


def hindered(chance: random.Random) -> float:
    """A busy machine: a tenth more or less, and now and then many times as long."""
    return math.exp(chance.gauss(0, 0.1)) * (chance.uniform(3, 10) if chance.random() < 0.05 else 1.0)


STORES = [(latency_s, bytes_per_s) for latency_s in (0.0, 0.005, 0.05, 0.5) for bytes_per_s in (1e6, 3e7, 1e10)]


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), STORES)
def test_noise_and_outliers_do_not_lead_it_astray(latency_s: float, bytes_per_s: float) -> None:
    real = replace(PRIOR, latency_s=latency_s, bytes_per_s=bytes_per_s)
    found = Measured()
    read(found, real, AFTER, 7, hindered)
    assert off_by(found.speeds, real) < 2 * WITHIN


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), STORES)
@pytest.mark.parametrize("before", [(0.001, 1e9), (0.2, 8e6)])
def test_a_store_that_changes_is_followed_within_a_few_reads(
    before: tuple[float, float], latency_s: float, bytes_per_s: float
) -> None:
    real = replace(PRIOR, latency_s=latency_s, bytes_per_s=bytes_per_s)
    found = Measured()
    other = replace(real, latency_s=before[0], bytes_per_s=before[1])
    read(found, other, AFTER, 3, exactly)
    takes_s = float(real.reading_s(6_000_000, 4))
    for _ in range(4):
        found.read(6_000_000, 4, takes_s)
    # What it was measured with is predicted at once (a small change may be noise for longer), everything else when
    # reads of other kinds have been seen.
    is_small = 0.5 < takes_s / float(other.reading_s(6_000_000, 4)) < 2
    assert float(found.speeds.reading_s(6_000_000, 4)) == pytest.approx(takes_s, rel=0.5 if is_small else WITHIN)
    read(found, real, 20, 5, exactly)
    assert off_by(found.speeds, real) < WITHIN


def test_one_measurement_that_took_long_changes_little() -> None:
    fit = Fit(1.0, 0.0, ((1.0, 0.0),))
    for _ in range(20):
        fit.measure(1.0, 0.0, 5.0)
    fit.measure(1.0, 0.0, 500.0)
    assert fit.values[0] < 7.5


def test_what_is_no_measurement_is_none() -> None:
    fit = Fit(2.0, 3.0, ((1.0, 1.0),))
    for first, second, y in [(0, 0, 1), (1, 1, 0), (1, 1, -1), (-1, 2, 1), (1, 1, math.inf), (1, 1, math.nan)]:
        fit.measure(first, second, y)
    assert fit.values == (2.0, 3.0) and fit.count == 0
