"""`stoker up` from its first line to its last: what it says, what it leaves, and how it is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.data_dir import DataDir
from control_plane.cli.demo_service import processes_of
from control_plane.cli.down import end_all
from tests.control_plane.cli.conftest import run


class Up:
    def __init__(self, data_dir: Path, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "control_plane.cli.main", "up", "-d", str(data_dir), "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def told(self) -> dict[str, Any]:
        """What it says once it listens."""
        if self.process.stdout is None:
            raise RuntimeError("no pipe")
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data"
    yield folder
    end_all(DataDir.at(folder), 1.0)
    assert processes_of(tmp_path) == []


def test_ctrl_c_ends_it_in_order_and_down_ends_what_it_left(data_dir: Path) -> None:
    up = Up(data_dir, "--port", "0")
    told = up.told()
    assert told["pid"] == up.process.pid
    assert told["data_dir"] == str(data_dir)
    assert Path(told["admin_key"]).stat().st_mode & 0o777 == 0o600
    assert run("ls", "-d", str(data_dir)).status == 0
    assert up.end() == 0
    assert not (data_dir / "control.json").exists()
    assert DataDir.at(data_dir).holder() is None
    assert "no service runs on this data directory" in run("ls", "-d", str(data_dir)).err
    run("down", "-d", str(data_dir))
    assert processes_of(data_dir.parent) == []


def test_a_killed_one_is_followed_by_the_next_on_the_same_directory(data_dir: Path) -> None:
    first = Up(data_dir, "--port", "0")
    url = first.told()["url"]
    first.process.kill()
    first.process.communicate()
    assert url in run("ls", "-d", str(data_dir)).err
    second = Up(data_dir, "--port", "0")
    second.told()
    assert run("ps", "-d", str(data_dir)).status == 0
    assert second.end() == 0


def test_settings_come_from_the_environment_and_the_command_line_wins(data_dir: Path) -> None:
    up = Up(data_dir, "--port", "0", STOKER_PORT="1", STOKER_ALLOWED_MODELS="pypi://good")
    up.told()
    refused = run("deploy", "fn", "--model", "pypi://other", "-d", str(data_dir))
    assert (refused.status, "pypi://other" in refused.err) == (1, True)
    assert up.end() == 0
    bad = Up(data_dir, STOKER_PORT="many")
    _, err = bad.process.communicate(timeout=30)
    assert bad.process.returncode == 1
    assert "STOKER_PORT='many'" in json.loads(err)["error"]["message"]


def test_two_slots_are_shown_and_both_end_with_down(data_dir: Path) -> None:
    up = Up(data_dir, "--port", "0", "--slots", "2")
    up.told()
    deadline_s = time.monotonic() + 30
    while "slot-1" not in (said := run("ps", "-d", str(data_dir))).out and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert "slot-0" in said.out and "slot-1" in said.out
    slots = run("ps", "-d", str(data_dir), "--json").json["slots"]
    assert len({slot["agent_pid"] for slot in slots}) == 2
    assert up.end() == 0
    ended = run("down", "-d", str(data_dir), "--json").json
    assert len(ended["agent_pids"]) == 2
    assert processes_of(data_dir.parent) == []


def test_no_slots_need_a_database_whose_other_gateways_have_some(data_dir: Path) -> None:
    alone = run("up", "-d", str(data_dir), "--slots", "0")
    assert alone.status == 1
    assert "--database" in alone.err
