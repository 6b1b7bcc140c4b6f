"""Headers of checkpoints, damaged at random: by a seed, so that what went wrong once goes wrong again.

Half of the mutations know the format (lengths, counts, offsets, shapes, dtypes, names, nesting), half are blind (bits,
runs, cuts, splices). What `header_bytes` covers is mutated; the rest of the file stays.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

NASTY_INTS = (
    0, 1, 2, 7, 8, 31, 32, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63,
    2**64 - 1,
)  # fmt: skip
NASTY_VALUES: tuple[Any, ...] = (
    *NASTY_INTS, -1, 1.5, 1e308, float("inf"), True, None, "", "x", "F32", "F64", "../../x", "\0", "é" * 50, [], {},
    [[]], {"a": {}}, [0] * 1000, 10**400,
)  # fmt: skip
GGUF_KINDS = (*range(45), 255, 2**31, 2**32 - 1)


def mutate_safetensors(content: bytes, chance: random.Random) -> bytes:
    nbytes = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + nbytes], content[8 + nbytes :]
    if chance.random() < 0.5:
        header = _mutate_bytes(header, chance)
    else:
        header = _mutate_document(json.loads(header), chance)
    length = len(header) if chance.random() < 0.9 else chance.choice((*NASTY_INTS, 100_000_000, len(header) + 1))
    if chance.random() < 0.1:
        body = body[: chance.randrange(len(body) + 1)]
    return length.to_bytes(8, "little") + header + body


def mutate_index(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return _mutate_bytes(content, chance)
    return _mutate_document(json.loads(content), chance)


def mutate_gguf(content: bytes, header_bytes: int, places: list[tuple[int, int]], chance: random.Random) -> bytes:
    """`places` are (offset, width) of the header's numbers."""
    if chance.random() < 0.5:
        return _mutate_bytes(content[:header_bytes], chance) + content[header_bytes:]
    damaged = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at, width = chance.choice(places)
        value = chance.choice((*NASTY_INTS, *GGUF_KINDS, int.from_bytes(damaged[at : at + width], "little") + 1))
        damaged[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    if chance.random() < 0.05:
        return bytes(damaged[: chance.randrange(len(damaged))])
    return bytes(damaged)


def gguf_places(content: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Where the header ends, and where its numbers are: counts, lengths, types, dimensions, offsets."""
    at, places = 24, [(4, 4), (8, 8), (16, 8)]
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    tensors, pairs = struct.unpack_from("<QQ", content, 8)

    def number(width: int, note: bool = True) -> int:
        nonlocal at
        if note:
            places.append((at, width))
        value = int.from_bytes(content[at : at + width], "little")
        at += width
        return value

    def text(note: bool = True) -> None:
        nonlocal at
        nbytes = number(8, note)
        at += nbytes

    for _ in range(pairs):
        text()
        kind = number(4)
        if kind == 8:
            text()
        elif kind == 9:
            item, count = number(4), number(8)
            for index in range(count):
                if item == 8:
                    text(index < 3)
                else:
                    number(sizes[item], index < 3)
        else:
            number(sizes[kind])
    for _ in range(tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return at, places


def _mutate_bytes(header: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(header)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        if not damaged:
            break
        at = chance.randrange(len(damaged))
        match chance.randrange(7):
            case 0:
                damaged[at] ^= 1 << chance.randrange(8)
            case 1:
                damaged[at] = chance.choice((0, 1, 0x22, 0x5B, 0x7B, 0x7D, 0x7F, 0x80, 0xFF))
            case 2:
                del damaged[at : at + chance.choice((1, 4, 8, 100))]
            case 3:
                damaged[at:at] = chance.randbytes(chance.choice((1, 8, 64)))
            case 4:
                del damaged[at:]
            case 5:
                other = chance.randrange(len(damaged))
                damaged[at : at + 32] = damaged[other : other + 32]
            case 6:
                sign = chance.choice((b"[", b'{"a":', b"0", b'"', b",", b"\0"))
                damaged[at:at] = sign * chance.choice((10, 1000, 50_000))
    return bytes(damaged)


def _mutate_document(document: dict[str, Any], chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 3))):
        chance.choice(_DOCUMENT_MUTATIONS)(document, chance)
    text = json.dumps(document).encode()
    if chance.random() < 0.1:
        # The same names twice: JSON allows what a dictionary cannot hold.
        text = text[:-1] + b"," + text[1:]
    return text


def _names(document: dict[str, Any]) -> list[str]:
    return [name for name in document if isinstance(document[name], dict)] or [*document] or [""]


def _change_field(document: dict[str, Any], chance: random.Random) -> None:
    name = chance.choice(_names(document))
    info = document.get(name)
    if not isinstance(info, dict) or not info:
        document[name] = chance.choice(NASTY_VALUES)
        return
    field = chance.choice([*info])
    if isinstance(info[field], list) and info[field] and chance.random() < 0.7:
        numbers = list(info[field])
        numbers[chance.randrange(len(numbers))] = chance.choice(NASTY_VALUES)
        info[field] = numbers
    else:
        info[field] = chance.choice(NASTY_VALUES)


def _drop(document: dict[str, Any], chance: random.Random) -> None:
    document.pop(chance.choice(_names(document)), None)


def _add(document: dict[str, Any], chance: random.Random) -> None:
    document[chance.choice(("", "x", "__metadata__", "a/b", "m" * 2000))] = chance.choice(NASTY_VALUES)


def _swap(document: dict[str, Any], chance: random.Random) -> None:
    one, other = chance.choice(_names(document)), chance.choice(_names(document))
    document[one], document[other] = document.get(other), document.get(one)


def _nest(document: dict[str, Any], chance: random.Random) -> None:
    value: Any = 0
    for _ in range(chance.choice((5, 200, 900))):
        value = [value] if chance.random() < 0.5 else {"a": value}
    document[chance.choice(_names(document))] = value


def _many(document: dict[str, Any], chance: random.Random) -> None:
    document.update({f"t{number}": chance.choice(NASTY_VALUES[:20]) for number in range(2000)})


_DOCUMENT_MUTATIONS: tuple[Callable[[dict[str, Any], random.Random], None], ...] = (
    _change_field, _change_field, _change_field, _change_field, _drop, _add, _swap, _nest, _many,
)  # fmt: skip
