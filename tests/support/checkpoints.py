"""Tiny random llama checkpoints, written as Hugging Face directories: quick to make, complete enough to be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL = (PAD, BOS, EOS, "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Llama 3's scaling with an original context so short that tiny models feel it."""

_CORPUS = [
    "The quick brown fox jumps over the lazy dog while the stoker feeds the fire with coal.",
    "A function at zero holds no process and no memory; a request wakes it, and it answers in tokens.",
    "Once upon a time there was a small model that knew very little, and it was content with that.",
    "Numbers such as 0, 1, 2, 10, 42, 1000 and 31415 are written with digits, and dates like 2024-05-06.",
    "def add(left, right):\n    return left + right\n\nfor index in range(10):\n    print(index, add(index, 1))\n",
    "Ein Heizer schaufelt Kohle, le chauffeur remplit la chaudière, el fogonero alimenta el fuego, кочегар топит печь.",
    "Hello! How are you? I'm fine, thanks; they're here, we've been there, you'll see, she'd say it's so.",
]


def make_tiny_tokenizer(vocab: int = 512) -> Tokenizer:
    """A byte-level BPE with special tokens, at most `vocab` entries; every text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def tiny_tensors(
    *, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, seed: int, tie: bool
) -> dict[str, np.ndarray]:
    """Random float32 weights, scaled so that logits spread and greedy choices have margins."""
    random = np.random.default_rng(seed)
    head_dim = hidden // heads

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1.0 + 0.1 * random.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": random.standard_normal((vocab, hidden)).astype(np.float32)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        tensors |= {
            f"{base}.input_layernorm.weight": norm(),
            f"{base}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden, 1.5),
            f"{base}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden, 1.5),
            f"{base}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{base}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{base}.post_attention_layernorm.weight": norm(),
            f"{base}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{base}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{base}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    tensors["model.norm.weight"] = norm()
    if not tie:
        tensors["lm_head.weight"] = matrix(vocab, hidden, 3.0)
    return tensors


def make_tiny_llama(
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    seed: int = 0,
    rope_scaling: dict[str, Any] | None = None,
    tie: bool = False,
    dtype: str = "float32",
    max_position: int = 8192,
) -> Path:
    """Writes a complete checkpoint (weights, configuration, tokenizer, chat template) and gives its directory.

    Llama 2: the defaults. Llama 3: `rope_scaling=LLAMA3_SCALING`. transformers loads the directory as it stands.
    """
    directory.mkdir(parents=True, exist_ok=True)
    inner = hidden * 3
    tensors = tiny_tensors(
        layers=layers, hidden=hidden, inner=inner, heads=heads, kv_heads=kv_heads, vocab=vocab, seed=seed, tie=tie
    )
    _save_tensors(directory / "model.safetensors", tensors, dtype)
    tokenizer = make_tiny_tokenizer(vocab)
    tokenizer.save(str(directory / "tokenizer.json"))
    bos, eos, pad = (tokenizer.token_to_id(token) for token in (BOS, EOS, PAD))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0 if rope_scaling else 10000.0,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tie,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    for name, document in (
        ("config.json", config),
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(document, indent=2))
    return directory


def _save_tensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    if dtype == "float32":
        save_file(tensors, path, metadata={"format": "pt"})
    elif dtype == "float16":
        save_file({k: v.astype(np.float16) for k, v in tensors.items()}, path, metadata={"format": "pt"})
    elif dtype == "bfloat16":
        _save_bfloat16(path, tensors)
    else:
        raise ValueError(f"dtype {dtype!r}: float32, float16 or bfloat16")


def _save_bfloat16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Written by hand, because numpy has no bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, values in tensors.items():
        bits = values.view(np.uint32)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(values.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(body))
