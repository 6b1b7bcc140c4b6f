"""Every check of the chaos tests can fail: each is shown what it is there to find, and what it must not complain of."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.books import Ended, Turn
from tests.chaos.checks import (
    Damaged,
    Verdict,
    check_accounts,
    check_answers,
    check_delivery,
    check_kv,
    check_resumes,
)
from tests.chaos.damage import DAMAGES, damage
from tests.chaos.load import KINDS, Answer, Ask, Told, first_difference
from tests.chaos.schedule import LOCAL, schedule
from tests.chaos.stored import FolderObjects
from tests.chaos.telling import late_piece

GREEDY = KINDS[0]
WHOLE = Answer(("one two three",), 3, ("length",), ((-0.5, -1.0, -0.25),))
DONE = {"cmpl-1": Ended("done", 3, "")}


def told(**fields: object) -> Told:
    given = Told(Ask(1, GREEDY, 0, 5), ["one two three"], [[-0.5, -1.0, -0.25]], {0: "length"}, 3, [1, 2, 3], "cmpl-1")
    given.ended = True
    for name, value in fields.items():
        setattr(given, name, value)
    return given


def answers(*tolds: Told, again: Answer = WHOLE, rounds: bool = False) -> Verdict:
    verdict = Verdict()
    check_answers(tolds, lambda _: WHOLE, lambda _: again, verdict, lambda _: rounds)
    return verdict


def test_an_undisturbed_answer_passes() -> None:
    verdict = answers(told())
    check_delivery([told()], DONE, (), verdict)
    assert not verdict.problems


@pytest.mark.parametrize(
    "fields",
    [
        {"texts": ["one two threE"]},
        {"texts": ["one two"]},
        {"tokens": 4},
        {"finishes": {0: "stop"}},
        {"logprobs": [[-0.5, -1.0, -0.26]]},
        {"logprobs": [[-0.5, -1.0]]},
        {"delivered_first": ("one tvo",)},
        {"ended": False, "left": True, "texts": ["one tvo"]},
    ],
)
def test_any_change_of_an_answer_is_found(fields: dict[str, object]) -> None:
    assert answers(told(**fields)).changed


def test_rounding_of_log_probabilities_is_no_change() -> None:
    near = ((-0.5, -1.00005, -0.25),)
    assert not answers(told(logprobs=[list(near[0])]), again=replace(WHOLE, logprobs=near)).changed


def test_an_answer_that_company_gives_as_well_is_counted_apart() -> None:
    verdict = answers(told(texts=["one two four"]), again=replace(WHOLE, texts=("one two four",)), rounds=True)
    assert verdict.rounded and not verdict.changed


def test_a_journal_that_tells_something_else_than_was_delivered_is_found() -> None:
    unseeded = next(kind for kind in KINDS if not kind.exact)
    assert answers(told(ask=Ask(1, unseeded, 0, 5)), again=replace(WHOLE, texts=("one two thre",))).changed


def test_an_event_that_comes_twice_is_found() -> None:
    verdict = Verdict()
    check_delivery([told(seqs=[1, 2, 2, 3])], DONE, (), verdict)
    assert verdict.doubled


@pytest.mark.parametrize("code", ["lost", "client", ""])
def test_a_request_without_an_end_is_lost(code: str) -> None:
    verdict = Verdict()
    check_delivery([told(ended=False, error_code=code)], {}, ("storage_unavailable",), verdict)
    assert verdict.lost


def test_a_refusal_needs_a_fault_that_excuses_it() -> None:
    refused = told(ended=False, error_code="storage_unavailable", error="the database is locked")
    strict, excusing = Verdict(), Verdict()
    check_delivery([refused], {}, (), strict)
    check_delivery([refused], {}, ("storage_unavailable",), excusing)
    assert strict.refused and not excusing.refused


def turn(**fields: object) -> Turn:
    given = {"request_id": "cmpl-1", "epoch": 2, "replica_id": "rep-1", "after_seq": 9, "last_seq": 9}
    return Turn(**{"loaded_tokens": 32, **given, "exact": True, "detail": "", **fields})  # type: ignore[arg-type]


DAMAGE = Damaged(7, "object flipped", "cmpl-1", 1, 0, 32, 64, single=True)


@pytest.mark.parametrize(
    ("turns", "wrong", "seen"),
    [
        ([turn(loaded_tokens=64)], True, 0),
        ([turn(loaded_tokens=64, detail="computed up to 16 while the rest is read: 1 s")], True, 0),
        ([turn(loaded_tokens=64, detail="computed up to 64 while the rest is read: 1 s")], False, 0),
        ([turn(detail="[32, 64) of choice 0: its bytes do not have the digest")], False, 1),
        ([turn(loaded_tokens=0)], False, 0),
        ([turn(epoch=1, loaded_tokens=64)], False, 0),
        ([turn(loaded_tokens=None, after_seq=0), turn(epoch=3, loaded_tokens=64)], False, 0),
        ([turn(loaded_tokens=None), turn(epoch=3, loaded_tokens=64)], True, 0),
        ([turn(request_id="cmpl-2", loaded_tokens=64)], False, 0),
        ([], False, 0),
    ],
)
def test_kv_loaded_across_a_damaged_chunk_is_wrong_kv(turns: list[Turn], wrong: bool, seen: int) -> None:
    verdict = Verdict()
    check_kv([DAMAGE], turns, verdict)
    assert bool(verdict.wrong_kv) is wrong and verdict.misses_seen == seen


def test_fewer_exact_resumes_than_promised_are_a_problem() -> None:
    verdict = Verdict()
    check_resumes([turn(exact=index > 0) for index in range(19)], verdict)
    assert any("18 of 19" in problem for problem in verdict.problems)
    check_resumes([turn()], verdict)
    assert not verdict.problems


def test_first_attempts_are_no_resumes() -> None:
    verdict = Verdict()
    check_resumes([turn(after_seq=0, exact=False), turn(loaded_tokens=None, exact=None)], verdict)
    assert verdict.resumes == 0


@pytest.mark.parametrize(
    "ended", [Ended("running", 3, ""), Ended("queued", 0, ""), Ended("failed", 3, ""), Ended("refused", 0, "")]
)
def test_a_request_without_outcome_or_reason_is_unaccounted(ended: Ended) -> None:
    verdict = Verdict()
    check_accounts({"cmpl-1": ended}, (), (), verdict)
    assert verdict.unaccounted


def test_faults_of_log_and_ledger_are_problems() -> None:
    verdict = Verdict()
    check_accounts(DONE, ["the log of cmpl-1 has a gap"], ["rep-1: its parts sum to 3 us, held were 4"], verdict)
    assert len(verdict.problems) == 2


def test_a_seed_gives_the_same_faults_and_asks_again() -> None:
    assert schedule(5, 60) == schedule(5, 60) != schedule(6, 60)
    assert [Ask.drawn(5, n, KINDS, 96) for n in range(40)] == [Ask.drawn(5, n, KINDS, 96) for n in range(40)]


def test_a_schedule_holds_every_kind_before_any_repeats() -> None:
    names = [fault.name for fault in schedule(5, len(LOCAL) + 10)]
    assert set(names[: len(LOCAL)]) == set(LOCAL)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_object_is_another(tmp_path: Path, how: str) -> None:
    path, content = tmp_path / "object", os.urandom(1000)
    path.write_bytes(content)
    spoiled = damage(FolderObjects(tmp_path), "object", how, 123_456_789, b"another")
    assert spoiled is not None and spoiled.spoils(0, 1000)
    assert not path.exists() if how == "deleted" else path.read_bytes() != content
    assert not damage(FolderObjects(tmp_path), "missing", how, 1)


def test_a_cut_spoils_only_what_lies_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(bytes(range(100)))
    spoiled = damage(FolderObjects(tmp_path), "object", "truncated", 60)
    assert spoiled is not None and not spoiled.spoils(0, 60) and spoiled.spoils(40, 21)


def test_first_difference_of_equal_answers_is_nowhere() -> None:
    assert first_difference(WHOLE, WHOLE) == ""


def test_a_late_piece_comes_first_in_the_second_half() -> None:
    text = "abcdefghijklmnopabcdefghijk12345"
    piece = late_piece(text)
    assert text.find(piece) >= len(text) // 2
