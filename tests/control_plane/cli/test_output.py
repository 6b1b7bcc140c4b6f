"""Numbers and tables for people, and the lock that keeps a data directory to one service."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.data_dir import DataDir, Holder
from control_plane.cli.failure import CommandError
from control_plane.cli.output import columns, money, moved, progress, seconds, size
from control_plane.cli.replicas import of_interest
from control_plane.cli.usage import microusd_of
from control_plane.resumption import Unreachable


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [(None, "-"), (0, "0 µs"), (999, "999 µs"), (1234, "1.2 ms"), (99_999, "100.0 ms"), (250_000, "0.25 s"),
     (61_000_000, "61.00 s"), (600_000_000, "10.0 min")],
)  # fmt: skip
def test_durations_read_in_their_own_unit(duration_us: int | None, text: str) -> None:
    assert seconds(duration_us) == text


@pytest.mark.parametrize(
    ("microusd", "text"), [(0, "$0.000000"), (1, "$0.000001"), (1_234_567, "$1.234567"), (-42, "-$0.000042")]
)
def test_money_is_written_to_the_micro_dollar(microusd: int, text: str) -> None:
    assert money(microusd) == text


def test_amounts_on_the_wire_become_the_integers_they_were() -> None:
    for microusd in (0, 1, 3, 123_457, 999_999_999_999):
        assert microusd_of({"value": microusd / 1_000_000, "currency": "usd"}) == microusd


def test_sizes_and_columns() -> None:
    assert [size(n) for n in (None, 10, 2048, 5 << 20, 3 << 30)] == ["-", "10 B", "2 KiB", "5 MiB", "3.00 GiB"]
    table = columns(("NAME", "N"), [("a", 1), ("long", 100)], right=frozenset({1}))
    assert table.splitlines() == ["NAME    N", "a       1", "long  100"]


def test_ps_shows_a_failure_until_something_of_its_function_works() -> None:
    def replica(function: str, created_us: int, state: str, ready_us: int = 0) -> dict[str, Any]:
        return {"function": function, "created_us": created_us, "state": state, "ready_us": ready_us}

    mended = [replica("a", 1, "failed"), replica("a", 2, "ended", 3), replica("a", 4, "ready", 5)]
    broken = [replica("b", 1, "ended", 2), replica("b", 3, "failed"), replica("b", 4, "starting")]
    assert of_interest([*mended, *broken]) == [mended[2], broken[1], broken[2]]


def test_a_held_directory_names_its_holder_until_it_is_let_go(tmp_path: Path) -> None:
    place = DataDir.at(tmp_path / "data")
    assert place.holder() is None
    with place.hold("http://127.0.0.1:1") as lock:
        lock.announce("http://127.0.0.1:2")
        assert place.holder() == Holder(os.getpid(), "http://127.0.0.1:2", lock.started_us)
        with pytest.raises(CommandError, match=f"in use by process {os.getpid()} "), place.hold("x"):
            pass
    assert place.holder() is None


def test_a_killed_holder_leaves_nothing_to_clean_up(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from control_plane.cli.data_dir import DataDir\n"
        "with DataDir.at(Path(sys.argv[1])).hold('http://x'):\n print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    found = DataDir.at(tmp_path).holder()
    assert found is not None
    assert found.pid == process.pid
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with DataDir.at(tmp_path).hold("http://y"):
        assert json.loads((tmp_path / "stoker.lock").read_text())["pid"] == os.getpid()


def test_a_directory_without_a_service_says_so(tmp_path: Path) -> None:
    place = DataDir.at(tmp_path)
    with pytest.raises(Unreachable, match="no service runs on this data directory"):
        place.endpoint()
    place.announce("http://127.0.0.1:9", 1)
    assert place.endpoint().url == "http://127.0.0.1:9"
    place.withdraw()
    with pytest.raises(Unreachable):
        place.endpoint()


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot be written"), DataDir.at(tmp_path / "file" / "data").hold("x"):
        pass


def test_a_bar_tells_what_has_moved_and_how_fast_what_is_new_comes() -> None:
    mib = 1024 * 1024
    assert moved(0, 0, 0, 1.0) == ""
    assert moved(5 * mib, 0, 5 * mib, 1.0) == "5 MiB"
    assert moved(50 * mib, 100 * mib, 10 * mib, 2.0) == "50 MiB of 100 MiB (50%), 5 MiB/s"
    assert moved(50 * mib, 100 * mib, 0, 2.0) == "50 MiB of 100 MiB (50%)"
    assert moved(50 * mib, 100 * mib, 10 * mib, 0.1) == "50 MiB of 100 MiB (50%)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_a_bar_for_each_stage_and_a_log_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1024 * 1024
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    shown: list[str] = []
    for stderr in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stderr)
        for stage in ("fetch", "read"):
            with progress("importing m") as advance:
                advance(stage, 0, 100 * mib)
                advance(stage, 75 * mib, 100 * mib)
        shown.append(stderr.getvalue())
    for stage in ("fetch", "read"):
        assert f"importing m: {stage}" in shown[0]
    assert "━" in shown[0] and "75 MiB of 100 MiB (75%)" in shown[0]
    assert shown[1].splitlines() == ["importing m: fetch", "importing m: read"]
