"""The states of a pool entry and the moves between them.

    absent -> loading -> ready -> evicting -> absent
                 └───────────┴──> quarantined -> absent

Loading is both preparing and verifying what an earlier agent left. Quarantined files are never served; they are
removed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from model_loader.errors import LoaderError


class EntryState(enum.StrEnum):
    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    EVICTING = "evicting"
    QUARANTINED = "quarantined"


TRANSITIONS: Final[Mapping[EntryState, frozenset[EntryState]]] = {
    EntryState.ABSENT: frozenset({EntryState.LOADING}),
    EntryState.LOADING: frozenset({EntryState.READY, EntryState.QUARANTINED}),
    EntryState.READY: frozenset({EntryState.EVICTING, EntryState.QUARANTINED}),
    EntryState.EVICTING: frozenset({EntryState.ABSENT}),
    EntryState.QUARANTINED: frozenset({EntryState.ABSENT}),
}


class IllegalTransition(LoaderError):
    code = "pool_state_invalid"


def transition(state: EntryState, to: EntryState) -> EntryState:
    if to not in TRANSITIONS[state]:
        raise IllegalTransition(f"a pool entry cannot go from {state} to {to}")
    return to
