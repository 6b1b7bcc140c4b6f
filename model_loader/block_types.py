"""How many bytes a run of values takes, for every stored type this package reads. No numpy here.

`BLOCKS` maps a type's name to (values per block, bytes per block). Plain types have blocks of one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

BLOCKS: Final[Mapping[str, tuple[int, int]]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip

GGUF_TYPES: Final[Mapping[int, str]] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def count_values(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def count_bytes(kind: str, values: int) -> int:
    """Bytes of `values` values; they must be whole blocks."""
    block_size, type_size = BLOCKS[kind]
    return values // block_size * type_size
