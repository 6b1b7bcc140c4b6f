"""`stoker doctor`: a line for each thing an installation needs: it is well, or what is wrong and what to do.

First whether the service is ready, which needs no key; then what it says of itself. Exit status 1 if anything is wrong.
Limits: what a service that does not answer lacks can only be told from where it runs: its log, or its pod's events.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from control_plane.cli.connection import connect
from control_plane.cli.failure import FAILED, explain
from control_plane.cli.output import print_json
from control_plane.client import Client, HttpError, Unreachable

UNREACHABLE = "start it with `stoker up`; on Kubernetes: kubectl get pods, then kubectl describe pod"


def examine_service(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    checks = _checks(data_dir, url)
    ok = all(check["ok"] for check in checks)
    if as_json:
        print_json({"ok": ok, "data": checks})
    else:
        width = max(len(check["name"]) for check in checks)
        for check in checks:
            print(f"{'ok   ' if check['ok'] else 'WRONG'}  {check['name'].ljust(width)}  {check['says']}")
            if not check["ok"] and check["do"]:
                print(f"{' ' * (width + 9)}next: {check['do']}")
    if not ok:
        raise SystemExit(FAILED)


def _checks(data_dir: Path | None, url: str | None) -> list[dict[str, Any]]:
    client = connect(data_dir, url)
    try:
        ready = _check_ready(client)
    except Unreachable as error:
        return [_check("service", False, str(error), UNREACHABLE)]
    if not ready["ok"]:
        return [ready]
    try:
        found: list[dict[str, Any]] = client.request("GET", "/api/v1/doctor")["data"]
    except HttpError as error:
        return [ready, _check("key", False, error.message, explain(error).hint)]
    return [ready, *found]


def _check_ready(client: Client) -> dict[str, Any]:
    try:
        answer = client.request("GET", "/health/ready", timeout_s=10)
    except HttpError as error:
        says = f"not ready ({error.code or f'HTTP {error.status}'}): {error.message}"
        return _check("service", False, says, "correct what it names; it looks again by itself")
    return _check("service", True, f"ready at {client.endpoint.url} ({answer.get('gateway', 'one gateway')})")


def _check(name: str, ok: bool, says: str, do: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "says": says, "do": do}
