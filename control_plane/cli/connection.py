"""Which service a command talks to: --url, that of a cluster (`stoker --context`), STOKER_URL, or the one that runs on
the data directory.

Several addresses, separated by commas, are gateways of one service: the next is asked when one does not answer.
"""

from __future__ import annotations

import os
from pathlib import Path

from control_plane.cli.data_dir import DataDir
from control_plane.client import Client, Endpoint


def connect(data_dir: Path | None, url: str | None, *, give_up_s: float = 60.0) -> Client:
    """A client that finds the service again when it comes back, on another port too."""
    if url is None and data_dir is None and os.environ.get("STOKER_CONTEXT"):
        from control_plane.cli.cluster import Cluster

        if (cluster := Cluster.of(os.environ)) is not None:
            return Client(cluster.endpoint, give_up_s=give_up_s)
    named = url or (os.environ.get("STOKER_URL") if data_dir is None else None)
    if named:
        key = os.environ.get("STOKER_API_KEY") or DataDir.at(data_dir).admin_key()
        urls = [each.strip().rstrip("/") for each in named.split(",") if each.strip()]
        return Client([Endpoint(each, key) for each in urls], give_up_s=give_up_s)
    return Client(DataDir.at(data_dir).endpoint, give_up_s=give_up_s)
