"""Which format a trace file has, told by its first line.

Limits: `Rates` still have to be drawn into requests, after functions and days were chosen.
"""

from __future__ import annotations

from pathlib import Path

from control_plane.simulation import azure_functions, azure_llm, own_traffic, servegen
from control_plane.simulation.azure_functions import read_azure_functions
from control_plane.simulation.azure_llm import read_azure_llm
from control_plane.simulation.mooncake import read_mooncake
from control_plane.simulation.own_traffic import read_own_traffic
from control_plane.simulation.rates import Rates
from control_plane.simulation.rows import lines
from control_plane.simulation.servegen import read_servegen
from control_plane.simulation.trace import BadTrace, Trace

KNOWN = "Azure LLM, Azure functions, Mooncake, ServeGen client rates, or an export of Stoker's own journal"


def read(path: Path, category: str | None = None) -> Trace | Rates:
    """The whole file, checked row by row. `category`: of a ServeGen file. Raises `BadTrace`."""
    first = next(lines(path), None)
    if first is None:
        raise BadTrace(path, None, "is empty")
    head = first[1].lstrip("\ufeff")
    if head.startswith("{"):
        return read_mooncake(path)
    columns = tuple(head.split(","))
    if columns == servegen.HEAD:
        return read_servegen(path, category)
    if columns == azure_functions.HEAD:
        return read_azure_functions(path)
    if columns == azure_llm.HEAD:
        return read_azure_llm(path)
    if columns == own_traffic.HEAD:
        return read_own_traffic(path)
    raise BadTrace(path, first[0], f"its first line {head[:80]!r} is of none of the known formats: {KNOWN}")
