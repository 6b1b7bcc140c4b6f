"""Stoker's own traffic as a file: `arrival_unix_s,tenant,function,prompt_tokens,output_tokens`, a request a row.

Written by `stoker simulate --from-journal --export FILE`, gzip if its name ends in .gz. Limits: no content, no keys, no
client; a request that never got an answer counts with the tokens it had.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from control_plane.simulation.rows import cells, count, in_order, number
from control_plane.simulation.trace import BadTrace, Trace, origin_of

HEAD: Final = ("arrival_unix_s", "tenant", "function", "prompt_tokens", "output_tokens")


def read_own_traffic(path: Path) -> Trace:
    return trace_of(path, cells(path, HEAD))


def trace_of(path: Path, rows: Iterable[tuple[int, list[str]]]) -> Trace:
    """`path` is what errors name."""
    places: dict[tuple[str, str], int] = {}
    times: list[float] = []
    functions: list[int] = []
    prompts: list[int] = []
    outputs: list[int] = []
    for line, (arrival, tenant, name, prompt, output) in rows:
        at_s = number(path, line, "arrival_unix_s", arrival)
        in_order(path, line, "arrival_unix_s", at_s, times[-1] if times else None)
        if not name or not tenant:
            raise BadTrace(path, line, "no tenant or no function is named")
        times.append(at_s)
        functions.append(places.setdefault((tenant, name), len(places)))
        prompts.append(count(path, line, "prompt_tokens", prompt))
        outputs.append(count(path, line, "output_tokens", output))
    if not times:
        raise BadTrace(path, None, "holds no request")
    origin_s = origin_of(times[0])
    return Trace(
        source=path.name.split(".")[0],
        names=tuple(name for _, name in places),
        tenants=tuple(tenant for tenant, _ in places),
        arrival_s=np.asarray(times) - origin_s,
        function=np.asarray(functions, np.int32),
        prompt_tokens=np.maximum(np.asarray(prompts, np.int32), 1),
        output_tokens=np.maximum(np.asarray(outputs, np.int32), 1),
        length_s=times[-1] - origin_s,
        origin_s=origin_s,
    )


def write_own_traffic(path: Path, trace: Trace) -> None:
    """Readable by `read_own_traffic`; times to the microsecond."""
    tenants = trace.tenants or ("default",) * len(trace.names)
    with path.open("wb") as raw:
        # A time stamp in the header would make two exports of the same requests differ.
        packed = gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) if path.suffix == ".gz" else raw
        with io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as text:
            text.write(",".join(HEAD) + "\n")
            for at_s, place, prompt, output in zip(
                (trace.arrival_s + trace.origin_s).tolist(),
                trace.function.tolist(),
                trace.prompt_tokens.tolist(),
                trace.output_tokens.tolist(),
                strict=True,
            ):
                text.write(f"{at_s:.6f},{tenants[place]},{trace.names[place]},{prompt},{output}\n")
