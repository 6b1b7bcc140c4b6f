"""Trace files: what is read of them, and how bad ones are refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from control_plane.errors import InvalidRequest
from control_plane.simulation.formats import read
from control_plane.simulation.lengths import TokenLengths
from control_plane.simulation.own_traffic import write_own_traffic
from control_plane.simulation.rates import Rates, at_quantiles, spaced
from control_plane.simulation.trace import BadTrace, Trace, together

DATA = Path(__file__).parents[2] / "data" / "traces"


def requests_of(name: str) -> Trace:
    read_in = read(DATA / name)
    assert isinstance(read_in, Trace)
    return read_in


def rates_of(name: str) -> Rates:
    read_in = read(DATA / name)
    assert isinstance(read_in, Rates)
    return read_in


def test_azure_llm_rows_become_requests_in_seconds_from_a_whole_ten_minutes() -> None:
    trace = requests_of("azure_llm_2023_code_head.csv.gz")
    assert len(trace) == 300
    assert trace.names == ("azure_llm_2023_code_head",)
    assert trace.arrival_s[1] - trace.arrival_s[0] == pytest.approx(0.052, abs=1e-5)
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (4808, 10)
    assert trace.origin_s == 1_700_158_200.0
    assert trace.origin_s + trace.arrival_s[0] == pytest.approx(1_700_158_623.97996)


def test_mooncake_milliseconds_become_seconds() -> None:
    trace = requests_of("mooncake_conversation_head.jsonl.gz")
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (6758, 500)
    assert 0 < trace.length_s < 60
    assert any("shared prefixes" in note for note in trace.notes)


def test_azure_functions_keep_every_minutes_count() -> None:
    rates = rates_of("azure_functions_2019_3fn_2d.csv.gz")
    assert rates.length_s == 2 * 86_400
    drawn = rates.drawn(TokenLengths(), seed=3)
    minutes = np.floor(drawn.arrival_s / 60).astype(int)
    for place in range(3):
        recorded = np.zeros(2880, int)
        mine = rates.function == place
        recorded[(rates.start_s[mine] / 60).astype(int)] = rates.count[mine]
        assert (np.bincount(minutes[drawn.function == place], minlength=2880) == recorded).all()
    assert (np.diff(drawn.arrival_s) >= 0).all()


def test_servegen_rates_become_whole_counts_in_their_windows() -> None:
    rates = rates_of("servegen_4_clients_2d.csv.gz")
    assert len(rates.names) == 4
    drawn = rates.drawn(TokenLengths(), seed=0)
    assert (drawn.requests_by_function() == rates.requests_by_function()).all()
    window = np.floor(drawn.arrival_s / 600) * 600
    first = rates.function == 0
    assert set(window[drawn.function == 0]) == set(rates.start_s[first])


def test_drawn_requests_are_those_of_the_seed() -> None:
    rates = rates_of("servegen_4_clients_2d.csv.gz")
    once, again, other = (rates.drawn(TokenLengths(), seed) for seed in (1, 1, 2))
    assert (once.arrival_s == again.arrival_s).all() and (once.prompt_tokens == again.prompt_tokens).all()
    assert not (once.arrival_s == other.arrival_s).all()
    assert any("seed 1" in note for note in once.notes)


@pytest.mark.parametrize("cv", [0.1, 1.0, 4.0])
def test_gaps_within_a_window_have_the_recorded_spread(cv: float) -> None:
    offsets = spaced(np.asarray([200_000]), np.asarray([cv]), 600.0, np.random.default_rng(0))
    gaps = np.diff(offsets)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_spread_that_underflows_is_one_burst_within_its_window() -> None:
    offsets = spaced(np.asarray([5, 5]), np.asarray([1000.0, 1.0]), 600.0, np.random.default_rng(0))
    assert len(offsets) == 10
    assert ((offsets >= 0) & (offsets < 600)).all()


def test_a_quiet_window_behind_busy_ones_keeps_its_spacing() -> None:
    counts = np.asarray([1_000_000, 3])
    offsets = spaced(counts, np.asarray([0.01, 8.0]), 600.0, np.random.default_rng(0))[-3:]
    assert (np.diff(offsets) > 0).all()


HEADS = {
    "llm": "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "servegen": "category,model,client,window_start_s,rate_rps,cv\n",
    "own": "arrival_unix_s,tenant,function,prompt_tokens,output_tokens\n",
    "functions": "hash_func,day," + ",".join(map(str, range(1, 1441))) + "\n",
}
DAY = ",".join(["1"] * 1440)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (HEADS["llm"] + "2023-11-16 18:00:01,5,5\n2023-11-16 18:00:00,5,5\n", 3, "TIMESTAMP goes back"),
        (HEADS["llm"] + "yesterday,5,5\n", 2, "'yesterday' instead of a date"),
        (HEADS["llm"] + "2023-11-16 18:00:01,5\n", 2, "2 cells instead of 3"),
        (HEADS["llm"] + "2023-11-16 18:00:01,-5,5\n", 2, "ContextTokens is -5"),
        (HEADS["llm"] + "2023-11-16 18:00:01,5,many\n", 2, "GeneratedTokens is 'many'"),
        (HEADS["llm"], None, "holds no request"),
        (HEADS["servegen"] + "language,m,1,600,0.1,1\nlanguage,m,1,0,0.1,1\n", 3, "goes back from 600 to 0"),
        (HEADS["servegen"] + "language,m,1,600,0.1,1\nlanguage,m,1,600,0.1,1\n", 3, "is there twice"),
        (HEADS["servegen"] + "language,m,1,600,nan,1\n", 2, "rate_rps is nan"),
        (HEADS["servegen"] + "language,m,1,600,0.1,-1\n", 2, "cv is -1"),
        (HEADS["servegen"] + "language,m,1,610,0.1,1\n", 2, "not a multiple of 600"),
        (HEADS["own"] + "5,a,f,1,1\n4,a,f,1,1\n", 3, "arrival_unix_s goes back"),
        (HEADS["own"] + "5,a,,1,1\n", 2, "no function"),
        (HEADS["own"] + "inf,a,f,1,1\n", 2, "must be finite"),
        (HEADS["functions"] + f"f,1,{DAY}\nf,1,{DAY}\n", 3, "is there twice"),
        (HEADS["functions"] + f"f,2,{DAY}\ng,1,{DAY}\nf,1,{DAY}\n", 4, "goes back from 2 to 1"),
        (HEADS["functions"] + "f,1,3,4\n", 2, "4 cells instead of 1442"),
        ('{"timestamp": 5, "input_length": 1, "output_length": 1}\n{"timestamp": 4}\n', 2, "input_length"),
        ('{"timestamp": 5, "input_length": 1, "output_length": 1}\n{broken\n', 2, "not a request"),
        (
            '{"timestamp": 5, "input_length": 1, "output_length": 1}\n'
            '\n{"timestamp": 4, "input_length": 1, "output_length": 1}\n',
            3,
            "timestamp goes back",
        ),
        ("a,b,c\n1,2,3\n", 1, "of none of the known formats"),
        ("", None, "is empty"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, text: str, line: int | None, reason: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(BadTrace) as refused:
        read(path)
    assert refused.value.line == line
    assert str(refused.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert reason in str(refused.value)


def test_a_file_cut_short_or_not_text_is_refused_at_its_line(tmp_path: Path) -> None:
    whole = (DATA / "azure_llm_2023_code_head.csv.gz").read_bytes()
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadTrace, match="cannot be read any further"):
        read(cut)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(HEADS["llm"].encode() + b"\xff\xfe,1,1\n")
    with pytest.raises(BadTrace, match=r"binary\.csv:2: not UTF-8"):
        read(binary)
    with pytest.raises(BadTrace, match="cannot be read"):
        read(tmp_path / "missing.csv")


def test_own_traffic_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = requests_of("azure_llm_2023_conv_head.csv.gz")
    path = tmp_path / "export.csv.gz"
    write_own_traffic(path, trace)
    with gzip.open(path, "rt") as text:
        assert text.readline().startswith("arrival_unix_s,")
    back = read(path)
    assert isinstance(back, Trace)
    assert back.arrival_s == pytest.approx(trace.arrival_s, abs=2e-6)
    assert (back.prompt_tokens == trace.prompt_tokens).all()
    assert back.origin_s == pytest.approx(trace.origin_s, abs=1e-5)
    first = path.read_bytes()
    write_own_traffic(path, trace)
    assert path.read_bytes() == first


def test_thinning_keeps_the_share_and_says_so() -> None:
    trace = requests_of("azure_llm_2023_conv_head.csv.gz")
    thinned = trace.thinned(0.5, seed=1)
    assert 110 < len(thinned) < 190
    assert "thinned: each request kept with a chance of 0.5 (seed 1)" in thinned.notes
    assert (thinned.arrival_s == trace.thinned(0.5, seed=1).arrival_s).all()
    rates = rates_of("azure_functions_2019_3fn_2d.csv.gz")
    kept = rates.thinned(0.1, seed=1).requests_by_function().sum() / rates.requests_by_function().sum()
    assert kept == pytest.approx(0.1, abs=0.01)
    with pytest.raises(InvalidRequest):
        trace.thinned(0.0, seed=1)


def test_too_many_requests_are_refused_before_any_is_drawn() -> None:
    rates = rates_of("servegen_4_clients_2d.csv.gz")
    many = Rates(rates.source, ("f",), 60.0, np.zeros(1, np.int32), np.zeros(1), np.asarray([10**11]), np.ones(1), 60.0)
    with pytest.raises(InvalidRequest, match="choose fewer functions"):
        many.drawn(TokenLengths(), 0)


def test_functions_at_quantiles_are_the_most_that_stay_within_the_bound() -> None:
    totals = np.asarray([0, 10, 20, 30, 40, 1000])
    assert at_quantiles(totals, 2) == [2, 4]
    assert at_quantiles(totals, 5) == [1, 2, 3, 4, 5]
    assert at_quantiles(totals, 5, requests_at_most=100) == [1, 2, 3, 4]
    assert at_quantiles(totals, 2, requests_at_most=39) == [1, 2]
    assert at_quantiles(totals, 2, requests_at_most=5) == []


def test_files_together_share_functions_of_one_name_and_stay_in_order() -> None:
    one, other = requests_of("azure_llm_2023_code_head.csv.gz"), requests_of("mooncake_conversation_head.jsonl.gz")
    both = together([one, other, one])
    assert both.names == (one.names[0], other.names[0])
    assert both.requests_by_function().tolist() == [600, 100]
    assert (np.diff(both.arrival_s) >= 0).all()
    assert any("laid over one another" in note for note in both.notes)


def test_some_functions_and_days_alone() -> None:
    rates = rates_of("azure_functions_2019_3fn_2d.csv.gz")
    trace = rates.of_functions([2, 0]).between(0, 86_400).drawn(TokenLengths(), 0)
    assert trace.names == (rates.names[2], rates.names[0])
    assert trace.arrival_s.max() < 86_400
    second = trace.of_functions([1]).between(3600, 7200)
    assert second.names == (rates.names[0],)
    assert set(second.function) == {0}
    assert second.arrival_s.min() >= 3600
