"""A log on a full disk: what is said is lost, and whoever says it lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SPEAKER = """
import os, sys, traceback
from function_runtime.worker import _redirect_output
_redirect_output(sys.argv[1])
for number in range(3000):
    print("said", number, "\\udc80", file=sys.stderr, flush=True)
    print("and", number)
try:
    raise ValueError("kv write-behind stops")
except ValueError:
    traceback.print_exc()
os._exit(7)
"""


def speak(log: str) -> int:
    command = [sys.executable, "-c", SPEAKER, log]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


def test_a_full_disk_under_the_log_stops_nobody() -> None:
    assert speak("/dev/full") == 7


def test_what_is_said_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "replica.log"
    assert speak(str(log)) == 7
    text = log.read_text()
    assert text.count("said") == 3000 and "and 2999" in text and "ValueError: kv write-behind stops" in text
