"""`stoker drain`: no new work for a function or a slot, what is in flight is parked and goes on elsewhere, or later."""

from __future__ import annotations

import time
import urllib.parse
from pathlib import Path
from typing import Any, Final

from control_plane.cli.connection import connect
from control_plane.cli.failure import CommandError
from control_plane.cli.output import print_json
from control_plane.client import Client, HttpError

LOOK_S: Final = 0.2


def drain(
    data_dir: Path | None, url: str | None, name: str, resume: bool, reason: str, within_s: float, as_json: bool
) -> None:
    client = connect(data_dir, url)
    path = path_of(client, name)
    if resume:
        answer = client.request("DELETE", path)
    else:
        answer = client.request("POST", path, body={"reason": reason})
        deadline_s = time.monotonic() + within_s
        while answer["drained"] and is_busy(answer) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
            answer = client.request("GET", path)
    if as_json:
        print_json(answer)
    else:
        print(sentence(answer))


def path_of(client: Client, name: str) -> str:
    """A function's, else a slot's."""
    quoted = urllib.parse.quote(name, safe="")
    for path in (f"/api/v1/functions/{quoted}/drain", f"/api/v1/slots/{quoted}/drain"):
        try:
            client.request("GET", path)
        except HttpError as error:
            if error.status != 404:
                raise
        else:
            return path
    raise CommandError(
        f"there is no function and no slot {name}",
        "`stoker ls` lists functions, `stoker ps` what runs",
        code="not_found",
    )


def is_busy(answer: dict[str, Any]) -> bool:
    return bool(answer["in_flight"] or answer["replicas"])


def sentence(answer: dict[str, Any]) -> str:
    what = f"{answer['kind']} {answer['name']}"
    if not answer["drained"]:
        return f"{what} takes work again"
    if is_busy(answer):
        return f"{what} is being drained: {answer['in_flight']} requests and {answer['replicas']} replicas are left"
    waiting = answer.get("waiting", 0)
    parked = f"; {waiting} requests wait until it is resumed" if waiting else ""
    return f"{what} is drained{parked}. Undo: stoker drain {answer['name']} --resume"
