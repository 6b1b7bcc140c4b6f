"""The end of the demo: what each request cost stage by stage, and that the ledger and the usage APIs agree on it."""

from __future__ import annotations

from typing import Any, Final

from control_plane.cli.demo_service import DemoService
from control_plane.cli.demo_story import Story
from control_plane.cli.output import columns, money, seconds
from control_plane.cli.usage import LINE_ITEMS, summed
from control_plane.cli.why import STAGE_TITLES

START_STAGES: Final = ("worker", "prepare", "map", "build", "listen")
REPLICA_STAGES: Final = ("cold_start", "idle", "overhead", "unreported")


def show(story: Story, service: DemoService) -> None:
    service.until("the ledger to be closed", lambda: all(is_closed(told) for told in whys(service)), 10.0)
    requests = [service.client.request("GET", f"/api/v1/why/{item['request_id']}") for item in story.requests]
    replicas = {told["id"]: told for told in whys(service)}
    for item, told in zip(story.requests, requests, strict=True):
        item["stages_us"], item["cost_microusd"] = told["stages_us"], told["cost_microusd"]
        item["replicas"] = [attempt["replica_id"] for attempt in told["attempts"]]
    story.say(indented(stage_table(story.requests, replicas)))
    story.say()
    story.say(indented(replica_table(replicas)))

    for replica_id, told in replicas.items():
        held_us = told["replica"]["time"]["held_us"]
        booked_us = sum(row["device_us"] for row in told["ledger"])
        story.check(
            f"every microsecond of {replica_id} is booked once", held_us == booked_us > 0, f"{seconds(held_us)} held"
        )
    rows = summed(service.client, "function", 2)
    read = len(requests), sum(item["tokens"] for item in story.requests)
    counted = sum(row["num_model_requests"] for row in rows), sum(row["output_tokens"] for row in rows)
    story.check("the usage API counts what was read", counted == read, f"{counted[0]} requests, {counted[1]} tokens")
    spent = {name: sum(row["cost_microusd"].get(name, 0) for row in rows) for name in LINE_ITEMS}
    billed = sum(sum(row["cost_microusd"].values()) for row in rows)
    booked = sum(row["cost_microusd"] for told in replicas.values() for row in told["ledger"])
    items = ", ".join(f"{name} {money(microusd)}" for name, microusd in spent.items())
    story.check("the costs API sums to the ledger, to the micro-dollar", billed == booked > 0, items)


def whys(service: DemoService) -> list[dict[str, Any]]:
    return [service.client.request("GET", f"/api/v1/why/{item['replica_id']}") for item in service.replicas()]


def is_closed(told: dict[str, Any]) -> bool:
    return any(row["kind"] == "replica" and row["stage"] == "attributed" for row in told["ledger"])


def indented(text: str) -> str:
    return "\n".join("   " + line for line in text.splitlines())


def stage_table(requests: list[dict[str, Any]], replicas: dict[str, Any]) -> str:
    """One column per request; under the cold start, the start of its first replica by stage."""
    head = ["", *(item["title"] for item in requests)]
    rows: list[list[str]] = [["first token after", *(seconds(item["first_token_us"]) for item in requests)]]
    for name, title in STAGE_TITLES.items():
        rows.append([title, *(seconds(item["stages_us"][name]) for item in requests)])
        if name == "cold_start_us":
            for stage in START_STAGES:
                cells = [start_stage(replicas.get(item["replicas"][0]), stage) for item in requests]
                if any(cell != "-" for cell in cells):
                    rows.append([f"  {stage}", *cells])
    rows.append(["replicas", *(str(len(item["replicas"])) for item in requests)])
    rows.append(["tokens", *(str(item["tokens"]) for item in requests)])
    rows.append(["device cost", *(money(item["cost_microusd"]) for item in requests)])
    return columns(head, rows, right=frozenset(range(1, len(head))))


def start_stage(told: dict[str, Any] | None, name: str) -> str:
    stages = (told or {}).get("replica", {}).get("stages", ())
    found = next((stage for stage in stages if stage["name"] == name), None)
    return "-" if found is None else seconds(found["duration_us"]) + (f" ({found['tier']})" if found["tier"] else "")


def replica_table(replicas: dict[str, Any]) -> str:
    head = ("REPLICA", "HELD", "ACTIVE", "COLD START", "IDLE", "OVERHEAD", "UNREPORTED", "COST")
    rows = []
    for replica_id, told in replicas.items():
        spent = dict.fromkeys(REPLICA_STAGES, 0)
        active_us = 0
        for row in told["ledger"]:
            if row["kind"] == "request":
                active_us += row["device_us"]
            elif row["stage"] in spent:
                spent[row["stage"]] += row["device_us"]
        held_us = told["replica"]["time"]["held_us"]
        rows.append(
            (
                replica_id,
                seconds(held_us),
                seconds(active_us),
                *(seconds(each) for each in spent.values()),
                money(told["cost_microusd"]),
            )
        )
    return columns(head, rows, right=frozenset(range(1, len(head))))
