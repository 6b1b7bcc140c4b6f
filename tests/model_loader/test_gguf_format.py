import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_loader.errors import FormatError, LoaderError, SourceMissing, SourceRefused, UnsupportedArchitecture
from model_loader.gguf_checkpoint import describe_gguf
from model_loader.gguf_format import read_gguf
from tests.support.gguf_files import make_tiny_gguf


def test_tensors_come_under_hugging_face_names_and_within_the_file(tiny_gguf: Path) -> None:
    header = read_gguf(tiny_gguf)
    names = {t.name for t in header.tensors}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"} <= names
    assert max(t.offset + t.nbytes for t in header.tensors) <= tiny_gguf.stat().st_size
    assert header.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize("kept", [0, 3, 4, 8, 20, 100, 3000, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused_with_needed_and_found_bytes(tiny_gguf: Path, kept: float) -> None:
    whole = tiny_gguf.read_bytes()
    count = int(kept * len(whole)) if isinstance(kept, float) else kept
    tiny_gguf.write_bytes(whole[:count])
    with pytest.raises(FormatError) as refused:
        describe_gguf(tiny_gguf)
    assert str(tiny_gguf) in str(refused.value)
    assert str(count) in str(refused.value) or "no GGUF" in str(refused.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 8))
def test_no_damage_to_the_header_is_anything_but_a_loader_error(
    tiny_gguf_source: Path, tmp_path: Path, seed: int, flips: int
) -> None:
    chance = random.Random(seed)
    content = bytearray(tiny_gguf_source.read_bytes()[:40_000])
    for _ in range(flips):
        content[chance.randrange(0, 24_000)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    with pytest.raises(LoaderError):
        describe_gguf(damaged)


def test_absurd_counts_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(100))
    with pytest.raises(FormatError, match="more than its 124 bytes can hold"):
        read_gguf(path)
    array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**61)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(100))
    with pytest.raises(FormatError, match="truncated"):
        read_gguf(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(200))
    with pytest.raises(SourceRefused, match=r"no GGUF file but begins like a pickle.*python -c"):
        read_gguf(path)
    path.write_bytes(b"GGML" + bytes(200))
    with pytest.raises(FormatError, match="no GGUF"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(100))
    with pytest.raises(FormatError, match="big-endian"):
        read_gguf(path)
    with pytest.raises(SourceMissing):
        read_gguf(tmp_path / "absent.gguf")


def test_a_tensor_that_is_no_part_of_a_llama_model_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "x.gguf", tiny_source)
    content = path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    path.write_bytes(content)
    with pytest.raises(UnsupportedArchitecture, match="ffn_xx"):
        describe_gguf(path)


def test_another_architecture_is_refused_by_name(tiny_gguf: Path) -> None:
    content = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(content.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05" + bytes(7) + b"qwen2", 1))
    with pytest.raises(UnsupportedArchitecture, match="qwen2"):
        describe_gguf(tiny_gguf)


def test_rope_factors_become_part_of_the_configuration(tiny_source: Path, tmp_path: Path) -> None:
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    config = describe_gguf(make_tiny_gguf(tmp_path / "x.gguf", tiny_source, rope_factors=factors)).config
    plain = [10000.0 ** (-2 * i / 16) for i in range(8)]
    np.testing.assert_allclose(config.inverse_frequencies(), np.array(plain) / factors, rtol=1e-12)


def test_epsilon_is_what_its_author_wrote(tiny_gguf: Path) -> None:
    assert describe_gguf(tiny_gguf).config.rms_norm_eps == 1e-5
