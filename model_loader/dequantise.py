"""GGML block formats to float32, vectorised over rows of blocks.

Every function takes a [blocks, type size] uint8 array and writes [blocks, block size] float32. The order of operations
is that of ggml's reference code, so that values are equal to the last bit. Limits: the types of `BLOCKS`; the others
(IQ*, TQ*, Q2_K, Q3_K, MXFP4) are refused by name when a checkpoint is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model_loader.block_types import BLOCKS
from model_loader.errors import UnsupportedArchitecture

Blocks = NDArray[np.uint8]
Values = NDArray[np.float32]


def dequantise(raw: Blocks, kind: str, out: Values) -> None:
    """Fills `out` (float32, contiguous, one dimension) from the bytes `raw` of whole blocks of type `kind`."""
    convert = _CONVERTERS.get(kind)
    if convert is None:
        raise UnsupportedArchitecture(f"tensors of GGUF type {kind} cannot be dequantised; known: {', '.join(BLOCKS)}")
    block_size, type_size = BLOCKS[kind]
    convert(raw.reshape(-1, type_size), out.reshape(-1, block_size))


def _half(blocks: Blocks, start: int, count: int = 1) -> Values:
    """`count` float16 numbers at byte `start` of each block, as float32 [blocks, count]."""
    raw = np.ascontiguousarray(blocks[:, start : start + 2 * count])
    return raw.view(np.float16).astype(np.float32)


def _f32(blocks: Blocks, out: Values) -> None:
    out[...] = blocks.view(np.float32)


def _f16(blocks: Blocks, out: Values) -> None:
    out[...] = blocks.view(np.float16)


def _bf16(blocks: Blocks, out: Values) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), casting="unsafe", dtype=np.uint32)


def _nibbles(blocks: Blocks, start: int, out: Values) -> None:
    """The sixteen bytes at `start`: low halves first, then high halves."""
    packed = blocks[:, start : start + 16]
    np.bitwise_and(packed, 15, out=out[:, :16], casting="unsafe", dtype=np.uint8)
    np.right_shift(packed, 4, out=out[:, 16:], casting="unsafe", dtype=np.uint8)


def _fifth_bits(blocks: Blocks, start: int, out: Values) -> None:
    """Adds 16 where the bit of the 32-bit mask at `start` is set."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    np.add(out, np.multiply(bits, 16, dtype=np.uint8), out=out)


def _q8_0(blocks: Blocks, out: Values) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q4_0(blocks: Blocks, out: Values) -> None:
    _nibbles(blocks, 2, out)
    np.subtract(out, 8, out=out)
    np.multiply(out, _half(blocks, 0), out=out)


def _q4_1(blocks: Blocks, out: Values) -> None:
    scales = _half(blocks, 0, 2)
    _nibbles(blocks, 4, out)
    np.multiply(out, scales[:, :1], out=out)
    np.add(out, scales[:, 1:], out=out)


def _q5_0(blocks: Blocks, out: Values) -> None:
    _nibbles(blocks, 6, out)
    _fifth_bits(blocks, 2, out)
    np.subtract(out, 16, out=out)
    np.multiply(out, _half(blocks, 0), out=out)


def _q5_1(blocks: Blocks, out: Values) -> None:
    scales = _half(blocks, 0, 2)
    _nibbles(blocks, 8, out)
    _fifth_bits(blocks, 4, out)
    np.multiply(out, scales[:, :1], out=out)
    np.add(out, scales[:, 1:], out=out)


def _k_scales(packed: Blocks) -> tuple[Values, Values]:
    """The eight 6-bit scales and eight 6-bit minima of a K block's twelve bytes."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minima = np.concatenate([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_finish(blocks: Blocks, quants: NDArray[np.uint8], out: Values) -> None:
    """out = d * scale * q - dmin * minimum, over eight groups of 32."""
    factors = _half(blocks, 0, 2)
    scales, minima = _k_scales(blocks[:, 4:16])
    groups = out.reshape(-1, 8, 32)
    np.multiply(quants.reshape(-1, 8, 32), (factors[:, :1] * scales)[:, :, None], out=groups)
    np.subtract(groups, (factors[:, 1:] * minima)[:, :, None], out=groups)


def _k_nibbles(packed: Blocks) -> NDArray[np.uint8]:
    """Four runs of 32 bytes, each giving 32 low then 32 high halves."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Blocks, out: Values) -> None:
    _k_finish(blocks, _k_nibbles(blocks[:, 16:144]), out)


def _q5_k(blocks: Blocks, out: Values) -> None:
    quants = _k_nibbles(blocks[:, 48:176])
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    quants |= ((blocks[:, 16:48][:, None, :] >> shifts) & 1) << 4
    _k_finish(blocks, quants, out)


def _q6_k(blocks: Blocks, out: Values) -> None:
    packed = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)
    quants = (low | (high << 4)).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)
    np.multiply(quants.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


_CONVERTERS: Final[dict[str, Callable[[Any, Any], None]]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0,
    "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
