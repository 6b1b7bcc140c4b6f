"""`stoker keys`: API keys over `/api/v1/keys`; a key's text is shown at its making and never again."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

from control_plane.cli.connection import connect
from control_plane.cli.output import age, note, print_json, print_table


def create_key(data_dir: Path | None, url: str | None, name: str, role: str, as_json: bool) -> None:
    answer = connect(data_dir, url).request("POST", "/api/v1/keys", body={"name": name, "role": role})
    if as_json:
        print_json(answer)
        return
    print(answer["key"])
    note(f"  this key ({answer['id']}, {role}) is not shown again; use it: export STOKER_API_KEY=...")


def show_keys(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    answer = connect(data_dir, url).request("GET", "/api/v1/keys")
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            item["id"],
            item.get("name", ""),
            item.get("role", "-"),
            item.get("prefix", "-"),
            age(item.get("created_us")),
            "revoked" if item.get("revoked_us") else "active",
        )
        for item in answer["data"]
    ]
    print_table(("ID", "NAME", "ROLE", "KEY", "AGE", "STATE"), rows, empty="no keys")


def revoke_key(data_dir: Path | None, url: str | None, key_id: str, as_json: bool) -> None:
    path = f"/api/v1/keys/{urllib.parse.quote(key_id, safe='')}"
    answer = connect(data_dir, url).request("DELETE", path)
    if as_json:
        print_json(answer if isinstance(answer, dict) else {"id": key_id, "revoked": True})
    else:
        print(f"key {key_id} is revoked")
