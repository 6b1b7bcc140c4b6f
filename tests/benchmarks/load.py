"""Load on any OpenAI-compatible completions server, measured the same way for every one of them.

Prompts of 117 SmolLM2 tokens, 64 answer tokens with `ignore_eos`; output tokens/s over the whole run, prefill included.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from dataclasses import dataclass

from tests.benchmarks.report import median

SHORT_PROMPT = "The capital of France is"
"""Five SmolLM2 tokens."""


def long_prompt(number: int) -> str:
    return f"{number} " + " ".join(f"word{i}" for i in range(42))


@dataclass(frozen=True, slots=True)
class Streamed:
    first_token_s: float
    total_s: float
    tokens: int


def stream(url: str, model: str, prompt: str, tokens: int, key: str = "none") -> Streamed:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    start, first, count, used = time.perf_counter(), 0.0, 0, None
    with urllib.request.urlopen(request, timeout=900) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or b"[DONE]" in line:
                continue
            first = first or time.perf_counter() - start
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            if event.get("usage"):
                used = event["usage"]["completion_tokens"]
            count += bool(event.get("choices"))
    return Streamed(first, time.perf_counter() - start, used if used is not None else count)


def at_once(url: str, model: str, n: int, tokens: int = 64, key: str = "none", salt: int = 0) -> dict[str, float]:
    """`n` requests at once; output tokens/s and the median time to the first token."""
    results: list[Streamed] = []

    def one(number: int) -> None:
        results.append(stream(url, model, long_prompt(number), tokens, key))

    threads = [threading.Thread(target=one, args=(salt * 1000 + i,)) for i in range(n)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - start
    if len(results) < n:
        raise RuntimeError(f"{n - len(results)} of {n} requests failed at {url}")
    return {
        "at_once": n,
        "output_tokens_per_s": sum(r.tokens for r in results) / wall,
        "median_first_token_s": median(r.first_token_s for r in results),
    }
