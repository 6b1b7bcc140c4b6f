"""`stoker simulate` from files to tables, CSV and pictures; and the service's own traffic as a trace."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from control_plane.cli.main import app
from control_plane.simulation.journal import service_of, way_of
from control_plane.simulation.sizes import Size, functions_of
from control_plane.simulation.tables import WIDE

DATA = Path(__file__).parents[2] / "data" / "traces"


def simulate(*options: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *options])


def test_a_trace_is_replayed_under_each_policy_and_shown_in_every_form(tmp_path: Path) -> None:
    told = simulate(
        "--trace", str(DATA / "azure_llm_2023_code_head.csv.gz"), "--models", "8", "--slots", "2x2",
        "--policy", "stoker", "--policy", "keepalive:60", "--policy", "oracle",
        "--waiting-weight", "1", "--waiting-weight", "10", "--prices", "2", "--out", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    assert told.exit_code == 0, told.stderr
    answer: dict[str, Any] = json.loads(told.stdout)
    rows = {(row["policy"], row["waiting_weight"]): row for row in answer["data"]}
    assert set(rows) == {(policy, weight) for policy in ("stoker", "keepalive:60", "oracle") for weight in (1.0, 10.0)}
    assert all(row["requests"] == 300 for row in rows.values())
    fixed = [rows["keepalive:60", weight] for weight in (1.0, 10.0)]
    assert fixed[0]["held_device_s"] == fixed[1]["held_device_s"], "a policy without a weight is simulated once"
    row = fixed[1]
    cost = row["held_device_s"] - row["full_batch_device_s"] + 10.0 * row["waited_s"]
    assert row["objective_device_s"] == pytest.approx(cost)
    assert row["usd"] == pytest.approx(row["held_device_s"] / 3600 * 2)
    assert rows["oracle", 10.0]["objective_device_s"] <= row["objective_device_s"]
    assert rows["oracle", 1.0]["share_of_way_to_oracle"] == pytest.approx(1.0)

    with (tmp_path / "out" / "summary.csv").open() as file:
        summary = list(csv.DictReader(file))
    assert [float(each["held_device_s"]) for each in summary] == [row["held_device_s"] for row in answer["data"]]
    assert (tmp_path / "out" / "functions.csv").read_text().count("\n") == 1 + 6
    assert (tmp_path / "out" / "series.csv").read_text().startswith("policy,waiting_weight,time_s,devices_held")
    for name in ("over_time.svg", "cost.svg"):
        root = ET.fromstring((tmp_path / "out" / name).read_text())
        assert {"stoker", "keepalive:60", "oracle"} <= {text.text for text in root.iter() if text.text}


def test_the_table_says_what_was_drawn_and_left_out() -> None:
    told = simulate(
        "--trace", str(DATA / "servegen_4_clients_2d.csv.gz"), "--days", "0.5", "--functions", "2", "--thin", "0.25",
        "--policy", "keepalive:60", "--policy", "reactive", "--seed", "7",
    )  # fmt: skip
    assert told.exit_code == 0, told.stderr
    for said in ("2 of 4 functions", "chance of 0.25 (seed 7)", "arrivals drawn from 600 s counts", "published start"):
        assert said in told.stdout
    assert re.search(r"keepalive:60 +[\d,.]+", told.stdout)
    assert max(map(len, told.stdout.splitlines()[-8:])) <= WIDE


def test_the_same_seed_gives_the_same_numbers() -> None:
    options = (
        "--trace", str(DATA / "azure_functions_2019_3fn_2d.csv.gz"), "--days", "0.05", "--thin", "0.1",
        "--policy", "knative", "--json", "--seed",
    )  # fmt: skip
    assert simulate(*options, "3").stdout == simulate(*options, "3").stdout != simulate(*options, "4").stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "give recorded traffic with --trace"),
        (("--trace", "missing.csv"), "missing.csv: cannot be read"),
        (("--trace", str(DATA / "README.md")), "README.md:1: its first line"),
        (("--trace", "{trace}", "--policy", "fastest"), "there is no policy 'fastest'"),
        (("--trace", "{trace}", "--policy", "knative:speed=2"), "no parameter 'speed'"),
        (("--trace", "{trace}", "--policy", "stoker:fast"), "takes no parameter"),
        (("--trace", "{trace}", "--slots", "8"), "SLOTSxDEVICES"),
        (("--trace", "{trace}", "--slots", "1x1", "--models", "70"), "needs more devices than the 1"),
        (("--trace", "{trace}", "--models", "big"), "list of billions"),
        (("--trace", "{trace}", "--thin", "0"), "--thin is above 0"),
        (("--trace", "{trace}", "--learn-days", "5"), "nothing is left to score"),
        (("--trace", "{trace}", "--max-requests", "10"), "not one of its functions"),
        (("--trace", "{trace}", "--export", "x.csv"), "--export writes what --from-journal reads"),
        (("--trace", "{trace}", "--from-journal"), "give recorded traffic"),
    ],
)
def test_what_cannot_be_done_is_said(options: tuple[str, ...], reason: str) -> None:
    trace = str(DATA / "azure_llm_2023_code_head.csv.gz")
    told = simulate(*(option.format(trace=trace) for option in options))
    assert told.exit_code in (1, 2)
    assert reason in told.stderr
    assert "Traceback" not in told.stderr


def test_sizes_are_dealt_in_turn_and_get_the_devices_they_need() -> None:
    functions = functions_of(["a", "b", "c"], (), (1.0, 70.0))
    assert [function.devices for function in functions] == [1, 4, 1]
    assert functions[1].service.kv_tokens > 100_000
    small, large = functions[0].starts, functions[1].starts
    assert small.expected_s("pool") == pytest.approx(3.5 + 2 / 13, rel=0.02)
    assert (large.expected_s("pool") or 0) < (large.expected_s("disk") or 0) < (large.expected_s("store") or 0)
    assert Size(8.0).service().step_s(1) == pytest.approx(0.003 + 16e9 / (0.6 * 3.35e12) + 0.0001)


def test_a_service_is_as_fast_as_its_requests_were() -> None:
    """Steps of 20 ms and 1 ms a request; prompts at 1,000 tokens a second."""
    rows = []
    for beside in (1, 2, 4, 8) * 5:
        output, prompt = 50 + beside, 100 * beside
        passed_us = int((output - 1) * (20_000 + 1_000 * beside))
        prefill_us = 21_000 + prompt * 1_000
        rows.append([0, prompt, 0, output, 1_000_000, 1_000_000 + passed_us, prefill_us, passed_us // beside])
    service = service_of(np.asarray(rows, np.int64), 32)
    assert service is not None
    assert service.prefill_tokens_per_s == pytest.approx(1000, rel=0.02)
    assert service.step_s(8) == pytest.approx(0.028, rel=0.02)
    assert service.first_token_s(400) == pytest.approx(0.421, rel=0.02)
    assert service_of(np.zeros((3, 8), np.int64), 32) is None


def test_the_way_of_a_request_is_what_those_that_waited_least_neither_waited_nor_computed() -> None:
    """20 ms on the way; every second one met a start, and some were never answered."""
    rows = [[0, 10, 0, 5, 20_000 + 30_000 + (2_000_000 if n % 2 else 0), 0, 30_000, 0] for n in range(20)]
    rows += [[0, 10, 0, 0, 0, 0, 0, 0]] * 5
    assert way_of(np.asarray(rows, np.int64)) == pytest.approx(0.02)
    assert way_of(np.zeros((3, 8), np.int64)) == 0.0
