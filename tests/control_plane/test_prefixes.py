"""What a gateway remembers of the prompts its replicas have had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autoscaler.admission import left_tokens
from control_plane.lanes import Lane, Seat
from control_plane.prefixes import KEPT, STRIDE, Prefixes, chain_of

BASE = list(range(1000))


def test_a_prompt_is_known_as_far_as_it_begins_like_an_earlier_one() -> None:
    known = Prefixes()
    known.note(chain_of(BASE))
    assert known.held_tokens(chain_of(BASE)) == 1000 // STRIDE * STRIDE
    assert known.held_tokens(chain_of([*BASE[:200], *reversed(BASE)])) == 3 * STRIDE
    assert known.held_tokens(chain_of([1, *BASE])) == 0
    assert known.held_tokens(chain_of(BASE[:10])) == 0


def test_the_same_stride_after_another_beginning_is_another() -> None:
    one, other = chain_of(BASE), chain_of([*BASE[64:128], *BASE[64:]])
    assert not set(one) & set(other)


def test_what_was_not_used_lately_is_forgotten_the_deepest_first() -> None:
    known = Prefixes()
    known.note(chain_of(BASE))
    for number in range(KEPT // 15):
        known.note(chain_of([number + 5000] * 64 + BASE[: 64 * 14]))
    held = known.held_tokens(chain_of(BASE))
    assert held < 1000 // STRIDE * STRIDE
    assert len(known._known) == KEPT


# --- where requests go ---


def request(prompt: list[int], name: str) -> Any:
    sampling = SimpleNamespace(n=1, max_tokens=100)
    return SimpleNamespace(
        request_id=name, origin=SimpleNamespace(prompt=tuple(prompt), sampling=sampling), seat=None, received=0
    )


def lane_of(*names: str) -> Lane:
    lane = Lane(("default", "fn"), "model")
    link: Any = SimpleNamespace(set_busy=lambda busy: None)
    for name in names:
        lane.seats[name] = Seat(name, "s", lane.key, 1, "model", 8, link)
    return lane


def place(lane: Lane, prompt: list[int], name: str) -> tuple[str, str]:
    wanted = request(prompt, name)
    chosen = lane.choose(wanted)
    assert chosen is not None
    chosen[0].take(wanted)
    return chosen[0].replica_id, "" if chosen[1] is None else chosen[1].reason


def test_a_conversation_goes_back_to_the_replica_that_had_it_until_its_queue_costs_more() -> None:
    lane = lane_of("a", "b")
    first, _ = place(lane, BASE, "1")
    other, _ = place(lane, list(reversed(BASE)), "2")
    assert first != other, "an unknown prompt goes where less runs"
    again, _ = place(lane, [*BASE, 7], "3")
    assert again == first
    lane.speeds = lambda: (0.05, 100_000.0)
    quick, reason = place(lane, [*BASE, 8], "4")
    assert quick == other and reason.startswith(f"the queue of {first} costs more than the 960 tokens it holds")


def test_of_replicas_that_are_as_soon_the_one_with_the_least_work_left_is_taken() -> None:
    lane = lane_of("a", "b")
    running = {name: request([number], name) for number, name in enumerate(("a", "b"))}
    for name, each in running.items():
        lane.seats[name].take(each)
    running["a"].received, running["b"].received = 10, 90
    chosen, reason = place(lane, [5], "new")
    assert chosen == "b" and reason == "of those with the soonest first token, the least work left"
    # Answers turn out to be short: who has made ten is nearly done, who has made ninety will make all it may.
    lane = lane_of("a", "b")
    for name, each in running.items():
        lane.seats[name].take(each)
    lane.left_tokens = lambda: lambda made, most: left_tokens(made, most, [12, 12, 12, 12])
    assert place(lane, [5], "new")[0] == "a"
