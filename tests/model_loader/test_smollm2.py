"""The real model, against transformers' own loading of the same file."""

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_loader.manifest import Manifest
from model_loader.prepared import PreparedFile
from model_loader.recipe import prepare
from model_loader.tokenizer import Detokenizer, Tokenizer
from tests.model_loader.test_tokenizer import CORPUS

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def reference_tokenizer(smollm2_gguf: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Manifest) -> Tokenizer:
    return Tokenizer.load(smollm2.directory)


def test_configuration_is_that_of_the_model(smollm2: Manifest) -> None:
    config = smollm2.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.head_dim, config.rope_theta) == (49152, 64, 100000.0)
    assert config.tie_word_embeddings
    assert config.dtype == "Q4_1"
    assert smollm2.context_length == 8192
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2,))
    assert not smollm2.add_bos_token


def test_every_tensor_equals_transformers_to_the_last_bit(
    smollm2: Manifest, smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    # transformers asks for accelerate before it reads GGUF, and then needs it for nothing here
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_, **__: True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    theirs = {name: values.numpy() for name, values in model.state_dict().items()}
    out = tmp_path / "prepared"
    prepare(smollm2, "float32", out)
    prepared = PreparedFile.open(out, verify=True)
    expected = {"embed": ["model.embed_tokens"], "norm": ["model.norm"]}
    for layer in range(smollm2.config.num_layers):
        at, to = f"model.layers.{layer}", f"layers.{layer}"
        expected |= {
            f"{to}.qkv": [f"{at}.self_attn.{p}_proj" for p in "qkv"],
            f"{to}.o": [f"{at}.self_attn.o_proj"],
            f"{to}.gate_up": [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"],
            f"{to}.down": [f"{at}.mlp.down_proj"],
            f"{to}.attn_norm": [f"{at}.input_layernorm"],
            f"{to}.mlp_norm": [f"{at}.post_attention_layernorm"],
        }
    assert set(prepared.keys()) == set(expected)
    for name, parts in expected.items():
        values = np.concatenate([theirs[f"{part}.weight"] for part in parts])
        np.testing.assert_array_equal(prepared.tensor(name).T, values, err_msg=name)


def test_tokens_equal_transformers_with_the_pre_tokenizer_the_file_names(
    reference_tokenizer: Any, tokenizer: Tokenizer
) -> None:
    """The file says `smollm`: every numeral by itself, as the model was trained and as llama.cpp does it."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    backend = Backend.from_str(reference_tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = [*CORPUS, *_source_texts(), "  1", "x = [\n    12,\n\n  3]", " ½ ² ٣٤"]
    for text in texts:
        assert tokenizer.encode(text, True) == backend.encode(text).ids, text


def test_tokens_equal_transformers_own_conversion_where_numerals_follow_no_run_of_spaces(
    reference_tokenizer: Any, tokenizer: Tokenizer
) -> None:
    """transformers does not know `smollm` and cuts as GPT-2 does: that differs before numerals only."""
    compared = 0
    for text in [*CORPUS, *_source_texts()]:
        if not re.search(r"\s\s+(?=\d)", text) and "½" not in text and "²" not in text:
            compared += 1
            assert tokenizer.encode(text, True) == reference_tokenizer(text).input_ids, text
    assert compared > 30


def test_special_tokens_and_decoding_equal_transformers(reference_tokenizer: Any, tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        ids = [int(n) for n in random.integers(0, 49152, 40)] + [0, 1, 2, 16]
        for skip in (True, False):
            detokenizer = Detokenizer(tokenizer, (), skip)
            text = "".join(detokenizer.push(n) for n in ids) + detokenizer.flush()
            assert text == reference_tokenizer.decode(ids, skip_special_tokens=skip)
    assert {n for n in range(49152) if tokenizer.is_special(n)} == set(reference_tokenizer.added_tokens_decoder)


def _source_texts() -> list[str]:
    """Python's own sources: code, indentation, several scripts; a paragraph at a time."""
    texts: list[str] = []
    for name in ("textwrap.py", "this.py", "test/test_unicode_identifiers.py", "json/encoder.py"):
        path = Path(os.__file__).parent / name
        if path.exists():
            texts += path.read_text("utf-8").split("\n\n")
    return texts


def test_import_and_preparation_are_quick(smollm2: Manifest, tmp_path: Path) -> None:
    """A generous bound that holds on a busy machine; the figures themselves are the benchmark's."""
    started = time.monotonic()
    prepare(smollm2, "float32", tmp_path / "out")
    assert time.monotonic() - started < 30
    started = time.monotonic()
    PreparedFile.open(tmp_path / "out", verify=False)
    assert time.monotonic() - started < 1
