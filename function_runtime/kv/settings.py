"""What an operator may set of a replica's durable KV, from the environment it was started with.

Limits: a value that does not parse is said on standard error and ignored: a replica serves without it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from function_runtime.kv.keeping import StorePrices
from function_runtime.kv.writer import LINGER_S

REMOTE_LINGER_S = 0.5
"""Where every pack is a billed request."""


@dataclass(frozen=True, slots=True)
class KvReplicaSettings:
    bytes_per_s: float = 0.0
    """`STOKER_KV_BYTES_PER_S`: most bytes per second written behind; 0: no cap. A drain does not keep to it."""
    linger_s: float = LINGER_S
    """`STOKER_KV_LINGER_S`: how long a chunk waits for others to share its pack. Longer is cheaper and loses more at a
    kill; by default 0.1 s for a directory, 0.5 s for S3."""
    loads_always: bool = False
    """`STOKER_KV_LOAD=always`: a resume reads whatever is stored, whether or not computing it again would be faster
    (`measured`, the default). For devices that are to be spared, and for tests of reading."""
    shadow_share: float = 0.01
    """`STOKER_KV_SHADOW_SHARE`: of the loads, how many are computed again afterwards and compared; 0: none."""
    prices: StorePrices = field(default_factory=StorePrices)
    """`STOKER_KV_PRICES`: micro-dollars per GiB and month, per put, per get."""

    @classmethod
    def of(cls, store_uri: str, environ: Mapping[str, str]) -> KvReplicaSettings:
        linger_s = LINGER_S if store_uri.startswith("file:") else REMOTE_LINGER_S
        return cls(
            bytes_per_s=_number(environ, "STOKER_KV_BYTES_PER_S", 0.0),
            linger_s=_number(environ, "STOKER_KV_LINGER_S", linger_s),
            loads_always=environ.get("STOKER_KV_LOAD", "") == "always",
            shadow_share=_number(environ, "STOKER_KV_SHADOW_SHARE", 0.01),
            prices=StorePrices.of(store_uri, environ),
        )


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
        if not 0 <= value < float("inf"):
            raise ValueError
    except ValueError:
        print(f"{name}={text!r} is no number of 0 or more: {default:g} is taken", file=sys.stderr)
        return default
    return value
