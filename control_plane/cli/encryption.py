"""`stoker encryption`: the tenant's key for what is stored of its requests, over `/api/v1/encryption`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from control_plane.cli.connection import connect
from control_plane.cli.output import age, note, print_json

_PATH = "/api/v1/encryption"


def show_encryption(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    _say(connect(data_dir, url).request("GET", _PATH), as_json)


def set_key(data_dir: Path | None, url: str | None, key_file: Path | None, as_json: bool) -> None:
    body = {} if key_file is None else {"key": key_file.read_text(encoding="utf-8").strip()}
    _say(connect(data_dir, url).request("PUT", _PATH, body=body), as_json)


def delete_key(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    answer = connect(data_dir, url).request("DELETE", _PATH)
    if as_json:
        print_json(answer)
        return
    print(f"{answer['deleted_keys']} keys of tenant {answer['tenant']} are deleted")
    note("  requests and KV sealed with them can be read by nobody any more; usage and costs stay")


def _say(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
    elif answer["sealed"]:
        print(
            f"tenant {answer['tenant']}: key {answer['number']}, {answer['fingerprint']}, {age(answer['created_us'])}"
        )
    else:
        print(f"tenant {answer['tenant']}: no key; what is stored is in the clear")
