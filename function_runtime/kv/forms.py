"""Forms of stored KV: raw, and two lossy ones that cost a fraction of the bytes and serve shared prefixes only.

    fp8   e4m3 of value / scale; one float32 scale per layer, keys or values, and head (of the chunk's tokens)
    int4  (value - zero) / scale, 0 to 15; float16 scale and zero per `int4_group` neighbouring values of a head

Both are layer-major as the raw form is, each layer its data and then its scales, so that a layer is read, checked and
decoded by itself. What a form is (bits, groups, how scales are chosen) is named in the identity: no chunk of one form
is taken for another, nor for raw. Limits: numpy only; values that are no numbers, or beyond float16 for int4, are
refused: such KV is not kept.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from function_runtime.engine_like import KvLayout
from function_runtime.errors import KvError
from function_runtime.kv.identity import KvIdentity

Form: TypeAlias = Literal["raw", "fp8", "int4"]
FORMS: Final[tuple[Form, ...]] = ("raw", "fp8", "int4")
Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Halves: TypeAlias = NDArray[np.float16]

FP8_MAX: Final = 448.0
_INT4_GROUP: Final = 64
_INT4_TOP: Final = 15
_SMALLEST_NORMAL: Final = np.float32(2.0**-6)
_SUBNORMAL_STEPS: Final = np.float32(2.0**9)
_HALF_MAX: Final = 65504.0
_BESIDE: Final = "raw-beside/"


def known_form(name: str) -> Form:
    if name not in FORMS:
        raise KvError(f"KV form {name[:40]!r} is not known (known: {', '.join(FORMS)})")
    return name


def form_of(identity: KvIdentity) -> Form:
    """In which form chunks of this identity are stored."""
    for form in FORMS[1:]:
        if identity.scales == scales_name(form, identity.layout):
            return form
    return "raw"


def identity_of(form: Form, raw: KvIdentity) -> KvIdentity:
    """The identity of chunks in this form; `raw` is that of the engine's own KV."""
    return replace(raw, scales=scales_name(form, raw.layout))


def flight_identity(form: Form, raw: KvIdentity) -> KvIdentity:
    """The identity of raw chunks in flight where prefixes are kept in `form`: what was computed after a lossy prefix is
    another KV than what the tokens alone give, and must never be taken for it."""
    return raw if form == "raw" else replace(raw, scales=_BESIDE + scales_name(form, raw.layout))


def is_of_one_request(scales: str) -> bool:
    """Whether an identity's `scales` say that its chunks are in flight beside lossy prefixes, and nobody else's."""
    return scales.startswith(_BESIDE)


def scales_name(form: Form, layout: KvLayout) -> str:
    """What `KvIdentity.scales` says: the form, how its scales are chosen, and the version of both."""
    match form:
        case "raw":
            return ""
        case "fp8":
            return "fp8-e4m3/layer-kv-head/absmax/1"
        case "int4":
            return f"int4/group-{int4_group(layout)}/minmax-f16/1"


def int4_group(layout: KvLayout) -> int:
    return math.gcd(_INT4_GROUP, layout.head_dim)


def layer_nbytes(form: Form, layout: KvLayout, tokens: int) -> tuple[int, int]:
    """Bytes of data and of scales in one layer."""
    values = 2 * tokens * layout.kv_heads * layout.head_dim
    match form:
        case "raw":
            return 2 * tokens * layout.row_nbytes, 0
        case "fp8":
            return values, 2 * layout.kv_heads * 4
        case "int4":
            return values // 2, values // int4_group(layout) * 4


def chunk_nbytes(form: Form, layout: KvLayout, tokens: int) -> int:
    return layout.num_layers * sum(layer_nbytes(form, layout, tokens))


def encode(form: Form, layout: KvLayout, data: memoryview) -> memoryview:
    """Layers in this form, one after another, from raw KV `[layers, 2, tokens, kv_heads, head_dim]`."""
    data = data.cast("B")
    if form == "raw":
        return data
    values = _to_floats(data, layout)
    if not np.isfinite(values).all():
        raise KvError(f"KV that is not finite cannot be stored as {form}")
    codes, scales = _encode_fp8(values) if form == "fp8" else _encode_int4(values, int4_group(layout))
    layers = (codes.reshape(layout.num_layers, -1), scales.reshape(layout.num_layers, -1).view(np.uint8))
    return np.concatenate(layers, axis=1).reshape(-1).data.cast("B")


def decode(form: Form, layout: KvLayout, tokens: int, data: memoryview) -> memoryview:
    """Raw KV in the layout's dtype, of as many whole layers as are given."""
    data = data.cast("B")
    values_nbytes, scales_nbytes = layer_nbytes(form, layout, tokens)
    layers, rest = divmod(len(data), values_nbytes + scales_nbytes)
    if rest or not layers:
        raise KvError(f"{len(data)} bytes of {form} are no layers of {tokens} tokens")
    if form == "raw":
        return data
    rows = np.frombuffer(data, np.uint8).reshape(layers, values_nbytes + scales_nbytes)
    codes, scales = rows[:, :values_nbytes], np.ascontiguousarray(rows[:, values_nbytes:])
    shape = (layers, 2, tokens, layout.kv_heads, layout.head_dim)
    with np.errstate(all="ignore"):
        if form == "fp8":
            values = _decode_fp8(codes, scales.view(np.float32), shape)
        else:
            values = _decode_int4(codes, scales.view(np.float16), shape, int4_group(layout))
    if not np.isfinite(values).all():
        raise KvError(f"{form} decodes to what is no number")
    return _from_floats(values, layout)


# --- fp8 ---------------------------------------------------------------------------------------------------------


def _encode_fp8(values: Floats) -> tuple[Bytes, Floats]:
    largest = np.abs(values).max(axis=(2, 4), keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(FP8_MAX), np.float32(1)).astype(np.float32)
    # A scale that rounds to zero (subnormal KV) would divide by it.
    scales = np.maximum(scales, np.finfo(np.float32).tiny)
    return _to_e4m3(values / scales), scales


def _decode_fp8(codes: Bytes, scales: Floats, shape: tuple[int, ...]) -> Floats:
    factors = scales.reshape(shape[0], 2, 1, shape[3], 1)
    return _e4m3_values()[codes].reshape(shape) * factors


def _to_e4m3(values: Floats) -> Bytes:
    """Round to nearest, ties to even; |values| <= 448 but for rounding, which is clipped."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    bits = bits & np.uint32(0x7FFFFFFF)
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> 20) & 1)) >> 20).astype(np.int32) - (120 << 3)
    size = bits.view(np.float32)
    small = np.rint(size * _SUBNORMAL_STEPS).astype(np.int32, copy=False)
    codes = np.where(size < _SMALLEST_NORMAL, small, normal)
    return sign | np.minimum(codes, 0x7E).astype(np.uint8)


@cache
def _e4m3_values() -> Floats:
    """What each of the 256 codes stands for; 0x7F and 0xFF are no numbers."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -size, size).astype(np.float32)


# --- int4 --------------------------------------------------------------------------------------------------------


def _encode_int4(values: Floats, group: int) -> tuple[Bytes, Halves]:
    if values.shape[-1] % 2:
        raise KvError(f"a head of {values.shape[-1]} values cannot be stored as int4")
    if np.abs(values).max(initial=0.0) > _HALF_MAX:
        raise KvError("KV beyond the range of float16 cannot be stored as int4")
    grouped = values.reshape(*values.shape[:-1], -1, group)
    low, high = grouped.min(axis=-1, keepdims=True), grouped.max(axis=-1, keepdims=True)
    # Zero is rounded down and the scale up, so that every value lies within the 15 steps: the error is half a step.
    zero = low.astype(np.float16)
    zero = np.where(zero.astype(np.float32) > low, np.nextafter(zero, np.float16(-np.inf)), zero)
    exact = (high - zero.astype(np.float32)) / np.float32(_INT4_TOP)
    scale = exact.astype(np.float16)
    scale = np.where(scale.astype(np.float32) < exact, np.nextafter(scale, np.float16(np.inf)), scale)
    if not (np.isfinite(zero).all() and np.isfinite(scale).all()):
        raise KvError("KV beyond the range of float16 cannot be stored as int4")
    step = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)
    codes = np.clip(np.rint((grouped - zero.astype(np.float32)) / step), 0, _INT4_TOP).astype(np.uint8)
    flat = codes.reshape(values.shape)
    packed = flat[..., 0::2] | (flat[..., 1::2] << 4)
    return np.ascontiguousarray(packed), np.concatenate((scale, zero), axis=-1)


def _decode_int4(codes_of_two: Bytes, scales: Halves, shape: tuple[int, ...], group: int) -> Floats:
    packed = codes_of_two.reshape(*shape[:-1], shape[-1] // 2)
    codes = np.empty(shape, np.float32)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    grouped = codes.reshape(*shape[:-1], -1, group)
    pairs = scales.astype(np.float32).reshape(*grouped.shape[:-1], 2)
    return (grouped * pairs[..., :1] + pairs[..., 1:]).reshape(shape)


# --- raw dtypes as float32 ---------------------------------------------------------------------------------------


def _to_floats(data: memoryview, layout: KvLayout) -> Floats:
    token_bytes = layout.nbytes_per_token
    tokens, rest = divmod(len(data), token_bytes)
    if rest or not tokens:
        raise KvError(f"{len(data)} bytes are no KV of whole tokens of {token_bytes}")
    match layout.dtype:
        case "bfloat16":
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "float16":
            values = np.frombuffer(data, np.float16).astype(np.float32)
        case _:
            values = np.frombuffer(data, np.float32)
    return values.reshape(layout.num_layers, 2, tokens, layout.kv_heads, layout.head_dim)


def _from_floats(values: Floats, layout: KvLayout) -> memoryview:
    match layout.dtype:
        case "bfloat16":
            bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
            raw: NDArray[np.generic] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        case "float16":
            raw = np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)
        case _:
            raw = np.ascontiguousarray(values, np.float32)
    return raw.data.cast("B")
