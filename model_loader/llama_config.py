"""A llama-family configuration out of config.json (Hugging Face) or GGUF metadata.

What would change the arithmetic and is not known here (other architectures, experts, partial or YaRN rotary embeddings,
other activations) is refused by name, never ignored. Both spellings of the rotary settings are read: `rope_scaling`
with `rope_theta`, and `rope_parameters`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from model_loader.errors import FormatError, UnsupportedArchitecture, shown
from model_loader.manifest import ModelConfig

_LLAMA3_FIELDS: Final = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_MAX_SIZE: Final = 1 << 31
_MAX_LAYERS: Final = 4096
_MAX_HEAD_DIM: Final = 1 << 16


class _Fields:
    """Typed access to a mapping that somebody else wrote."""

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        self._values = values
        self.what = what

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def size(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < _MAX_SIZE:
            raise FormatError(f"{self.what}: {name} is {shown(value)}; a positive whole number is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise FormatError(f"{self.what}: {name} is {shown(value)}; a positive number is needed")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise FormatError(f"{self.what}: {name} is {shown(value)}; true or false is needed")
        return value


def config_from_hugging_face(document: Mapping[str, Any], what: str) -> ModelConfig:
    fields = _Fields(document, what)
    kind = document.get("model_type")
    architectures = document.get("architectures") or ["LlamaForCausalLM"]
    if kind != "llama" or architectures != ["LlamaForCausalLM"]:
        raise UnsupportedArchitecture(
            f"{what}: model_type {shown(kind)} ({shown(architectures)}) is not supported; supported is LlamaForCausalLM"
        )
    if document.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(f"{what}: hidden_act {shown(document['hidden_act'])} is not supported; silu is")
    if document.get("quantization_config"):
        raise UnsupportedArchitecture(f"{what}: quantised safetensors are not supported; GGUF is")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden % heads and not fields.has("head_dim"):
        raise FormatError(f"{what}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    theta, scaling = _rotary(document, what)
    return _checked(
        ModelConfig(
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=fields.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=fields.size("head_dim", hidden // heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=fields.size("max_position_embeddings", 2048),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            output_bias=fields.flag("attention_bias", False),
            dtype=str(document.get("dtype") or document.get("torch_dtype") or "float32"),
        ),
        what,
    )


def _rotary(document: Mapping[str, Any], what: str) -> tuple[float, dict[str, Any] | None]:
    parameters = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise FormatError(f"{what}: the rotary settings are {shown(parameters)}")
    theta = _Fields({**document, **parameters}, what).number("rope_theta", 10000.0)
    fields = _Fields(parameters, f"{what}: rotary settings")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    partial = parameters.get("partial_rotary_factor") or document.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedArchitecture(f"{what}: partial rotary embeddings ({shown(partial)}) are not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"rope_type": "linear", "factor": fields.number("factor")}
    if kind != "llama3":
        raise UnsupportedArchitecture(f"{what}: rotary scaling {shown(kind)} is not supported; linear and llama3 are")
    original = fields.size("original_max_position_embeddings", document.get("original_max_position_embeddings"))
    values = {name: fields.number(name) for name in _LLAMA3_FIELDS[:3]}
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        raise FormatError(f"{what}: high_freq_factor must exceed low_freq_factor")
    return theta, {"rope_type": "llama3", **values, "original_max_position_embeddings": original}


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Iterable[str],
    rope_factors: tuple[float, ...] | None,
    what: str,
) -> ModelConfig:
    """`shapes` are the tensors' shapes by Hugging Face name; they tell what GGUF does not say in words."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedArchitecture(f"{what}: architecture {shown(architecture)} is not supported; llama is")
    fields = _Fields({k.removeprefix("llama."): v for k, v in metadata.items() if k.startswith("llama.")}, what)
    if fields.has("expert_count") and metadata["llama.expert_count"] > 0:
        raise UnsupportedArchitecture(f"{what}: mixtures of experts are not supported")
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(metadata.get(f"llama.{name}"), list):
            raise UnsupportedArchitecture(f"{what}: {name} that differs by layer is not supported")
    heads, hidden = fields.size("attention.head_count"), fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", hidden // heads)
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedArchitecture(f"{what}: keys and values of different sizes are not supported")
    if fields.size("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedArchitecture(f"{what}: partial rotary embeddings are not supported")
    embeddings = shapes.get("model.embed_tokens.weight", (0, 0))
    scaling = _gguf_scaling(metadata, fields, rope_factors, head_dim, what)
    return _checked(
        ModelConfig(
            vocab_size=embeddings[0],
            hidden_size=hidden,
            intermediate_size=fields.size("feed_forward_length"),
            num_layers=fields.size("block_count"),
            num_heads=heads,
            num_kv_heads=fields.size("attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=_shortest(fields.number("attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(fields.number("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            max_position=fields.size("context_length"),
            tie_word_embeddings="lm_head.weight" not in shapes,
            attention_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
            mlp_bias="model.layers.0.mlp.gate_proj.bias" in shapes,
            output_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
            dtype=_main_kind(kinds),
        ),
        what,
    )


def _gguf_scaling(
    metadata: Mapping[str, Any], fields: _Fields, factors: tuple[float, ...] | None, head_dim: int, what: str
) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if factors is not None:
        if len(factors) != head_dim // 2 or not all(math.isfinite(f) and f > 0 for f in factors):
            raise FormatError(f"{what}: rope_freqs must hold {head_dim // 2} positive numbers")
        if kind not in ("none", "llama3"):
            raise UnsupportedArchitecture(f"{what}: rope_freqs together with rope scaling {shown(kind)}")
        return {"rope_type": "factors", "factors": list(factors)}
    if kind == "linear" or (kind == "none" and fields.has("rope.scale_linear")):
        name = "rope.scaling.factor" if kind == "linear" else "rope.scale_linear"
        factor = _shortest(fields.number(name))
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise UnsupportedArchitecture(f"{what}: rotary scaling {shown(kind)} is not supported")
    return None


def _shortest(value: float) -> float:
    """GGUF keeps float32; the shortest decimal that rounds to it is what its author wrote (1e-05, not 9.99e-06)."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", candidate))[0] == value:
            return candidate
    return value


def _main_kind(kinds: Iterable[str]) -> str:
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    main = max(sorted(counts), key=lambda k: counts[k], default="F32")
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(main, main)


def _checked(config: ModelConfig, what: str) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise FormatError(f"{what}: {config.num_heads} heads are no multiple of {config.num_kv_heads} key heads")
    if config.head_dim % 2 or config.head_dim > _MAX_HEAD_DIM:
        raise FormatError(f"{what}: head_dim is {config.head_dim}; an even number up to {_MAX_HEAD_DIM} is needed")
    if config.num_layers > _MAX_LAYERS:
        raise FormatError(f"{what}: {config.num_layers} layers are announced; at most {_MAX_LAYERS} are read")
    if config.vocab_size < 1:
        raise FormatError(f"{what}: the embedding tensor is missing")
    return config
