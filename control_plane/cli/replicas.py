"""`stoker ps` and `logs`: what runs, on how much memory, what it wrote, and why it does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from control_plane.cli.connection import connect
from control_plane.cli.failure import CommandError
from control_plane.cli.output import age, print_json, print_table, seconds, size
from control_plane.client import Client, HttpError


def show_replicas(data_dir: Path | None, url: str | None, everything: bool, as_json: bool) -> None:
    client = connect(data_dir, url)
    answer = client.request("GET", "/api/v1/replicas", query={"all": "1"})
    found = answer["data"] if everything else of_interest(answer["data"])
    told = client.request("GET", "/api/v1/slots")
    slots = told["data"]
    if as_json:
        there = {name: told[name] for name in ("coming", "cluster") if name in told}
        print_json({**answer, "data": found, "slots": slots, **there})
        return
    where = ("SLOT",) if len(slots) > 1 else ()
    rows = []
    for item in found:
        memory, ready_us, created_us = item["memory"], item["ready_us"], item["created_us"]
        rows.append(
            (
                item["replica_id"],
                *(item["slot_id"] or "-" for _ in where),
                item["function"],
                item["revision"],
                item["state"],
                item["pid"] or "-",
                item["running"],
                seconds(ready_us - created_us) if ready_us else "-",
                size(memory["rss_bytes"]) if memory["rss_bytes"] else "-",
                size(memory["shared_bytes"]) if memory["shared_bytes"] else "-",
                age(created_us),
                reason_of(item),
            )
        )
    print_table(
        (
            "REPLICA",
            *(("SLOT",) if len(slots) > 1 else ()),
            "FUNCTION",
            "REV",
            "STATE",
            "PID",
            "REQUESTS",
            "START",
            "RSS",
            "SHARED",
            "AGE",
            "WHY",
        ),
        rows,
        empty="nothing runs: every function is at zero",
    )
    if len(slots) > 1:
        show_slots(slots)
    show_coming(told)
    if note := store_note(answer.get("object_store") or {}):
        print(note)


def show_slots(slots: list[dict[str, Any]]) -> None:
    rows = [
        (
            slot["slot_id"] + (" (terminating)" if slot.get("terminating") else ""),
            slot["agent_pid"],
            len(slot["replicas"]),
            slot["warm_workers"],
            size(slot["pool_used_bytes"]),
            size(slot["memory_used_bytes"]),
        )
        for slot in slots
    ]
    print()
    print_table(("SLOT", "AGENT", "REPLICAS", "WARM", "POOL", "MEMORY"), rows, empty="no slot is in sight")


def show_coming(told: dict[str, Any]) -> None:
    """Slots of a cluster that are not ready, with how far each is, and why there are none."""
    rows = [
        (slot["slot_id"], slot["phase"], f"{slot['since_s']:.0f} s", slot["message"]) for slot in told.get("coming", ())
    ]
    if rows:
        print()
        print_table(("SLOT", "PHASE", "FOR", "WHY"), rows, empty="")
    cluster = told.get("cluster") or {}
    troubles = [cluster["problem"]] if cluster.get("problem") else []
    troubles += [f"SlotPool {name}: {why}" for name, why in (cluster.get("refused_pools") or {}).items()]
    troubles += [f"class {each['name']}: {each['trouble']}" for each in cluster.get("classes", ()) if each["trouble"]]
    for trouble in troubles:
        print(f"\n{trouble}")


def store_note(store: dict[str, Any]) -> str:
    """What an unusable object store means, for who looks; empty while it works."""
    if store.get("state") != "unusable":
        return ""
    lines = ["", f"The object store is unusable since {age(store['since_us'])} ({store['problem']}): {store['reason']}"]
    lacking = store.get("functions") or {}
    if lacking.get("refused"):
        lines.append(f"Refuse new requests (kv_store: required): {', '.join(lacking['refused'])}")
    if lacking.get("without"):
        lines.append(f"Run without it, what a replica that dies had computed is computed again: "
                     f"{', '.join(lacking['without'])}")  # fmt: skip
    return "\n".join(lines)


def of_interest(replicas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What lives, and what failed while nothing of its function has worked since: that reason is what `ps` is asked
    for."""
    worked_us: dict[str, int] = {}
    for item in replicas:
        if item["ready_us"]:
            worked_us[item["function"]] = max(worked_us.get(item["function"], 0), item["created_us"])

    def is_shown(item: dict[str, Any]) -> bool:
        if item["state"] == "failed":
            return bool(item["created_us"] >= worked_us.get(item["function"], 0))
        return bool(item["state"] != "ended")

    return [item for item in replicas if is_shown(item)]


def reason_of(item: dict[str, Any]) -> str:
    error = item.get("error") or {}
    if error:
        return f"{error.get('code')}: {error.get('message')}"
    away = "leaves the object store alone, after failures" if (item.get("store") or {}).get("breaker_open") else ""
    return " ".join(part for part in (item.get("end_reason"), item.get("exit"), away) if part)


def show_logs(data_dir: Path | None, url: str | None, name: str, tail: int, as_json: bool) -> None:
    client = connect(data_dir, url)
    texts = {replica: log_of(client, replica, tail) for replica in replicas_of(client, name)}
    if as_json:
        print_json({"object": "list", "data": [{"replica_id": key, "log": text} for key, text in texts.items()]})
        return
    if not texts:
        print(f"{name} has run no replica yet")
    for replica, text in texts.items():
        for line in text.splitlines():
            print(f"{replica}  {line}" if len(texts) > 1 else line)


def replicas_of(client: Client, name: str) -> list[str]:
    if name.startswith("rep-"):
        return [name]
    answer = client.request("GET", "/api/v1/replicas", query={"all": "1"})
    found = [item["replica_id"] for item in answer["data"] if item["function"] == name]
    if not found:
        try:
            client.request("GET", f"/api/v1/functions/{name}")
        except HttpError as error:
            if error.status == 404:
                raise CommandError(
                    f"there is no function {name}", "see what there is with `stoker ls`", code="not_found"
                ) from error
            raise
    return found


def log_of(client: Client, replica_id: str, tail: int) -> str:
    try:
        return str(client.request("GET", f"/api/v1/replicas/{replica_id}/log", query={"tail": tail}))
    except HttpError as error:
        if error.status != 404:
            raise
        return f"({error.message})"
