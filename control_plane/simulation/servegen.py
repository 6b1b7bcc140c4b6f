"""ServeGen client rates: `category,model,client,window_start_s,rate_rps,cv`, a client's 600 s window a row.

A client is a function. Its rate times the window's length is its count of requests (a whole number but for rounding to
five digits). Limits: which calendar day the first is was not published (a Monday at midnight is taken); tokens are not
in these files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np

from control_plane.simulation.rates import Rates
from control_plane.simulation.rows import cells, in_order, number
from control_plane.simulation.trace import BadTrace

HEAD: Final = ("category", "model", "client", "window_start_s", "rate_rps", "cv")
WINDOW_S: Final = 600.0
ORIGIN_S: Final = 1_735_516_800.0
DAY_S: Final = 86_400.0


def read_servegen(path: Path, category: str | None = None) -> Rates:
    """`category` given: its clients alone (the language models were recorded for 14 days, the others for one)."""
    places: dict[tuple[str, str, str], int] = {}
    previous: dict[tuple[str, str, str], float] = {}
    functions: list[int] = []
    starts: list[float] = []
    rates: list[float] = []
    spreads: list[float] = []
    for line, (kind, model, client, start, rate, cv) in cells(path, HEAD):
        key = (kind, model, client)
        start_s = number(path, line, "window_start_s", start)
        in_order(path, line, f"window_start_s of client {client} of {model}", start_s, previous.get(key), strictly=True)
        if start_s % WINDOW_S:
            raise BadTrace(path, line, f"window_start_s is {start}, not a multiple of {WINDOW_S:g}")
        previous[key] = start_s
        rate_rps, spread = number(path, line, "rate_rps", rate), number(path, line, "cv", cv)
        if category is not None and kind != category:
            continue
        functions.append(places.setdefault(key, len(places)))
        starts.append(start_s)
        rates.append(rate_rps)
        spreads.append(spread)
    if not starts:
        of = "" if category is None else f" of category {category}"
        raise BadTrace(path, None, f"holds no window{of}")
    return Rates(
        source=path.name.split(".")[0],
        names=tuple(f"{model}-{client}" for _, model, client in places),
        window_s=WINDOW_S,
        function=np.asarray(functions, np.int32),
        start_s=np.asarray(starts),
        count=np.rint(np.asarray(rates) * WINDOW_S).astype(np.int64),
        cv=np.asarray(spreads),
        length_s=math.ceil((max(starts) + WINDOW_S) / DAY_S) * DAY_S,
        origin_s=ORIGIN_S,
    )
