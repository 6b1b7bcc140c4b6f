"""Lossy forms of KV lose what they say they lose, and are never taken for another form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from function_runtime.engine_like import KvLayout
from function_runtime.errors import KvError
from function_runtime.kv import forms
from function_runtime.kv.forms import (
    FORMS,
    Form,
    chunk_nbytes,
    decode,
    encode,
    form_of,
    identity_of,
    int4_group,
    layer_nbytes,
)
from tests.function_runtime.kv.test_chunks import IDENTITY

LAYOUT = KvLayout(num_layers=3, kv_heads=2, head_dim=32, dtype="float32", block_size=16)
TOKENS = 5
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def kv(layout: KvLayout = LAYOUT, seed: int = 0, spread: float = 3.0, tokens: int = TOKENS) -> torch.Tensor:
    """Heads of very different size, as keys have them."""
    shape = (layout.num_layers, 2, tokens, layout.kv_heads, layout.head_dim)
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(shape[0], 2, 1, layout.kv_heads, 1, generator=random) * spread)
    return (torch.randn(shape, generator=random) * sizes.clamp(max=1000)).to(_TORCH[layout.dtype])


def raw(values: torch.Tensor) -> memoryview:
    return values.contiguous().flatten().view(torch.uint8).numpy().data


def again(form: Form, values: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    found = decode(form, layout, values.shape[2], encode(form, layout, raw(values)))
    return torch.frombuffer(bytearray(found), dtype=values.dtype).view(values.shape)


def test_raw_is_given_back_byte_for_byte() -> None:
    assert torch.equal(again("raw", kv(), LAYOUT), kv())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fp8_is_within_a_sixteenth_of_each_value_or_half_its_smallest_step(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    values = kv(layout)
    found = again("fp8", values, layout).float()
    wanted = values.float()
    scale = wanted.abs().amax(dim=(2, 4), keepdim=True) / 448
    # Three bits of mantissa: at most 1/16 of the value; below the smallest normal, half of 2**-9. The rest is the
    # rounding to the engine's own dtype.
    allowed = (wanted.abs() / 16).maximum(scale * 2**-10) * 1.001 + wanted.abs() * {"float32": 0}.get(dtype, 2**-8)
    assert bool(((found - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_int4_is_within_half_a_step_of_its_group(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    values = kv(layout)
    found = again("int4", values, layout).float()
    wanted = values.float()
    grouped = wanted.unflatten(-1, (-1, int4_group(layout)))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    step = (high - low) / 15
    rounding = (low.abs().maximum(high.abs())) * (2**-10 if dtype == "float32" else 2**-7)
    error = (found - wanted).abs().unflatten(-1, (-1, int4_group(layout)))
    assert bool((error <= step / 2 * 1.01 + rounding).all())


def test_every_code_of_fp8_is_the_one_torch_has() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(forms._e4m3_values(), expected, equal_nan=True)


@settings(deadline=None)
@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=64))
def test_values_are_rounded_to_fp8_as_torch_rounds_them(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(forms._to_e4m3(array), expected)


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1e-44, -5.0, 7.25])
def test_a_constant_comes_back(form: Form, value: float) -> None:
    values = torch.full_like(kv(), value)
    assert torch.allclose(again(form, values, LAYOUT), values, rtol=2**-9, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_decoded_by_itself(form: Form) -> None:
    values = kv()
    encoded = encode(form, LAYOUT, raw(values))
    stored = sum(layer_nbytes(form, LAYOUT, TOKENS))
    assert len(encoded) == chunk_nbytes(form, LAYOUT, TOKENS) == LAYOUT.num_layers * stored
    whole = bytes(decode(form, LAYOUT, TOKENS, encoded))
    size = len(whole) // LAYOUT.num_layers
    for layer in range(LAYOUT.num_layers):
        one = decode(form, LAYOUT, TOKENS, encoded[layer * stored :][:stored])
        assert bytes(one) == whole[layer * size :][:size]


def test_lossy_forms_are_smaller() -> None:
    layout = replace(LAYOUT, dtype="bfloat16", head_dim=64)
    raw_bytes = chunk_nbytes("raw", layout, 256)
    assert chunk_nbytes("fp8", layout, 256) < raw_bytes * 0.51
    assert chunk_nbytes("int4", layout, 256) < raw_bytes * 0.29


def test_every_form_has_an_identity_of_its_own() -> None:
    digests = {identity_of(form, IDENTITY).digest for form in FORMS}
    assert len(digests) == len(FORMS) and identity_of("raw", IDENTITY).digest == IDENTITY.digest
    assert [form_of(identity_of(form, IDENTITY)) for form in FORMS] == list(FORMS)


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused(form: Form, bad: float) -> None:
    values = kv()
    values[1, 0, 2, 1, 3] = bad
    with pytest.raises(KvError):
        encode(form, LAYOUT, raw(values))


def test_int4_refuses_what_float16_cannot_hold() -> None:
    values = kv()
    values[0, 0, 0, 0, 0] = 1e6
    with pytest.raises(KvError, match="float16"):
        encode("int4", LAYOUT, raw(values))


@pytest.mark.parametrize("form", FORMS)
def test_bytes_of_another_length_are_refused(form: Form) -> None:
    encoded = encode(form, LAYOUT, raw(kv()))
    with pytest.raises(KvError):
        decode(form, LAYOUT, TOKENS, encoded[:-1])
    with pytest.raises(KvError):
        decode(form, LAYOUT, TOKENS + 1, encoded)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(KvError, match="fp4"):
        forms.known_form("fp4")
