"""The right output is what transformers gives: logits over prefill, chunks and decode, alone and batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from function_runtime.engine import step
from function_runtime.engine.sampler import Row, Sampled, sample
from model_loader.recipe import prepare
from tests.function_runtime.engine.support import (
    LLAMA2,
    Checkpoint,
    Transcript,
    make_work,
    prepare_checkpoint,
    run_many,
)
from tests.support.checkpoints import make_tiny_llama

TOLERANCE = 1e-3

Recorded = dict[tuple[int, ...], Tensor]
"""Known tokens of a sequence -> the logits that chose the next one."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    logits_of: Recorded = {}

    def spy(logits: Tensor, rows: Sequence[Row]) -> list[Sampled | None]:
        for row, values in zip(rows, logits, strict=True):
            logits_of[(*row.prompt, *row.generated)] = values.clone()
        return sample(logits, rows)

    monkeypatch.setattr(step, "sample", spy)
    return logits_of


def load_reference(source: Path) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    if source.is_dir():
        return LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    config = LlamaConfig(**load_gguf_checkpoint(str(source), return_tensors=False)["config"])
    model = LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


def compare(
    model: LlamaForCausalLM, recorded: Recorded, transcripts: Sequence[Transcript], prompts: Sequence[Sequence[int]]
) -> None:
    """Each sequence's own tokens are forced through the reference at once; every recorded step is compared."""
    for transcript, prompt in zip(transcripts, prompts, strict=True):
        known = [*prompt, *transcript.tokens()]
        with torch.no_grad():
            expected = model(torch.tensor([known])).logits[0]
        assert transcript.tokens(), transcript.error
        for index, token in enumerate(transcript.tokens()):
            position = len(prompt) + index
            logits = recorded[tuple(known[:position])]
            assert (logits - expected[position - 1]).abs().max().item() < TOLERANCE
            best = expected[position - 1].topk(2).values
            if best[0] - best[1] > TOLERANCE:
                assert token == int(expected[position - 1].argmax())


@pytest.mark.parametrize("step_tokens", [512, 48], ids=["whole-prefill", "chunked-prefill"])
@pytest.mark.parametrize("lengths", [(70,), (1,), (70, 3, 33, 16, 150)], ids=["alone", "one-token", "batched"])
@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_tiny_models_agree_with_transformers(
    name: str, lengths: tuple[int, ...], step_tokens: int, recorded: Recorded, request: pytest.FixtureRequest
) -> None:
    checkpoint: Checkpoint = request.getfixturevalue(name)
    prompts = [checkpoint.prompt(length, seed) for seed, length in enumerate(lengths)]
    works = [make_work(p, f"r{i}", max_tokens=24, ignore_eos=True) for i, p in enumerate(prompts)]
    transcripts = run_many(checkpoint.engine(step_tokens=step_tokens), works)
    compare(load_reference(checkpoint.source), recorded, transcripts, prompts)


def test_positions_far_out_agree(llama3: Checkpoint, recorded: Recorded) -> None:
    """Scaled rotary angles, chunks and paged attention at 3,000 positions."""
    prompt = llama3.prompt(3000)
    transcripts = run_many(llama3.engine(), [make_work(prompt, max_tokens=4, ignore_eos=True)])
    compare(load_reference(llama3.source), recorded, transcripts, [prompt])


def test_biases_agree(tmp_path: Path, recorded: Recorded) -> None:
    directory = make_tiny_llama(tmp_path / "model", **LLAMA2)
    config = LlamaConfig.from_pretrained(directory, attention_bias=True, mlp_bias=True)
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(directory)
    checkpoint = prepare_checkpoint(directory, tmp_path)
    prompt = checkpoint.prompt(40)
    transcripts = run_many(checkpoint.engine(step_tokens=32), [make_work(prompt, max_tokens=8, ignore_eos=True)])
    compare(model, recorded, transcripts, [prompt])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(llama2: Checkpoint, tmp_path: Path, dtype: str, recorded: Recorded) -> None:
    prepare(llama2.manifest, dtype, tmp_path / "half")
    half = replace(llama2, prepared=tmp_path / "half")
    prompt = half.prompt(40)
    (transcript,) = run_many(half.engine(step_tokens=32), [make_work(prompt, max_tokens=4, ignore_eos=True)])
    known = [*prompt, *transcript.tokens()]
    with torch.no_grad():
        expected = load_reference(llama2.source)(torch.tensor([known])).logits[0]
    for index in range(4):
        logits = recorded[tuple(known[: 40 + index])]
        assert (logits - expected[39 + index]).abs().mean().item() < 0.1
    assert all(kv.dtype is getattr(torch, dtype) for kv in transcript.kv.values())


def test_smollm2_agrees_with_transformers(smollm2: Checkpoint, recorded: Recorded) -> None:
    model = load_reference(smollm2.source)
    encode: Callable[[str], list[int]] = lambda text: smollm2.tokenizer.encode(text, True)  # noqa: E731
    texts = ["The capital of France is", "Once upon a time, " * 12, "def fibonacci(n):\n    "]
    prompts = [encode(text) for text in texts]
    alone = run_many(smollm2.engine(step_tokens=40), [make_work(prompts[1], max_tokens=6)])
    compare(model, recorded, alone, prompts[1:2])
    recorded.clear()
    works = [make_work(p, f"r{i}", max_tokens=12) for i, p in enumerate(prompts)]
    together = run_many(smollm2.engine(), works)
    compare(model, recorded, together, prompts)
    assert together[0].text().startswith(" Paris")
