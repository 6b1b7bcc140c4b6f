"""Recorded requests: when each came, for which function, with how many tokens.

Columns of numpy, ordered by time; `notes` says everything about them that was not recorded but drawn, left out or
assumed, and is printed with every result. Limits: times are seconds from `origin_s`; a request has one prompt length
and one output length, and nothing is known of its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from control_plane.errors import InvalidRequest

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int32]


WHOLE_S: Final = 600.0


class BadTrace(InvalidRequest):
    """A file that cannot be replayed: which, where and why. `line` counts from 1; None: the file as a whole."""

    default_code = "bad_trace"

    def __init__(self, path: object, line: int | None, reason: str) -> None:
        where = f"{path}" if line is None else f"{path}:{line}"
        super().__init__(f"{where}: {reason}")
        self.line = line


def origin_of(first_s: float) -> float:
    """Where a trace begins whose first request came at this unix time."""
    return first_s - first_s % WHOLE_S


@dataclass(frozen=True, slots=True)
class Trace:
    source: str
    names: tuple[str, ...]
    arrival_s: Floats
    """Ascending, from `origin_s`."""
    function: Ints
    """Places in `names`."""
    prompt_tokens: Ints
    output_tokens: Ints
    length_s: float
    """How long was recorded; the last request may have come long before the end."""
    origin_s: float = 0.0
    """Unix time of second 0, a whole ten minutes of the calendar, as histories count (`origin_of`); 0: not known."""
    notes: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    """Of each function; empty: all of one."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def between(self, from_s: float, until_s: float) -> Trace:
        """The requests of [from_s, until_s), their times unchanged."""
        first, last = np.searchsorted(self.arrival_s, [from_s, until_s])
        return self._rows(slice(int(first), int(last)), f"seconds {from_s:g} to {until_s:g} only")

    def thinned(self, share: float, seed: int) -> Trace:
        """Each request is kept with chance `share`, independently: the mean load falls by it, and bursts get milder."""
        if not 0 < share <= 1:
            raise InvalidRequest(f"a share of {share} cannot be kept: give one above 0 and at most 1")
        if share == 1:
            return self
        kept = np.random.default_rng(seed).random(len(self)) < share
        return self._rows(kept, f"thinned: each request kept with a chance of {share:g} (seed {seed})")

    def of_functions(self, places: Sequence[int]) -> Trace:
        """Those functions alone, in that order."""
        new_place = np.full(len(self.names), -1, np.int32)
        new_place[list(places)] = np.arange(len(places), dtype=np.int32)
        kept = new_place[self.function] >= 0
        rows = self._rows(kept, f"{len(places)} of {len(self.names)} functions")
        return replace(
            rows,
            function=new_place[rows.function],
            names=tuple(self.names[place] for place in places),
            tenants=tuple(self.tenants[place] for place in places) if self.tenants else (),
        )

    def requests_by_function(self) -> NDArray[np.int64]:
        return np.bincount(self.function, minlength=len(self.names)).astype(np.int64)

    def _rows(self, kept: slice | NDArray[np.bool_], note: str) -> Trace:
        return replace(
            self,
            arrival_s=self.arrival_s[kept],
            function=self.function[kept],
            prompt_tokens=self.prompt_tokens[kept],
            output_tokens=self.output_tokens[kept],
            notes=(*self.notes, note),
        )


def together(traces: Sequence[Trace]) -> Trace:
    """Several files as one load: each begins at second 0, and functions of the same name are the same function."""
    if len(traces) == 1:
        return traces[0]
    places: dict[tuple[str, str], int] = {}
    functions = []
    for trace in traces:
        tenants = trace.tenants or ("default",) * len(trace.names)
        own = [places.setdefault(key, len(places)) for key in zip(tenants, trace.names, strict=True)]
        functions.append(np.asarray(own, np.int32)[trace.function])
    arrival_s = np.concatenate([trace.arrival_s for trace in traces])
    order = np.argsort(arrival_s, kind="stable")
    notes = tuple(f"{trace.source}: {note}" for trace in traces for note in trace.notes)
    origins = {trace.origin_s for trace in traces}
    if len(origins) > 1:
        notes = (*notes, "files of different days were laid over one another, each from its own beginning")
    return Trace(
        source=" + ".join(trace.source for trace in traces),
        names=tuple(name for _, name in places),
        tenants=tuple(tenant for tenant, _ in places),
        arrival_s=arrival_s[order],
        function=np.concatenate(functions)[order],
        prompt_tokens=np.concatenate([trace.prompt_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        length_s=max(trace.length_s for trace in traces),
        origin_s=traces[0].origin_s,
        notes=notes,
    )
