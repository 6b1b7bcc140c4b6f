"""`stoker demo`: the whole story on a real model, told as it happens; every claim is checked and a broken one fails.

Zero -> one request wakes it and streams -> zero again, memory returned -> woken from warm -> a replica killed in the
middle of a stream whose text arrives whole -> what each of these cost. Nothing is simulated, nothing outlives it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Final

from control_plane.cli import demo_costs
from control_plane.cli.demo_service import DemoService, is_gone, private_service, processes_of
from control_plane.cli.demo_story import Story
from control_plane.cli.failure import CommandError
from control_plane.cli.functions import await_import
from control_plane.cli.invoke import CHAT
from control_plane.cli.output import note, print_json, seconds, size
from control_plane.client import ClientError

NAME: Final = "smol"
QUESTION: Final = "What is the capital of France?"
STORY: Final = "Tell me a short story about a lighthouse keeper and a storm."
STORY_TOKENS: Final = 120
KILL_AFTER_TOKENS: Final = 40
KEEP_ALIVE_S: Final = 1.5
PRICE: Final = "0.36"
"""Dollars per device and hour: a hundred micro-dollars a second, so that the table has something to show."""
BASELINE_TOLERANCE_BYTES: Final = 64 * 1024 * 1024
START_WITHIN_S: Final = 120.0


@dataclass(slots=True)
class Reading:
    """One request as its reader saw it."""

    text: str = ""
    tokens: int = 0
    first_us: int = 0
    total_us: int = 0
    longest_gap_us: int = 0
    request_id: str = ""
    killed_pid: int = 0
    finish: str | None = None


def tell_story(model: str, keep: bool, as_json: bool) -> None:
    story = Story(quiet=as_json)
    began_s = time.monotonic()
    with private_service(keep=keep) as service:
        try:
            live_through(story, service, model)
        except (CommandError, ClientError):
            note(service.diagnosis())
            raise
    place = service.place.path
    left = [*processes_of(place), *(path for path in service.shared_memory() if path.exists())]
    story.check("nothing is left, neither processes nor shared memory", not left, ", ".join(map(str, left)))
    took_s = time.monotonic() - began_s
    if as_json:
        print_json({"seconds": round(took_s, 3), "promises": story.promises, "requests": story.requests})
    if story.broken:
        raise CommandError(
            f"{len(story.broken)} of {len(story.promises)} promises were broken: {story.broken[0]['promise']}",
            "run it again with --keep and look into the data directory",
            code="demo_failed",
        )
    story.say(f"\nAll {len(story.promises)} promises kept in {took_s:.0f} s." + (f" Kept: {place}" if keep else ""))


def live_through(story: Story, service: DemoService, model: str) -> None:
    story.chapter("A service of its own")
    story.say(f"   {service.client.endpoint.url}, data in {service.place.path}, ready in {service.started_s:.2f} s")
    deploy(story, service, model)

    service.until("the slot to be ready", lambda: service.slot()["memory_baseline_bytes"] > 0, START_WITHIN_S)

    story.chapter("One HTTP request wakes it")
    show_curl(story, service)
    first = read(story, service, QUESTION, max_tokens=40)
    remember(story, service, "woken from zero", first)
    story.check("the answer is sensible: it names Paris", "paris" in first.text.lower())

    back_to_zero(story, service)

    story.chapter("A second request finds a warm worker and a prepared checkpoint")
    service.until("a warm worker", lambda: service.slot().get("warm_workers", 0) > 0, START_WITHIN_S)
    second = read(story, service, STORY, max_tokens=STORY_TOKENS)
    remember(story, service, "woken from warm", second)
    replica = service.living()[0]
    story.check("a waiting worker took it", bool(replica.get("warm_worker")))
    tiers = {stage["tier"] for stage in replica.get("stages", ()) if stage.get("tier")}
    story.check("the weights were mapped from shared memory", "pool" in tiers, "tiers: " + ", ".join(sorted(tiers)))

    back_to_zero(story, service)

    story.chapter(f"The same again, but its replica is killed after {KILL_AFTER_TOKENS} tokens")
    third = read(story, service, STORY, max_tokens=STORY_TOKENS, kill_after=KILL_AFTER_TOKENS)
    remember(story, service, "killed in mid-stream", third)
    story.check("the replica was killed in the middle of the stream", third.killed_pid > 0, f"pid {third.killed_pid}")
    story.check(
        "the text arrived whole: byte for byte what the undisturbed run said",
        third.text == second.text and len(third.text) > 0,
        f"{third.tokens} tokens, longest pause {seconds(third.longest_gap_us)}",
    )
    why = service.client.request("GET", f"/api/v1/why/{third.request_id}")
    attempts = why.get("attempts") or []
    story.check("a second replica carried it on", len(attempts) == 2, f"{len(attempts)} attempts")
    last = attempts[-1] if attempts else {}
    story.check(
        "it loaded the KV that was written behind, and computed only the rest",
        bool(last.get("loaded_tokens")),
        f"resumed after token {last.get('after_seq')}: KV of {last.get('loaded_tokens') or 0} tokens loaded, "
        f"{last.get('recomputed_tokens') or 0} recomputed, exact: {'yes' if last.get('exact') else 'no'}",
    )

    back_to_zero(story, service)

    story.chapter("What each of these cost, stage by stage")
    demo_costs.show(story, service)


def deploy(story: Story, service: DemoService, model: str) -> None:
    spec = {
        "name": NAME,
        "model": model,
        "scaling": {"keep_alive": KEEP_ALIVE_S},
        "timeouts": {"cold_start_s": START_WITHIN_S, "total_s": 300},
        "price": {"device_hour_usd": PRICE},
    }
    began_s = time.monotonic()
    service.client.request("PUT", f"/api/v1/functions/{NAME}", body=spec)
    await_import(service.client, NAME, quiet=story.quiet)
    story.say(f"   {NAME} = {model}, fetched, verified and deployed in {time.monotonic() - began_s:.1f} s")
    living = service.living()
    story.check("deployed at zero: no replica runs", not living, f"{len(living)} replicas")


def show_curl(story: Story, service: DemoService) -> None:
    url, key = service.client.endpoint.url, service.place.path / "admin.key"
    story.say(f'   curl -N {url}{CHAT} -H "Authorization: Bearer $(cat {key})" \\')
    story.say(f"     -d '{{\"model\": \"{NAME}\", \"stream\": true, \"messages\": "
              f"[{{\"role\": \"user\", \"content\": \"{QUESTION}\"}}]}}'")  # fmt: skip


def read(story: Story, service: DemoService, prompt: str, *, max_tokens: int, kill_after: int | None = None) -> Reading:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream_options": {"include_usage": True},
    }
    seen, began_us = Reading(), time.monotonic_ns() // 1000
    last_us = began_us
    stream = service.client.stream(CHAT, body)
    story.say("   > ", end="")
    for event in stream:
        now_us = time.monotonic_ns() // 1000
        if usage := event.body.get("usage"):
            seen.tokens = usage["completion_tokens"]
        for choice in event.body.get("choices", ()):
            seen.finish = choice.get("finish_reason") or seen.finish
        text = event.text()
        if not text:
            continue
        if not seen.text:
            seen.first_us = now_us - began_us
        else:
            seen.longest_gap_us = max(seen.longest_gap_us, now_us - last_us)
        last_us = now_us
        seen.text += text
        story.say(text.replace("\n", "\n     "), end="")
        if kill_after is not None and event.seq >= kill_after and not seen.killed_pid:
            seen.killed_pid = kill_replica(service)
            story.say(f" [kill -9 {seen.killed_pid}] ", end="")
    seen.total_us = time.monotonic_ns() // 1000 - began_us
    seen.request_id = stream.request_id or ""
    story.say()
    return seen


def kill_replica(service: DemoService) -> int:
    pid = next((int(item["pid"]) for item in service.living() if item.get("pid")), 0)
    if pid:
        os.kill(pid, signal.SIGKILL)
    return pid


def remember(story: Story, service: DemoService, title: str, seen: Reading) -> None:
    story.requests.append(
        {
            "title": title,
            "request_id": seen.request_id,
            "first_token_us": seen.first_us,
            "total_us": seen.total_us,
            "tokens": seen.tokens,
        }
    )
    story.say(f"     first token after {seconds(seen.first_us)}, {seen.tokens} tokens in {seconds(seen.total_us)}")
    story.check("the stream ended as streams end", seen.finish in ("stop", "length"), f"finish_reason {seen.finish}")


def back_to_zero(story: Story, service: DemoService) -> None:
    story.chapter(f"Idle for {KEEP_ALIVE_S:g} s: back to zero")
    before = service.living()
    service.until("the function at zero", lambda: not service.living(), 60.0)
    service.until("memory measured", lambda: all(is_measured(service, item) for item in before), 10.0)
    ended = {item["replica_id"]: item for item in service.replicas()}
    for item in before:
        memory, pid = item.get("memory") or {}, int(item.get("pid") or 0)
        after = ended.get(item["replica_id"], {})
        story.say(
            f"     {item['replica_id']} (pid {pid}) held {size(memory.get('rss_bytes'))} resident, of which "
            f"{size(memory.get('shared_bytes'))} the pool's shared pages"
        )
        story.check("its process is gone", is_gone(pid))
        story.check("its memory is measured as returned", after.get("memory_returned") is True)
    slot = settled_slot(service)
    used, baseline = slot["memory_used_bytes"], slot["memory_baseline_bytes"]
    story.check(
        "the slot is back at its baseline",
        0 < used <= baseline + BASELINE_TOLERANCE_BYTES,
        f"{size(used)} in use, baseline {size(baseline)}; the warm pool keeps {size(slot['pool_used_bytes'])}",
    )


def settled_slot(service: DemoService) -> dict[str, Any]:
    """The slot once it has measured itself with nothing running."""
    slot: dict[str, Any] = {}

    def is_settled() -> bool:
        nonlocal slot
        slot = service.slot()
        baseline = slot["memory_baseline_bytes"]
        near = 0 < slot["memory_used_bytes"] <= baseline + BASELINE_TOLERANCE_BYTES
        return near and bool(slot["warm_workers"])

    with contextlib.suppress(CommandError):  # the caller checks, and says by how much
        service.until("the slot at its baseline", is_settled, 20.0)
    return slot


def is_measured(service: DemoService, item: dict[str, Any]) -> bool:
    found = next((each for each in service.replicas() if each["replica_id"] == item["replica_id"]), None)
    return found is None or found.get("memory_returned") is not None
