"""Which tensors a llama checkpoint holds, and which engine tensors are made of them.

`expected_tensors` is what a checkpoint must contain (names and shapes). `engine_tensors` is the prepared form: each
engine tensor is a run of parts stacked along the first axis, in order; matrices that rows are multiplied with are then
transposed to [inputs, outputs], with which float32 products of few rows were measured to take half the time. Half types
keep the rows as the checkpoint has them, which is as fast there and lets their bytes be copied as they are. GGUF keeps
the rows of q and k in llama.cpp's interleaved order; `heads` on a part says that they are to be put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from model_loader.block_types import count_values
from model_loader.board import board_bytes
from model_loader.chunks import ChunkList
from model_loader.errors import FormatError
from model_loader.manifest import ModelConfig, TensorEntry

RECIPE_VERSION: Final = 3
"""Changes whenever the same checkpoint would give other bytes; prepared forms of another version are not used."""
ITEM_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per value of the dtypes a checkpoint can be prepared in."""
_ALIGNMENT_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Part:
    source: str
    shape: tuple[int, ...]
    heads: int = 0
    """Over 0: rows are rotary pairs of this many heads, interleaved in GGUF."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    name: str
    parts: tuple[Part, ...]
    transposed: bool = False
    group: int = 0
    """When the model needs it: 0 the embedding, i + 1 layer i, then norm and head."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *columns = sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]
        return (*columns, rows) if self.transposed else (rows, *columns)


def matrix(name: str, *parts: Part) -> EngineTensor:
    return EngineTensor(name, parts, transposed=True)


def groups(config: ModelConfig) -> tuple[str, ...]:
    """What is published as it lands, in the order the model needs it."""
    return ("embedding", *(f"layer {layer}" for layer in range(config.num_layers)), "norm and head")


def keeps_rows(dtype: str) -> bool:
    """Whether matrices of this dtype keep the checkpoint's order of bytes."""
    return dtype != "float32"


def engine_tensors(config: ModelConfig) -> tuple[EngineTensor, ...]:
    """In the order the model needs them."""
    return tuple(replace(tensor, group=_group_of(tensor.name, config)) for tensor in _tensors(config))


def _group_of(name: str, config: ModelConfig) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) + 1
    return 0 if name == "embed" else config.num_layers + 1


def _tensors(config: ModelConfig) -> list[EngineTensor]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    embedding = Part("model.embed_tokens.weight", (config.vocab_size, hidden))
    tensors = [EngineTensor("embed", (embedding,), transposed=config.tie_word_embeddings)]
    for layer in range(config.num_layers):
        base, to = f"model.layers.{layer}", f"layers.{layer}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"

        def projections(kind: str, *inputs: int, at: str = attention) -> tuple[Part, ...]:
            return (
                Part(f"{at}.q_proj.{kind}", (queries, *inputs), config.num_heads),
                Part(f"{at}.k_proj.{kind}", (keys, *inputs), config.num_kv_heads),
                Part(f"{at}.v_proj.{kind}", (keys, *inputs)),
            )

        tensors += [
            EngineTensor(f"{to}.attn_norm", (Part(f"{base}.input_layernorm.weight", (hidden,)),)),
            matrix(f"{to}.qkv", *projections("weight", hidden)),
            matrix(f"{to}.o", Part(f"{attention}.o_proj.weight", (hidden, queries))),
            EngineTensor(f"{to}.mlp_norm", (Part(f"{base}.post_attention_layernorm.weight", (hidden,)),)),
            matrix(
                f"{to}.gate_up",
                Part(f"{mlp}.gate_proj.weight", (inner, hidden)),
                Part(f"{mlp}.up_proj.weight", (inner, hidden)),
            ),
            matrix(f"{to}.down", Part(f"{mlp}.down_proj.weight", (hidden, inner))),
        ]
        if config.attention_bias:
            tensors.append(EngineTensor(f"{to}.qkv_bias", projections("bias")))
        if config.output_bias:
            tensors.append(EngineTensor(f"{to}.o_bias", (Part(f"{attention}.o_proj.bias", (hidden,)),)))
        if config.mlp_bias:
            gate_up = (Part(f"{mlp}.gate_proj.bias", (inner,)), Part(f"{mlp}.up_proj.bias", (inner,)))
            tensors.append(EngineTensor(f"{to}.gate_up_bias", gate_up))
            tensors.append(EngineTensor(f"{to}.down_bias", (Part(f"{mlp}.down_proj.bias", (hidden,)),)))
    tensors.append(EngineTensor("norm", (Part("model.norm.weight", (hidden,)),)))
    if not config.tie_word_embeddings:
        tensors.append(matrix("lm_head", Part("lm_head.weight", (config.vocab_size, hidden))))
    return tensors


def recipe_name(dtype: str) -> str:
    return f"llama-{RECIPE_VERSION}/{dtype}"


def prepared_bytes(config: ModelConfig, dtype: str) -> int:
    """At most how large the prepared form will be, alignment and table included."""
    tensors = engine_tensors(config)
    values = sum(count_values(tensor.shape) for tensor in tensors)
    body = values * ITEM_BYTES[dtype] + len(tensors) * (_ALIGNMENT_BYTES + 256) + 2 * _ALIGNMENT_BYTES
    return body + board_bytes(config.num_layers + 2) + ChunkList.nbytes_for(body)


def expected_tensors(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    return {part.source: part.shape for tensor in engine_tensors(config) for part in tensor.parts}


def check_tensors(config: ModelConfig, tensors: Iterable[TensorEntry], what: str) -> tuple[TensorEntry, ...]:
    """The tensors that belong to the model, each with the shape its configuration demands.

    Left out are what the arithmetic does not use: a head that is tied anyway, and stored rotary frequencies.
    """
    expected = expected_tensors(config)
    found = {t.name: t for t in tensors if not _is_redundant(t.name, config)}
    missing = [name for name in expected if name not in found]
    if missing:
        raise FormatError(f"{what} lacks {len(missing)} tensors, first {missing[0]}: it is incomplete or foreign")
    foreign = [name for name in found if name not in expected]
    if foreign:
        raise FormatError(f"{what} holds {len(foreign)} tensors its configuration does not know, first {foreign[0]}")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise FormatError(f"{what}: tensor {name} has shape {found[name].shape}, its configuration says {shape}")
    return tuple(found[name] for name in expected)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
