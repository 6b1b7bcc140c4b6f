"""Clients that read one answer to its end over whatever happens to the service: streamed, or whole."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

from control_plane.client import Client
from control_plane.resumption import Call, Unreachable

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client has in its hands at the end."""

    texts: tuple[str, ...]
    tokens: int
    logprobs: tuple[float, ...]
    finishes: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Usual:
    """How the undisturbed run went."""

    answer: Answer
    events: int
    seconds: float


class Reader(threading.Thread):
    """Reads one stream to its end and remembers when each event came."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.stream = client.stream(PATH, body)
        self.n = int(body.get("n", 1))
        self.arrivals_s: list[float] = []
        self.seqs: list[int] = []
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self.moved = threading.Condition()

    @property
    def request_id(self) -> str:
        return self.stream.request_id or ""

    @property
    def resumes(self) -> int:
        return self.stream.resumes

    def run(self) -> None:
        try:
            self.answer = self._read()
        except BaseException as error:
            self.error = error
        with self.moved:
            self.moved.notify_all()

    def _read(self) -> Answer:
        texts, logprobs, tokens = [""] * self.n, [], 0
        finishes: list[str | None] = [None] * self.n
        for event in self.stream:
            if event.carries_tokens:
                self.seqs.append(event.seq)
            for choice in event.body.get("choices", ()):
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                finishes[choice["index"]] = choice.get("finish_reason") or finishes[choice["index"]]
            for index in range(self.n):
                texts[index] += event.text(index)
            if event.body.get("usage"):
                tokens = event.body["usage"]["completion_tokens"]
            with self.moved:
                self.arrivals_s.append(time.monotonic())
                self.moved.notify_all()
        return Answer(tuple(texts), tokens, tuple(logprobs), tuple(finishes))

    def wait_share(self, share: float, usual: Usual, within_s: float) -> None:
        """Returns when about this share of the answer has come, or all of it."""
        count = int(share * usual.events)
        with self.moved:
            self.moved.wait_for(lambda: len(self.arrivals_s) >= count or self._over, timeout=within_s)

    @property
    def _over(self) -> bool:
        return self.answer is not None or self.error is not None


class WholeReader(Reader):
    """Asks for an answer that is not streamed, again and again under one key until it has it."""

    def __init__(self, client: Client, body: dict[str, Any], give_up_s: float) -> None:
        super().__init__(client, body)
        self._client = client
        self._give_up_s = give_up_s
        self._id = ""
        self._tries = 0
        headers = {"Idempotency-Key": uuid.uuid4().hex, "Content-Type": "application/json"}
        self._call = Call("POST", PATH, headers, json.dumps(body).encode())

    @property
    def request_id(self) -> str:
        return self._id

    @property
    def resumes(self) -> int:
        return max(0, self._tries - 1)

    def _read(self) -> Answer:
        deadline_s = time.monotonic() + self._give_up_s
        while True:
            self._tries += 1
            try:
                connection, response = self._client._send(self._call, self._give_up_s)
                with contextlib.closing(connection):
                    status, content = response.status, response.read()
            except (Unreachable, OSError, http.client.HTTPException) as error:
                status, content = 503, repr(error).encode()
            if status == 200:
                break
            if status not in (502, 503, 504) or time.monotonic() > deadline_s:
                raise RuntimeError(f"HTTP {status}: {content.decode(errors='replace')}")
            time.sleep(0.05)
        body = json.loads(content)
        self._id = body["id"]
        self.arrivals_s.append(time.monotonic())
        choices = body["choices"]
        logprobs = [p for choice in choices for p in (choice["logprobs"] or {}).get("token_logprobs", [])]
        return Answer(
            tuple(choice["text"] for choice in choices),
            body["usage"]["completion_tokens"],
            tuple(logprobs),
            tuple(choice["finish_reason"] for choice in choices),
        )

    def wait_share(self, share: float, usual: Usual, within_s: float) -> None:
        """Nothing tells how far it is but the time the undisturbed run took."""
        with self.moved:
            self.moved.wait_for(lambda: self._over, timeout=min(share * usual.seconds, within_s))
