"""Kills at random points of streams, and what must hold afterwards. Used by the suite and, larger, by the benchmark.

A round: one request of one of the kinds alone on the service, one victim (replica, agent or gateway) killed by SIGKILL
after a random part of the answer, the answer read to its end by a client that resumes by cursor, or, where it is not
streamed, asks again under its idempotency key. Everything drawn at random comes from one seed, which a failure names.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.client import Client, Endpoint
from tests.chaos.kinds import KINDS, body_of, fault_of, late_text
from tests.chaos.readers import PATH, Answer, Reader, Usual, WholeReader
from tests.support.service import Service

VICTIMS = ("replica", "agent", "gateway")


@dataclass(slots=True)
class Round:
    number: int
    kind: str
    victim: str
    after_share: float
    """Of the undisturbed answer's events, or of its time where it is not streamed."""
    killed: bool = False
    resumes: int = 0
    gap_s: float = 0.0
    """Longest silence between two events after the kill: seconds to the next token."""
    request_id: str = ""
    equal: bool = False
    problem: str = ""


@dataclass(slots=True)
class Report:
    seed: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [
            f"round {r.number} ({r.kind}, {r.victim}, {r.request_id}): {r.problem}" for r in self.rounds if r.problem
        ]


def kill_rounds(
    service: Service,
    model: str,
    *,
    rounds: int,
    seed: int,
    max_tokens: int,
    within_s: float = 90.0,
    victims: Sequence[str] = VICTIMS,
) -> Report:
    """`rounds` kills at random points; every answer is compared with that of the undisturbed run."""
    rng, report = random.Random(seed), Report(seed)
    client = Client(lambda: Endpoint(service.url, service.key), give_up_s=within_s)
    usual: dict[str, Usual] = {}
    kinds = rng.sample(list(KINDS), len(KINDS))

    def read(kind: str, stop: str = "") -> Reader:
        body = body_of(kind, model, max_tokens, stop)
        reader = WholeReader(client, body, within_s) if body.get("stream") is False else Reader(client, body)
        reader.start()
        return reader

    def undisturbed(kind: str, stop: str = "") -> Usual:
        begin_s = time.monotonic()
        reader = read(kind, stop)
        reader.join(within_s)
        if reader.answer is None:
            raise RuntimeError(f"the undisturbed run of {kind} failed: {reader.error}")
        return Usual(reader.answer, len(reader.arrivals_s), time.monotonic() - begin_s)

    stop = late_text(undisturbed("stop").answer.texts[0])
    for number in range(rounds):
        kind, victim = kinds[number % len(kinds)], victims[number % len(victims)]
        stops = stop if kind == "stop" else ""
        if kind not in usual:
            usual[kind] = undisturbed(kind, stops)
            if fault := fault_of(kind, usual[kind].answer):
                raise RuntimeError(f"the undisturbed run of {kind}: {fault}")
        done = Round(number, kind, victim, after_share=rng.uniform(0, 0.9))
        report.rounds.append(done)
        reader = read(kind, stops)
        reader.wait_share(done.after_share, usual[kind], within_s)
        done.killed = service.kill(victim)
        killed_s = time.monotonic()
        if victim == "gateway":
            service.start()
        reader.join(within_s)
        done.request_id, done.resumes = reader.request_id, reader.resumes
        after = [killed_s] + [at for at in reader.arrivals_s if at > killed_s]
        done.gap_s = max((b - a for a, b in itertools.pairwise(after)), default=0.0)
        expected = usual[kind].answer
        if reader.answer is None:
            done.problem = f"no answer: {reader.error or 'still reading'}"
        elif reader.seqs != sorted(set(reader.seqs)):
            done.problem = f"an event came twice or out of order: {reader.seqs}"
        elif reader.answer.tokens != expected.tokens:
            done.problem = f"{reader.answer.tokens} tokens instead of {expected.tokens}"
        elif reader.answer != expected:
            done.problem = f"changed: {first_difference(reader.answer, expected)}"
        else:
            again = client.resume(PATH, done.request_id)
            texts = [""] * reader.n
            for event in again:
                for choice in range(reader.n):
                    texts[choice] += event.text(choice)
            done.equal = tuple(texts) == reader.answer.texts
            done.problem = "" if done.equal else "read again from the start, the text is another"
    return report


def first_difference(one: Answer, other: Answer) -> str:
    for choice, (a, b) in enumerate(zip(one.texts, other.texts, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"choice {choice} at character {at}: {a[at : at + 40]!r} instead of {b[at : at + 40]!r}"
    if one.finishes != other.finishes:
        return f"ended with {one.finishes} instead of {other.finishes}"
    at = next((i for i, (x, y) in enumerate(zip(one.logprobs, other.logprobs, strict=False)) if x != y), 0)
    return f"log-probability {at}: {one.logprobs[at : at + 2]} instead of {other.logprobs[at : at + 2]}"


def audit(data_dir: Path) -> dict[str, int]:
    """Reads the database itself: every log gapless, every request accounted for, every replica's time conserved.

    Raises AssertionError with what does not add up; returns the counts.
    """
    with sqlite3.connect(data_dir / "stoker.db") as db:
        # One look for all: the service may be closing an account between two.
        db.execute("BEGIN")
        states = dict(db.execute("SELECT state, count(*) FROM requests GROUP BY state").fetchall())
        open_states = {
            state: n for state, n in states.items() if state not in ("done", "cancelled", "refused", "failed")
        }
        assert not open_states, f"requests without an outcome: {open_states}"
        logs: dict[str, list[tuple[int, int]]] = {}
        for request_id, first_seq, count in db.execute(
            "WITH RECURSIVE chain (request_id, previous, first_seq, last_seq) AS ("
            "SELECT r.id, t.previous, t.first_seq, t.last_seq FROM requests r JOIN token_log t ON t.id = r.log_head "
            "UNION ALL SELECT c.request_id, t.previous, t.first_seq, t.last_seq "
            "FROM token_log t JOIN chain c ON t.id = c.previous) "
            "SELECT request_id, first_seq, last_seq - first_seq + 1 FROM chain ORDER BY request_id, first_seq"
        ):
            logs.setdefault(request_id, []).append((first_seq, count))
        for request_id, groups in logs.items():
            expected = 1
            for first_seq, count in groups:
                assert first_seq == expected, (
                    f"the log of {request_id} has a gap or a double at {expected}: {first_seq}"
                )
                expected += count
        held = audit_ledger(db)
    return {"requests": sum(states.values()), "logs": len(logs), "replicas": held, **states}


def audit_ledger(db: sqlite3.Connection) -> int:
    """Attributed + cold start + idle + overhead + unreported = held, for every replica that has ended."""
    parts: dict[str, int] = {}
    for replica_id, total in db.execute(
        "SELECT replica_id, sum(device_us) FROM ledger WHERE replica_id IS NOT NULL GROUP BY replica_id"
    ):
        parts[replica_id] = total
    for replica_id, held in db.execute("SELECT replica_id, held_us FROM replica_accounts WHERE closed_us IS NOT NULL"):
        assert parts.get(replica_id) == held, f"{replica_id}: parts sum to {parts.get(replica_id)}, held {held}"
    return len(parts)
