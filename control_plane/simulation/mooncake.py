"""Mooncake traces: a JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

One file is one function, named after the file. Limits: which prefixes requests share (`hash_ids`) is checked and not
used: the simulator computes every prompt whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from control_plane.simulation.rows import TOKENS_MAX, in_order, lines
from control_plane.simulation.trace import BadTrace, Trace

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class _Request(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[int] = []


def read_mooncake(path: Path) -> Trace:
    decode = msgspec.json.Decoder(_Request).decode
    times: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    for line, text in lines(path):
        try:
            request = decode(text)
        except msgspec.MsgspecError as error:
            raise BadTrace(path, line, f"not a request: {error}") from error
        at_s = request.timestamp / 1000
        in_order(path, line, "timestamp", at_s, times[-1] if times else None)
        times.append(at_s)
        prompts.append(request.input_length)
        outputs.append(request.output_length)
    if not times:
        raise BadTrace(path, None, "holds no request")
    name = path.name.split(".")[0]
    return Trace(
        source=name,
        names=(name,),
        arrival_s=np.asarray(times) - times[0],
        function=np.zeros(len(times), np.int32),
        prompt_tokens=np.maximum(np.asarray(prompts, np.int32), 1),
        output_tokens=np.maximum(np.asarray(outputs, np.int32), 1),
        length_s=times[-1] - times[0],
        notes=("every prompt is computed whole: shared prefixes are not used",),
    )
