"""`stoker why`: what happened to a request, a replica or a function, told in order, with reasons and costs."""

from __future__ import annotations

import time
import urllib.parse
from pathlib import Path
from typing import Any, Final

from control_plane.cli.connection import connect
from control_plane.cli.output import columns, money, print_json, seconds, size

STAGE_TITLES: Final = {
    "queue_us": "queue (replicas full)",
    "cold_start_us": "cold start",
    "load_kv_us": "load KV",
    "prefill_us": "prefill",
    "decode_us": "decode",
    "total_us": "total",
}
FORECASTS_SHOWN: Final = 12
STARTS_SHOWN: Final = 12
SHOWN_INPUTS: Final = 6
"""Inputs of a decision on its line; --json has them all."""


def explain_why(data_dir: Path | None, url: str | None, what: str, as_json: bool) -> None:
    path = "/api/v1/why/" + urllib.parse.quote(what, safe="")
    told = connect(data_dir, url).request("GET", path)
    if as_json:
        print_json(told)
        return
    print("\n\n".join(part for part in paragraphs(told) if part))


def paragraphs(told: dict[str, Any]) -> list[str]:
    return [
        heading(told), scaling(told), forecasts(told), causes(told), stages(told), attempts(told), pools(told),
        starts(told), timeline(told), costs(told),
    ]  # fmt: skip


def scaling(told: dict[str, Any]) -> str:
    """What is known of a function's load, and what its forecast says."""
    known = told.get("scaling")
    if not known:
        return ""
    if not known["leads"]:
        return "scaled by another gateway, which knows more: ask the leader"
    lines = []
    if load := known.get("load"):
        lines.append("arrivals in the last windows of 10 s: " + " ".join(_count(window["arrivals"]) for window in load))
    for tier, times in known.get("start_times_s", {}).items():
        lines.append(f"a start from {tier} takes {times['mean']:.3f} s, nine of ten at most {times['p90']:.3f} s")
    if forecast := known.get("forecast"):
        by_clock = forecast.get("clock_s")
        warm = _windows(forecast["warm_s"]) if by_clock is None else _spans(by_clock)
        acts = "says" if known["mode"] == "advisory" else "acts"
        lines.append(f"forecast: {forecast['source']} {acts}, made {forecast['made_s_ago']:.0f} s ago; {warm}")
    ahead = known.get("started_ahead", {})
    if any(ahead.values()):
        lines.append(f"started ahead of need: {ahead['used']} used, {ahead['wasted']} wasted")
    if known.get("restarts_in_hour"):
        lines.append(f"restarts within the hour: {known['restarts_in_hour']}")
    return "\n".join(lines)


def forecasts(told: dict[str, Any]) -> str:
    """Forecast against actual, newest last."""
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(said["at_us"] / 1e6)),
            said["source"],
            "-" if said["expected_arrivals"] is None else f"{said['expected_arrivals']:.1f}",
            _count(said["arrivals"]),
            _windows(said["warm_s"]),
            "-" if said["next_gap_s"] is None else f"{said['next_gap_s']:.1f} s",
            {None: "-", True: "yes", False: "no"}[said["warm_at_its_end"]],
        )
        for said in (told.get("scaling") or {}).get("forecast_against_actual", ())[-FORECASTS_SHOWN:]
    ]
    head = ("TIME", "FORECAST", "EXPECTED", "CAME", "WARM", "GAP", "WARM AT ITS END")
    return columns(head, rows, right=frozenset({2, 3})) if rows else ""


def causes(told: dict[str, Any]) -> str:
    """What each start was due to, newest last."""
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(start["at_us"] / 1e6)),
            start["replica_id"] or "-",
            (start["cause"] or "-") + (" (restart)" if start["restart"] else ""),
            start["reason"],
        )
        for start in (told.get("scaling") or {}).get("starts", ())[-STARTS_SHOWN:]
    ]
    return columns(("TIME", "STARTED", "DUE TO", "WHY"), rows) if rows else ""


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _spans(spans: list[list[float | None]]) -> str:
    """By the clock: when it is held, from now."""
    if not spans:
        return "never warm while idle"
    said = [f"{held_s or 0.0:+.0f} to {until_s or 0.0:+.0f} s" for held_s, _, until_s in spans]
    return "warm by the clock, from now: " + ", ".join(said)


def _windows(warm: list[list[float | None]] | None) -> str:
    if warm is None:
        return "kept for as long as a start is worth"
    if not warm:
        return "never warm while idle"
    said = [f"{opens:.1f} s" + (" on" if closes is None else f" to {closes:.1f} s") for opens, closes in warm]
    return "warm after " + ", ".join(said)


def heading(told: dict[str, Any]) -> str:
    kind = told["kind"]
    if kind == "request":
        lines = [
            f"request {told['id']}: {told['state']}",
            f"{told['function']} revision {told['revision']}, {told['input_tokens']} prompt tokens "
            f"({told['cached_tokens']} from cache), {told['tokens']} generated, epoch {told['epoch']}",
        ]
        if error := told.get("error"):
            lines.append(f"{error['code']}: {error['message']}")
        return "\n".join(lines)
    if kind == "replica":
        replica = told.get("replica") or {}
        lines = [f"replica {told['id']}: {replica.get('state', 'long gone')}"]
        if error := replica.get("error"):
            lines.append(f"{error['code']}: {error['message']}")
        if replica.get("memory_returned") is not None:
            lines.append(f"memory returned: {'yes' if replica['memory_returned'] else 'NO'}")
        return "\n".join(lines)
    lines = [f"function {told['id']} revision {told['revision']}: import {told['import']['state']}"]
    if error := told["import"].get("error"):
        lines.append(f"{error['code']}: {error['message']}")
    if told.get("start_error"):
        lines.append(f"cannot start: {told['start_error']}")
    if slots := told.get("slots"):
        lines.append(f"slots of its class ({slots['class']}): {slots['ready']} ready, {len(slots['coming'])} not ready")
        lines += [f"  {slot['slot_id']}: {slot['message']}, for {slot['since_s']:.0f} s" for slot in slots["coming"]]
        if slots["trouble"]:
            lines.append(f"  {slots['trouble']}")
    return "\n".join(lines)


def stages(told: dict[str, Any]) -> str:
    spent = told.get("stages_us")
    if not spent:
        return ""
    rows = [(title, seconds(spent[name])) for name, title in STAGE_TITLES.items() if spent.get(name)]
    return columns(("STAGE", "WALL"), rows, right=frozenset({1}))


def attempts(told: dict[str, Any]) -> str:
    rows = [
        (
            item["epoch"],
            item["replica_id"],
            item["after_seq"],
            "-" if item["loaded_tokens"] is None else item["loaded_tokens"],
            "-" if item["recomputed_tokens"] is None else item["recomputed_tokens"],
            {None: "-", True: "yes", False: "no"}[None if item["exact"] is None else bool(item["exact"])],
            item["reason"] or "-",
        )
        for item in told.get("attempts", ())
    ]
    head = ("EPOCH", "REPLICA", "AFTER TOKEN", "KV LOADED", "RECOMPUTED", "EXACT", "ENDED BY")
    return columns(head, rows) if rows else ""


def pools(told: dict[str, Any]) -> str:
    """Where a function's checkpoint is ready to be mapped, and how it came there, for a request or ahead of one."""
    rows = [
        (
            entry["slot_id"],
            entry["state"],
            entry["dtype"],
            size(entry["nbytes"]),
            entry["error"] or entry["load"] or "-",
        )
        for entry in told.get("pools", ())
    ]
    return columns(("SLOT", "POOL", "DTYPE", "BYTES", "HOW IT CAME"), rows) if rows else ""


def starts(told: dict[str, Any]) -> str:
    """The cold start of each replica that took part, by stage."""
    replicas = told.get("replicas") or ([told["replica"]] if told.get("replica") else [])
    rows = []
    for replica in replicas:
        for stage in replica.get("stages", ()):
            rows.append(
                (
                    replica["replica_id"],
                    stage["name"],
                    seconds(stage["duration_us"]),
                    size(stage["nbytes"]) if stage["nbytes"] else "-",
                    stage["tier"] or "-",
                    stage["detail"],
                )
            )
    return columns(("REPLICA", "STAGE", "TOOK", "BYTES", "FROM", ""), rows) if rows else ""


def timeline(told: dict[str, Any]) -> str:
    rows = []
    first_us: int | None = None
    for event in told.get("timeline", ()):
        first_us = event["at_us"] if first_us is None else first_us
        at = time.strftime("%H:%M:%S", time.localtime(event["at_us"] / 1e6)) + f".{event['at_us'] // 1000 % 1000:03d}"
        detail = event["detail"]
        if inputs := event.get("inputs"):
            shown = [f"{name}={value}" for name, value in list(inputs.items())[:SHOWN_INPUTS] if value is not None]
            detail = f"{detail} [{', '.join(shown)}]" if shown else detail
        rows.append((at, "+" + seconds(event["at_us"] - first_us), event["what"], event.get("replica_id", ""), detail))
    return columns(("TIME", "", "WHAT", "REPLICA", "WHY"), rows, right=frozenset({1})) if rows else ""


def costs(told: dict[str, Any]) -> str:
    rows = [
        (row["kind"], row["stage"], seconds(row["device_us"]), money(row["cost_microusd"]))
        for row in told.get("ledger", ())
        if row["device_us"]
    ]
    if not rows:
        return ""
    rows.append(("", "total", "", money(told["cost_microusd"])))
    return columns(("LEDGER", "STAGE", "DEVICE TIME", "COST"), rows, right=frozenset({2, 3}))
