"""Azure LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`, a request a row (2023 and 2024 releases).

One file is one function, named after the file. Limits: the 2023 files carry seven digits of a second (the last is
dropped) and no time zone (UTC is taken).
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from control_plane.simulation.rows import cells, count, in_order
from control_plane.simulation.trace import BadTrace, Trace, origin_of

HEAD: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure_llm(path: Path) -> Trace:
    times: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    for line, (stamp, context, generated) in cells(path, HEAD):
        try:
            when = datetime.fromisoformat(stamp)
        except ValueError:
            raise BadTrace(path, line, f"TIMESTAMP is {stamp!r} instead of a date and time") from None
        at_s = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        in_order(path, line, "TIMESTAMP", at_s, times[-1] if times else None)
        times.append(at_s)
        prompts.append(count(path, line, "ContextTokens", context))
        outputs.append(count(path, line, "GeneratedTokens", generated))
    if not times:
        raise BadTrace(path, None, "holds no request")
    name, origin_s = path.name.split(".")[0], origin_of(times[0])
    return Trace(
        source=name,
        names=(name,),
        arrival_s=np.asarray(times) - origin_s,
        function=np.zeros(len(times), np.int32),
        prompt_tokens=np.maximum(np.asarray(prompts, np.int32), 1),
        output_tokens=np.maximum(np.asarray(outputs, np.int32), 1),
        length_s=times[-1] - origin_s,
        origin_s=origin_s,
    )
