import gguf
import numpy as np
import pytest

from model_loader.block_types import BLOCKS, GGUF_TYPES
from model_loader.dequantise import dequantise
from model_loader.errors import UnsupportedArchitecture

_HALVES = {  # where each block keeps float16 numbers, so that random bytes can be made finite
    "F16": (0,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(kind: str, count: int) -> np.ndarray:
    random = np.random.default_rng(abs(hash(kind)) % 1000)
    blocks = random.integers(0, 256, (count, BLOCKS[kind][1]), dtype=np.uint8)
    for at in _HALVES.get(kind, ()):
        halves = (random.standard_normal(count) * 0.1).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    if kind == "F32":
        blocks = random.standard_normal(count).astype(np.float32).view(np.uint8).reshape(count, 4)
    if kind == "BF16":
        blocks[:, 1] &= 0x3F
    return blocks


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_values_equal_the_reference_to_the_last_bit(kind: str) -> None:
    blocks = random_blocks(kind, 96)
    out = np.empty(96 * BLOCKS[kind][0], dtype=np.float32)
    dequantise(blocks.reshape(-1), kind, out)
    expected = gguf.quants.dequantize(blocks.reshape(-1), getattr(gguf.GGMLQuantizationType, kind))
    np.testing.assert_array_equal(out.view(np.uint32), expected.reshape(-1).astype(np.float32).view(np.uint32))


def test_block_sizes_and_type_numbers_are_those_of_gguf() -> None:
    for kind, sizes in BLOCKS.items():
        number = getattr(gguf.GGMLQuantizationType, kind)
        assert GGUF_TYPES[number.value] == kind
        assert gguf.GGML_QUANT_SIZES[number] == sizes


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitecture, match="IQ4_XS"):
        dequantise(np.zeros(1, np.uint8), "IQ4_XS", np.empty(1, np.float32))
