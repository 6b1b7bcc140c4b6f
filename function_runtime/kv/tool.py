"""`python -m function_runtime.kv.tool COMMAND --store URI`: what needs the format, in a process of its own, as NDJSON.

    inspect   what the packs named on standard input hold, by their headers
    verify    every byte of them read and checked
    scan      every pack of the store by its headers, for an index that is to be rebuilt

Lines `key HEX` on standard input are keys of tenants, tried on what does not lie there in the clear. A line per pack
(`pack`, or `bad` with its reason), progress in between, `done` at the end. Limits: one pack after
another; it writes nothing anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from function_runtime.errors import KvError
from function_runtime.kv.inspection import check_pack, scan_pack
from function_runtime.kv.pack import PREFIX
from function_runtime.kv.sealing import ChunkSeal
from model_loader.errors import LoaderError, MissingObject, ShortObject
from model_loader.objects import ObjectStore, open_store

PROGRESS_S: Final = 0.2


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def run(command: str, store: ObjectStore, packs: list[tuple[str, int]], seals: Sequence[ChunkSeal] = ()) -> None:
    """(key, bytes) each. Trouble with the store itself ends it: nothing is called bad because it could not be read."""
    total = sum(nbytes for _, nbytes in packs)
    done = checked = bad = 0
    told_s = 0.0
    for key, nbytes in packs:
        try:
            found = (check_pack if command == "verify" else scan_pack)(store, key, seals)
        except (KvError, MissingObject, ShortObject) as error:
            bad += 1
            say("bad", pack=key, nbytes=nbytes, reason=str(error))
        else:
            checked += 1
            shown = [c.description() if command == "inspect" else c.record() for c in found]
            say("pack", pack=key, nbytes=nbytes, chunks=shown if command != "verify" else len(shown))
        done += nbytes
        if time.monotonic() - told_s > PROGRESS_S:
            told_s = time.monotonic()
            say("progress", stage=command, done_bytes=done, total_bytes=total)
    say("done", checked=checked, bad=bad, nbytes=total)


_KEY: Final = "key "


def named(store: ObjectStore, lines: Iterable[str]) -> list[tuple[str, int]]:
    return [(key, store.exists(key) or 0) for line in lines if (key := line.strip()) and not key.startswith(_KEY)]


def seals_of(lines: Iterable[str]) -> list[ChunkSeal]:
    return [ChunkSeal(bytes.fromhex(line.removeprefix(_KEY).strip())) for line in lines if line.startswith(_KEY)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="function_runtime.kv.tool")
    parser.add_argument("command", choices=("inspect", "verify", "scan"))
    parser.add_argument("--store", required=True)
    arguments = parser.parse_args()
    try:
        store = open_store(arguments.store)
        lines = list(sys.stdin)
        if arguments.command == "scan":
            packs = [(info.key, info.nbytes) for info in store.list(PREFIX)]
        else:
            packs = named(store, lines)
        run(arguments.command, store, packs, seals_of(lines))
    except (LoaderError, OSError) as error:
        say("error", code=getattr(error, "code", "object_store_error"), message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
