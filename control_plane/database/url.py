"""Which database a setting names: a path, `sqlite:///PATH`, or `postgresql://USER@HOST:PORT/NAME`.

Limits: reads no option of the URL; what follows `?` is PostgreSQL's own business.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from control_plane.errors import StorageUnavailable

SCHEMES = ("sqlite", "postgresql", "postgres")


def is_postgresql(where: Path | str) -> bool:
    """Raises `StorageUnavailable` for a scheme that no driver has."""
    if isinstance(where, Path) or "://" not in where:
        return False
    scheme = where.partition("://")[0]
    if scheme not in SCHEMES:
        raise StorageUnavailable(f"the database URL begins with {scheme}://: use sqlite:///PATH or postgresql://...")
    return scheme != "sqlite"


def sqlite_path(where: Path | str) -> Path:
    """`sqlite:///var/stoker.db` is `/var/stoker.db`, and so is `sqlite:////var/stoker.db`: as with `file:` there is no
    relative one."""
    if isinstance(where, Path) or "://" not in where:
        return Path(where)
    parts = urlsplit(where)
    if parts.netloc or not parts.path.strip("/"):
        raise StorageUnavailable("a SQLite URL names an absolute path, with three slashes: sqlite:///var/stoker.db")
    return Path("/" + unquote(parts.path).lstrip("/"))


def without_password(url: str) -> str:
    """For messages and logs."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{user.partition(':')[0]}{at}{host}{parts.path}"
