"""`stoker kv`: stored KV listed, looked into, verified, collected, and its index made again from the store."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Any

from control_plane.cli.connection import connect
from control_plane.cli.failure import CommandError
from control_plane.cli.output import age, columns, note, print_json, print_table, progress, size

SHORT = 12
"""Digits of a pack's name that are shown; they suffice to name it again."""


def short(pack: str) -> str:
    return pack.rpartition("/")[2][:SHORT]


def show_kv(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    told = connect(data_dir, url).request("GET", "/api/v1/kv")
    if as_json:
        print_json(told)
        return
    rows = [
        (
            short(item["pack"]),
            item["state"],
            size(item["nbytes"]),
            item["chunks"],
            item["tokens"],
            item["form"] or "-",
            item["uses"],
            item["function"] or "-",
            age(item["created_us"]),
            age(item["used_us"]) if item["uses"] else "never",
            item["reason"] or "",
        )
        for item in told["data"]
    ]
    head = ("PACK", "STATE", "SIZE", "CHUNKS", "TOKENS", "FORM", "USES", "FUNCTION", "AGE", "USED", "WHY")
    print_table(head, rows, empty="no KV is kept: nothing of what ended was worth it, or nothing has ended yet")
    for item in told["totals"]:
        note(f"{item['packs']} packs {item['state']}, {size(item['nbytes'])}")
    for item in told["reuse"]:
        keyed = " in named conversations" if item["keyed"] else ""
        note(f"{item['function']}: {item['reused']} of {item['kept']} kept chunks{keyed} came to use")


def inspect_kv(data_dir: Path | None, url: str | None, name: str, as_json: bool) -> None:
    path = "/api/v1/kv/packs/" + urllib.parse.quote(name, safe="/")
    told = connect(data_dir, url).request("GET", path, timeout_s=120.0)
    if as_json:
        print_json(told)
        return
    known, found = told["index"], told["store"]
    print(f"{known['pack']}: {known['state']}, {size(known['nbytes'])} {known['reason']}".rstrip())
    if found.get("event") == "bad":
        print(f"cannot be read: {found['reason']}")
        return
    rows = [
        (
            chunk["chain"][:SHORT],
            f"[{chunk['start']}, {chunk['end']})",
            chunk["tokens"],
            chunk["layer_count"],
            size(chunk["nbytes"]),
            chunk["form"],
            chunk["made_of"]["dtype"],
            chunk["identity"][:SHORT],
            chunk["digest"][:SHORT],
        )
        for chunk in found["chunks"]
    ]
    print(columns(("CHAIN", "POSITIONS", "TOKENS", "LAYERS", "SIZE", "FORM", "DTYPE", "IDENTITY", "DIGEST"), rows))


def verify_kv(data_dir: Path | None, url: str | None, packs: list[str], as_json: bool) -> None:
    last, bad = _follow(data_dir, url, "/api/v1/kv/verify", "verify", {"packs": packs} if packs else None, as_json)
    if as_json:
        print_json({"object": "kv_verification", **last, "bad_packs": bad})
    else:
        for item in bad:
            print(f"{short(item['pack'])}  quarantined: {item['reason']}")
        print(f"{last.get('checked', 0)} packs are sound, {len(bad)} are not ({size(last.get('nbytes', 0))} read)")
    if bad:
        raise SystemExit(1)


def rebuild_index(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    last, bad = _follow(data_dir, url, "/api/v1/kv/rebuild-index", "rebuild", None, as_json)
    if as_json:
        print_json({"object": "kv_rebuild", **last, "bad_packs": bad})
        return
    for item in bad:
        print(f"{short(item['pack'])}  left out: {item['reason']}")
    print(
        f"{last['new']} of {last['chunks']} chunks in {last['packs']} packs were not in the index and are now; "
        f"{last['strangers']} packs belong to nobody"
    )


def collect_kv(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    told = connect(data_dir, url).request("POST", "/api/v1/kv/gc", timeout_s=600.0)
    if as_json:
        print_json(told)
        return
    print(
        f"{told['retired_packs']} packs retired, {told['orphans']} orphans found ({size(told['orphan_bytes'])}), "
        f"{told['deleted_packs']} deleted ({size(told['deleted_bytes'])})"
    )
    gone = [
        f"{told[name]} {text}"
        for name, text in (
            ("unreachable_chunks", "without a beginning"),
            ("worthless_chunks", "not worth their bytes"),
            ("over_quota_chunks", "over quota"),
        )
        if told[name]
    ]
    if gone:
        print(f"chunks that went: {', '.join(gone)}")
    if told["retired_packs"] or told["orphans"]:
        note("  what was retired is deleted by a run after the grace (STOKER_KV_GRACE_S)")


def _follow(
    data_dir: Path | None, url: str | None, path: str, title: str, body: Any, quiet: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last line, and the packs that were bad."""
    last: dict[str, Any] = {}
    bad: list[dict[str, Any]] = []
    with progress(title, quiet=quiet) as advance:
        for line in connect(data_dir, url).lines("POST", path, body=body):
            match line.get("event"):
                case "progress":
                    advance(line["stage"], line["done_bytes"], line["total_bytes"])
                case "bad":
                    bad.append({"pack": line["pack"], "reason": line["reason"]})
                case "error":
                    raise CommandError(str(line["message"]), code="kv_failed")
                case "done" | "rebuilt":
                    last = {name: value for name, value in line.items() if name not in ("event", "bad")}
    return last, bad
