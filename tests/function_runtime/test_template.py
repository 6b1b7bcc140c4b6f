"""The process workers are forked from: what it has imported, no worker imports while somebody waits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_LATE = """
import sys
from model_loader.objects import open_store
from model_loader.errors import LoaderError
from function_runtime.template import import_stores
import_stores()
before = set(sys.modules)
store = open_store(sys.argv[1])
try:
    store.exists("key", within_s=0.2)
except (LoaderError, TypeError):
    pass
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize(
    ("uri", "env", "some"),
    [
        ("http+stoker://localhost:9", {}, False),
        (
            "s3://bucket/prefix?endpoint=http://localhost:9&region=r",
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"},
            False,
        ),
        ("s3://bucket/prefix?endpoint=http://localhost:9&region=r", {}, True),
    ],
    ids=["served over HTTP", "S3", "S3 without credentials in sight"],
)
def test_a_store_is_opened_without_an_import(uri: str, env: dict[str, str], some: bool) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env = {**bare, **env, "STOKER_STORE_TOKEN": "t"}
    command = [sys.executable, "-c", _LATE, uri]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    late = [name for name in done.stdout.split() if name.split(".")[0] in ("model_loader", "botocore", "encodings")]
    assert bool(late) is some, late
