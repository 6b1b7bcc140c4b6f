"""Checkpoints to load: SmolLM2 in bfloat16, made from its GGUF, and random ones of any size in any number of shards.

Random weights are finite and small, so that a model of them computes; they are made once per folder. Limits: Llama
shapes with a tiny tokenizer; the shapes are chosen for the number of bytes, not for sense.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from model_loader.importer import import_model
from model_loader.llama_layout import engine_tensors, expected_tensors
from model_loader.manifest import Manifest, ModelConfig
from model_loader.prepared import PreparedFile
from model_loader.recipe import prepare
from tests.support.checkpoints import make_tiny_llama, make_tiny_tokenizer
from tests.support.smollm2 import gguf

_WRITE_BYTES = 64 * 1024 * 1024
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2048, 7168, 32, 8, 32_000


def random_model(folder: Path, gigabytes: float, shards: int) -> Path:
    """A directory with about so many bytes of bfloat16."""
    target = folder / f"random-{gigabytes:g}gb-{shards}"
    if (target / "done").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    layer_bytes = 2 * HIDDEN * (HIDDEN * 2 + 2 * HIDDEN * KV_HEADS // HEADS + 3 * INNER)
    layers = max(1, round((gigabytes * 1e9 - 4 * HIDDEN * VOCAB) / layer_bytes))
    make_tiny_llama(target, vocab=512)
    (target / "model.safetensors").unlink()
    make_tiny_tokenizer(512).save(str(target / "tokenizer.json"))
    document = json.loads((target / "config.json").read_text())
    document |= {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(document))
    config = _config(layers)
    names = list(expected_tensors(config).items())
    _write_shards(target, names, shards)
    (target / "done").touch()
    return target


def _config(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_layers=layers, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=HIDDEN // HEADS, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
        max_position=8192, tie_word_embeddings=False,
    )  # fmt: skip


def _write_shards(target: Path, tensors: list[tuple[str, tuple[int, ...]]], shards: int) -> None:
    total = sum(2 * int(np.prod(shape)) for _, shape in tensors)
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in tensors:
        if filled >= total / shards and len(groups) < shards:
            groups.append([])
            filled = 0
        groups[-1].append((name, shape))
        filled += 2 * int(np.prod(shape))
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        single = len(groups) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        places |= dict.fromkeys((name for name, _ in group), file)
        write_bfloat16(target / file, group, _random_bytes(sum(2 * int(np.prod(s)) for _, s in group), number))
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))


def write_bfloat16(path: Path, tensors: list[tuple[str, tuple[int, ...]]], pieces: Iterator[bytes]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _random_bytes(nbytes: int, seed: int) -> Iterator[bytes]:
    chance = np.random.default_rng(seed)
    while nbytes:
        count = min(nbytes, _WRITE_BYTES)
        bits = np.frombuffer(chance.bytes(count), np.uint16)
        # Sign and mantissa by chance, magnitudes between 2^-6 and 2^-5.
        yield ((bits & 0x807F) | (121 << 7)).astype(np.uint16).tobytes()
        nbytes -= count


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a directory of bfloat16 safetensors."""
    target = folder / "smollm2-bf16"
    if (target / "done").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    manifest = import_model(f"file://{gguf()}", folder / "smollm2-models")
    form_path = folder / "smollm2.prepared"
    prepare(manifest, "bfloat16", form_path)
    form = PreparedFile.open(form_path, verify=False)
    tensors: list[tuple[str, tuple[int, ...]]] = []
    pieces: list[bytes] = []
    for tensor in engine_tensors(manifest.config):
        raw, at = form.raw(tensor.name), 0
        for part in tensor.parts:
            nbytes = 2 * int(np.prod(part.shape))
            tensors.append((part.source, part.shape))
            pieces.append(bytes(raw[at : at + nbytes]))
            at += nbytes
    write_bfloat16(target / "model.safetensors", tensors, iter(pieces))
    form_path.unlink()
    (target / "config.json").write_text(json.dumps(_hugging_face(manifest.config)))
    shutil.copy(manifest.directory / "tokenizer.json", target / "tokenizer.json")
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": manifest.eos_token}))
    (target / "done").touch()
    return target


def _hugging_face(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position, "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


def imported(source: Path, folder: Path) -> Manifest:
    return import_model(f"file://{source}", folder / "models")
