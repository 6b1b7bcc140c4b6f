"""Kills at random points of streams, and what must hold afterwards. Used by the suite and, larger, by the benchmark.

A round: one request (greedy, seeded with log-probabilities, or n = 2) alone on the service, one victim (replica, agent
or gateway) killed with SIGKILL after a random number of tokens, the stream read to its end by a client that resumes by
cursor. Everything drawn at random comes from one seed, which a failure names.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_plane.client import Client, Endpoint
from tests.support.service import Service

KINDS = ("greedy", "seeded", "two choices")
VICTIMS = ("replica", "agent", "gateway")
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a stoker who kept the fire of a steam engine alive, day and night, and",
    "List the first ten prime numbers, and explain why each of them is prime. 2 is prime because",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client has in its hands at the end of a stream."""

    texts: tuple[str, ...]
    tokens: int
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class Round:
    number: int
    kind: str
    victim: str
    after_events: int
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


def body_of(kind: str, model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    if kind == "greedy":
        return body | {"temperature": 0}
    if kind == "seeded":
        return body | {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "logprobs": 1}
    return body | {"temperature": 0.8, "seed": 99, "n": 2}


class Reader(threading.Thread):
    """Reads one stream to its end and remembers when each event came."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.stream = client.stream("/v1/completions", body)
        self.n = int(body.get("n", 1))
        self.arrivals_s: list[float] = []
        self.seqs: list[int] = []
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self.moved = threading.Condition()

    def run(self) -> None:
        texts, logprobs, tokens = [""] * self.n, [], 0
        try:
            for event in self.stream:
                if event.carries_tokens:
                    self.seqs.append(event.seq)
                for choice in event.body.get("choices", ()):
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                for choice in range(self.n):
                    texts[choice] += event.text(choice)
                if event.body.get("usage"):
                    tokens = event.body["usage"]["completion_tokens"]
                with self.moved:
                    self.arrivals_s.append(time.monotonic())
                    self.moved.notify_all()
            self.answer = Answer(tuple(texts), tokens, tuple(logprobs))
        except BaseException as error:
            self.error = error
        with self.moved:
            self.moved.notify_all()

    def wait_events(self, count: int, within_s: float) -> None:
        with self.moved:
            self.moved.wait_for(lambda: len(self.arrivals_s) >= count or not self.is_alive(), timeout=within_s)


def kill_rounds(
    service: Service, model: str, *, rounds: int, seed: int, max_tokens: int, within_s: float = 90.0
) -> Report:
    """`rounds` kills at random points; every answer is compared with that of the undisturbed run."""
    rng, report = random.Random(seed), Report(seed)
    client = Client(lambda: Endpoint(service.url, service.key), give_up_s=within_s)
    undisturbed: dict[tuple[str, str], Answer] = {}

    def read(kind: str, prompt: str) -> Reader:
        reader = Reader(client, body_of(kind, model, prompt, max_tokens))
        reader.start()
        return reader

    for number in range(rounds):
        kind, prompt = rng.choice(KINDS), rng.choice(PROMPTS)
        victim = VICTIMS[number % len(VICTIMS)]
        if (kind, prompt) not in undisturbed:
            reader = read(kind, prompt)
            reader.join(within_s)
            if reader.answer is None:
                raise RuntimeError(f"the undisturbed run failed: {reader.error}")
            undisturbed[kind, prompt] = reader.answer
        events = max_tokens * (2 if kind == "two choices" else 1)
        done = Round(number, kind, victim, after_events=rng.randrange(0, int(events * 0.9)))
        report.rounds.append(done)
        reader = read(kind, prompt)
        reader.wait_events(done.after_events, within_s)
        done.killed = service.kill(victim)
        killed_s = time.monotonic()
        if victim == "gateway":
            service.start()
        reader.join(within_s)
        done.request_id, done.resumes = reader.stream.request_id or "", reader.stream.resumes
        after = [killed_s] + [at for at in reader.arrivals_s if at > killed_s]
        done.gap_s = max((b - a for a, b in itertools.pairwise(after)), default=0.0)
        if reader.answer is None:
            done.problem = f"no answer: {reader.error or 'still reading'}"
        elif reader.seqs != sorted(set(reader.seqs)):
            done.problem = f"an event came twice or out of order: {reader.seqs}"
        elif reader.answer.tokens != undisturbed[kind, prompt].tokens:
            done.problem = f"{reader.answer.tokens} tokens instead of {undisturbed[kind, prompt].tokens}"
        elif reader.answer != undisturbed[kind, prompt]:
            done.problem = f"changed: {first_difference(reader.answer, undisturbed[kind, prompt])}"
        else:
            again = client.resume("/v1/completions", done.request_id)
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
    at = next((i for i, (x, y) in enumerate(zip(one.logprobs, other.logprobs, strict=False)) if x != y), 0)
    return f"log-probability {at}: {one.logprobs[at : at + 2]} instead of {other.logprobs[at : at + 2]}"


def audit(data_dir: Path) -> dict[str, int]:
    """Reads the database itself: every log gapless, every request accounted for, every replica's time conserved.

    Raises AssertionError with what does not add up; returns the counts.
    """
    with sqlite3.connect(data_dir / "stoker.db") as db:
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
