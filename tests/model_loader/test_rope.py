import numpy as np
import pytest

from model_loader.manifest import ModelConfig

LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "vocab_size": 10, "hidden_size": 512, "intermediate_size": 10, "num_layers": 1, "num_heads": 4,
        "num_kv_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None,
        "max_position": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA31], ids=["plain", "linear", "llama3"]
)
def test_inverse_frequencies_are_those_of_transformers(scaling: dict[str, object] | None) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}
    reference = LlamaRotaryEmbedding(
        transformers.LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=parameters)
    )
    np.testing.assert_allclose(
        config(rope_scaling=scaling).inverse_frequencies(), reference.inv_freq.numpy(), rtol=2e-6
    )
