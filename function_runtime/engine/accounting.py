"""Whose device time a step was: integer shares that sum to the whole exactly (largest remainder)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def share(total: int, weights: Sequence[int]) -> list[int]:
    """Splits `total` by `weights`; the units that rounding leaves go to the largest remainders, first ones first."""
    whole = sum(weights)
    if whole <= 0:
        return [0] * len(weights)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def attribute(
    busy_us: int, prefill_rows: Mapping[str, int], decode_rows: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Request id -> (prefill, decode) microseconds, in proportion to rows computed."""
    keys = [(name, 0) for name in prefill_rows] + [(name, 1) for name in decode_rows]
    parts = share(busy_us, [*prefill_rows.values(), *decode_rows.values()])
    result: dict[str, tuple[int, int]] = {}
    for (name, kind), part in zip(keys, parts, strict=True):
        prefill, decode = result.get(name, (0, 0))
        result[name] = (prefill + part, decode) if kind == 0 else (prefill, decode + part)
    return result
