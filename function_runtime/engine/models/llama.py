"""One decoder for the Llama family: Llama 2 and 3, SmolLM2 and what else differs from them by configuration only.

`forward` computes the rows of a step (any mixture of decode tokens and prefill chunks of any requests) and the logits
of the rows asked for. Attention and the KV it needs are behind `Attention`, products behind `Matrix`; weights still on
their way are waited for layer by layer. Limits: weights are used as they are mapped, in their own dtype; no tensor
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from function_runtime.engine.attention.interface import Attention, Plan
from function_runtime.engine.crew import Crew
from function_runtime.engine.errors import UnusableModel
from function_runtime.engine.matrix import Matrix
from function_runtime.engine.models.norm import RmsNorm
from function_runtime.engine.models.rope import Rotation, inverse_frequencies
from function_runtime.engine.weights import Arrival
from model_loader.manifest import ModelConfig


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: RmsNorm
    qkv: Matrix
    qkv_bias: Tensor | None
    o: Matrix
    o_bias: Tensor | None
    mlp_norm: RmsNorm
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


class Llama:
    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], crew: Crew | None, arrival: Arrival | None = None
    ) -> None:
        self.config = config
        self.arrival = arrival
        """What the weights wait for; None once they are all here."""
        self.between_layers: Callable[[], None] | None = None
        """A pass that takes long is progress, layer by layer."""
        heads, eps = config.num_heads + 2 * config.num_kv_heads, config.rms_norm_eps
        hidden, inner, wide = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        take = _Taker(weights)
        head = take("embed" if config.tie_word_embeddings else "lm_head", (hidden, config.vocab_size))
        self._embedding = head.t() if config.tie_word_embeddings else take("embed", (config.vocab_size, hidden))
        self.lm_head = Matrix(head, crew)
        self.norm = RmsNorm(take("norm", (hidden,)), eps)
        self.dtype, self.device = head.dtype, head.device
        self.layers = tuple(
            Layer(
                attn_norm=RmsNorm(take(f"layers.{i}.attn_norm", (hidden,)), eps),
                qkv=Matrix(take(f"layers.{i}.qkv", (hidden, heads * config.head_dim)), crew),
                qkv_bias=take.optional(f"layers.{i}.qkv_bias", (heads * config.head_dim,)),
                o=Matrix(take(f"layers.{i}.o", (wide, hidden)), crew),
                o_bias=take.optional(f"layers.{i}.o_bias", (hidden,)),
                mlp_norm=RmsNorm(take(f"layers.{i}.mlp_norm", (hidden,)), eps),
                gate_up=Matrix(take(f"layers.{i}.gate_up", (hidden, 2 * inner)), crew),
                gate_up_bias=take.optional(f"layers.{i}.gate_up_bias", (2 * inner,)),
                down=Matrix(take(f"layers.{i}.down", (inner, hidden)), crew),
                down_bias=take.optional(f"layers.{i}.down_bias", (hidden,)),
            )
            for i in range(config.num_layers)
        )
        self.frequencies = inverse_frequencies(config).to(self.device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        plan: Plan,
        logit_rows: Tensor | None,
        gate: Callable[[int], None] | None = None,
    ) -> Tensor | None:
        """Logits (float32) of `logit_rows`, or None where no row's are wanted. `gate` is called before each layer's
        attention and returns when the KV that the layer needs is in its blocks."""
        config = self.config
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        inner, count = config.intermediate_size, tokens.shape[0]
        rotate = Rotation(self.frequencies, positions, self.dtype)
        arrival = self.arrival
        if arrival is not None:
            arrival.wait(0)
        x = self._embedding.index_select(0, tokens)
        between = self.between_layers
        for index, layer in enumerate(self.layers):
            if between is not None:
                between()
            if arrival is not None:
                arrival.wait(index + 1)
            h = layer.attn_norm(x)
            qkv = layer.qkv(h, layer.qkv_bias).view(count, heads + 2 * kv_heads, size)
            rotated = rotate(qkv[:, : heads + kv_heads])
            if gate is not None:
                gate(index)
            mixed = attention.attend(index, rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :], plan)
            x = x + layer.o(mixed.reshape(count, heads * size), layer.o_bias)
            h = layer.mlp_norm(x)
            gate_up = layer.gate_up(h, layer.gate_up_bias)
            x = x + layer.down(F.silu(gate_up[:, :inner]) * gate_up[:, inner:], layer.down_bias)
        if logit_rows is None:
            return None
        if arrival is not None:
            arrival.wait(len(self.layers) + 1)
            self.arrival = None
        return self.lm_head(self.norm(x.index_select(0, logit_rows))).to(torch.float32)


class _Taker:
    """Takes tensors out of a prepared form and checks their shapes."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.optional(name, shape)
        if tensor is None:
            raise UnusableModel(f"the prepared checkpoint has no tensor {name}: prepare it again")
        return tensor

    def optional(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        tensor = self._weights.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise UnusableModel(f"tensor {name} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor
