"""GGUF files for tests: a tiny llama directory converted as llama.cpp's converter does it, rows of q and k included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{kind}"


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    head_dim = weights.shape[0] // heads
    return (
        weights.reshape(heads, 2, head_dim // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
    )  # fmt: skip


def make_tiny_gguf(
    path: Path,
    source: Path,
    *,
    kind: str = "F32",
    rope_factors: list[float] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    pre: str = "gpt-2",
    licence: str | None = None,
) -> Path:
    """`source` is a float32 directory of `make_tiny_llama`; matrices are stored as `kind`, norms as F32."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    _add_tokenizer(writer, tokenizer, config, source, pre)
    if licence is not None:
        writer.add_license(licence)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    number = getattr(gguf.GGMLQuantizationType, kind)
    for name, values in {**load_file(source / "model.safetensors"), **(extra or {})}.items():
        if ".q_proj." in name:
            values = interleave(values, config["num_attention_heads"])
        elif ".k_proj." in name:
            values = interleave(values, config["num_key_value_heads"])
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values, dtype=np.float32))
        else:
            raw = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), number)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any], source: Path, pre: str
) -> None:
    texts = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    texts |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts[number] for number in range(len(texts))])
    writer.add_token_types([3 if number in special else 1 for number in range(len(texts))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])
