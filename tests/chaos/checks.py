"""What must hold after any sequence of faults, as pure checks of what clients were told against what was recorded.

Each gives what does not hold, in words; `tests/chaos/test_checks.py` shows for each that it can fail. Limits: answers
are compared with the run made alone, so log-probabilities may differ by rounding (`LOGPROBS_WITHIN`): a batch of
several rows is multiplied in another order than one row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.books import ENDED, Ended, Turn
from tests.chaos.load import Answer, Told, first_difference

LOGPROBS_WITHIN = 1e-3
EXACT_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Damaged:
    """A chunk that a request's record names and that is not what the record says (any more)."""

    fault: int
    what: str
    request_id: str
    epoch: int
    """The request's when it was done: attempts after it meet the damage."""
    choice: int
    start: int
    end: int
    single: bool
    """No other record of the request covers `start`, and it has one choice: KV from there on cannot be loaded."""


@dataclass(slots=True)
class Verdict:
    """By name of the property, what breaks it."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    wrong_kv: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    resumes: int = 0
    exact_resumes: int = 0
    inexact: list[str] = field(default_factory=list)
    misses_seen: int = 0
    """Damaged chunks that a resume met and left out, with its reason in the attempt's record."""
    rounded: list[str] = field(default_factory=list)
    """Answers that an undisturbed run in a batch of another size gives as well."""

    @property
    def exact_share(self) -> float:
        return self.exact_resumes / self.resumes if self.resumes else 1.0

    @property
    def problems(self) -> list[str]:
        named = ("lost", "doubled", "changed", "wrong_kv", "refused", "unaccounted", "left_behind")
        found = [f"{name}: {text}" for name in named for text in getattr(self, name)]
        if self.exact_share < EXACT_SHARE:
            found.append(f"{self.exact_resumes} of {self.resumes} resumes were exact: {'; '.join(self.inexact[:5])}")
        return found


def who(told: Told) -> str:
    return f"ask {told.ask.number} ({told.ask.kind.name}, prompt {told.ask.prompt}, {told.request_id or 'no id'})"


def check_delivery(tolds: Iterable[Told], ends: Mapping[str, Ended], excused: Collection[str], into: Verdict) -> None:
    """Lost: no end and no reason. Refused: a reason that no fault of the run excuses. Doubled: an event twice."""
    for told in tolds:
        if told.seqs != sorted(set(told.seqs)):
            into.doubled.append(f"{who(told)}: events {told.seqs}")
        if told.ended or told.left:
            continue
        recorded = ends.get(told.request_id)
        if told.error_code in ("lost", "client", ""):
            state = recorded.state if recorded else "unknown to the journal"
            into.lost.append(f"{who(told)}: {told.error or 'no end'} ({state})")
        elif told.error_code not in excused:
            into.refused.append(f"{who(told)}: {told.error_code}: {told.error}")


def check_answers(
    tolds: Iterable[Told],
    undisturbed: Callable[[Told], Answer],
    again: Callable[[Told], Answer | None],
    into: Verdict,
    rounds: Callable[[Told], bool] = lambda told: False,
) -> None:
    """Changed: not what the undisturbed run gives; not what the journal gives when it is read again from the start; or
    an earlier reader was given something else. `rounds`: whether an undisturbed run in company gives it too."""
    for told in tolds:
        if told.ended:
            for early, whole in zip(told.delivered_first, told.texts, strict=False):
                if not whole.startswith(early):
                    into.changed.append(f"{who(told)}: an earlier reader was given {early[-40:]!r}")
            repeated = again(told)
            if repeated is not None and (difference := first_difference(told.answer, repeated)):
                into.changed.append(f"{who(told)}: read again from the start, {difference}")
        if told.ask.kind.exact and (told.ended or told.left):
            whole = undisturbed(told)
            if told.ended:
                difference = first_difference(told.answer, whole, LOGPROBS_WITHIN)
            else:
                early = told.texts[0]
                difference = "" if whole.texts[0].startswith(early) else f"given was {early[-40:]!r}"
            if difference and rounds(told):
                into.rounded.append(f"{who(told)}: {difference}")
            elif difference:
                into.changed.append(f"{who(told)}: {difference}")


def check_kv(damaged: Iterable[Damaged], turns: Sequence[Turn], into: Verdict) -> None:
    """Wrong KV: the first attempt after a damage loaded a run of tokens that the damaged chunk lies in, and its record
    does not say that the chunk was left out. (An attempt that names it has computed its part again, and so has one that
    made its first tokens and loaded nothing: it says nothing of what it left out, and its own KV is what is next.)"""
    for one in damaged:
        later = [t for t in turns if t.request_id == one.request_id and t.epoch > one.epoch]
        first = next((t for t in later if t.loaded_tokens is not None or (t.last_seq and not t.after_seq)), None)
        if first is None or first.loaded_tokens is None:
            continue
        if f"[{one.start}, {one.end}) of choice {one.choice}" in first.detail:
            into.misses_seen += 1
            continue
        computed_to = int(found.group(1)) if (found := re.search(r"computed up to (\d+)", first.detail)) else 0
        if one.single and computed_to <= one.start < computed_to + first.loaded_tokens:
            into.wrong_kv.append(
                f"{one.request_id} epoch {first.epoch} loaded {first.loaded_tokens} tokens from {computed_to} on, with "
                f"[{one.start}, {one.end}) after fault {one.fault} ({one.what}): {first.detail or 'no miss recorded'}"
            )


def check_resumes(turns: Iterable[Turn], into: Verdict) -> None:
    """Attempts that went on after a token, and how many of them say that they were exact."""
    for turn in turns:
        if turn.after_seq > 0 and turn.loaded_tokens is not None:
            into.resumes += 1
            into.exact_resumes += bool(turn.exact)
            if not turn.exact:
                into.inexact.append(f"{turn.request_id} epoch {turn.epoch}: {turn.detail or 'no reason'}")


def check_accounts(
    ends: Mapping[str, Ended], log_faults: Iterable[str], ledger_faults: Iterable[str], into: Verdict
) -> None:
    """Accepted = completed + cancelled + refused with a reason; every log whole; every microsecond charged once."""
    for request_id, ended in ends.items():
        if ended.state not in ENDED:
            into.unaccounted.append(f"{request_id} is {ended.state}, without an outcome")
        elif ended.state in ("refused", "failed") and not ended.error_code:
            into.unaccounted.append(f"{request_id} is {ended.state} without a reason")
    into.doubled += log_faults
    into.unaccounted += ledger_faults
