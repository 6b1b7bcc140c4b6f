"""Rotary positions: inverse frequencies (plain, linear, llama3, given factors) and the rotation itself.

Computed in float32 in the order the reference implementation uses, so that angles agree to the last bit at any
position. Limits: scalings that depend on the sequence's length (dynamic, yarn, longrope) are refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from function_runtime.engine.errors import UnusableModel
from model_loader.manifest import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    base = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return base
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "default":
        return base
    if kind == "linear":
        return base / float(scaling["factor"])
    if kind == "factors":
        return base / torch.tensor(scaling["factors"], dtype=torch.float32)
    if kind == "llama3":
        return _llama3(base, scaling)
    raise UnusableModel(f"rope scaling {kind!r} is not computed here (known: linear, llama3, factors)")


def _llama3(base: Tensor, scaling: dict[str, float]) -> Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / base
    scaled = torch.where(wavelength > original / low, base / factor, base)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, smoothed, scaled)


class Rotation:
    """Cosines and signed sines of a step's positions, for all layers."""

    __slots__ = ("_cos", "_half", "_sin")

    def __init__(self, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        angles = torch.outer(positions.to(torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype)
        self._half = frequencies.shape[0]

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotates `[tokens, heads, head_dim]`."""
        return torch.addcmul(heads * self._cos, heads.roll(self._half, -1), self._sin)
