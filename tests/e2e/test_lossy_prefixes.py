"""A system prompt kept as fp8 or int4: a fraction of the bytes, served to the next cold replica of that function."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from control_plane.cli.main import app
from tests.support.checkpoints import make_tiny_llama
from tests.support.replica_client import wait_for
from tests.support.service import Service

PROMPT = [(7 * i) % 450 + 20 for i in range(1000)]
WHOLE = len(PROMPT) // 32 * 32
SHARES = {"raw": 1.0, "fp8": 0.27, "int4": 0.17}
"""Of the bytes of float32; an eighth and a quarter, and scales."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("lossy")
    checkpoint = make_tiny_llama(folder / "tiny", layers=4, hidden=256, heads=4, kv_heads=4)
    with Service(folder / "data", env={"STOKER_KV_LOAD": "always", "STOKER_KV_SHADOW_SHARE": "1"}) as service:
        for form in SHARES:
            service.deploy(
                form,
                f"file://{checkpoint}",
                shared_prefix_form=form,
                scaling={"keep_alive": 600},
                price={"device_hour_usd": "100000"},
                engine_options={"kv_bytes": 64 << 20, "threads": 1},
            )
        yield service


def ask(service: Service, function: str) -> dict[str, Any]:
    body = {"model": function, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = service.call("POST", "/v1/completions", body)
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def kv(service: Service, *arguments: str, status: int = 0) -> Any:
    done = CliRunner().invoke(app, ["kv", *arguments, "-d", str(service.data_dir), "--json"])
    assert done.exit_code == status, (done.output, done.exception)
    return json.loads(done.stdout)


def kept(service: Service, form: str) -> list[dict[str, Any]]:
    return [pack for pack in kv(service, "ls")["data"] if pack["form"] == form and pack["state"] == "live"]


def to_zero(service: Service) -> None:
    for row in service.replicas():
        service.call("DELETE", f"/api/v1/replicas/{row['replica_id']}")
    service.wait_zero()


def loaded_cold(service: Service, function: str) -> dict[str, Any]:
    """By a replica that has nothing of its own. A busy machine may read too late; it gets some tries."""
    for _ in range(8):
        to_zero(service)
        answer = ask(service, function)
        if cached(answer) >= WHOLE // 2:
            return answer
    raise AssertionError(f"the prompt of {function} was never loaded")


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_the_next_cold_replica_loads_the_prefix_in_its_functions_form(service: Service, form: str) -> None:
    to_zero(service)
    assert cached(ask(service, form)) == 0, "what other functions keep is in another form"
    wait_for(lambda: sum(p["tokens"] for p in kept(service, form)) >= WHOLE, what="kept chunks")
    answer = loaded_cold(service, form)
    assert answer["usage"]["completion_tokens"] == 8
    why = service.call("GET", f"/api/v1/why/{answer['id']}")
    assert any(form in event["detail"] for event in why["timeline"] if event["what"] == "resume"), why


def test_a_store_holds_a_fraction_of_the_raw_bytes(service: Service) -> None:
    per_token: dict[str, float] = {}
    for form in SHARES:
        if not kept(service, form):
            ask(service, form)
            wait_for(lambda form=form: sum(p["tokens"] for p in kept(service, form)) >= WHOLE, what="kept chunks")
        packs = kept(service, form)
        per_token[form] = sum(p["nbytes"] for p in packs) / sum(p["tokens"] for p in packs)
    for form, share in SHARES.items():
        # Headers (token ids, layer tables) weigh the same in every form.
        assert per_token[form] <= per_token["raw"] * (share + 0.04), per_token


def test_the_form_is_told_by_every_view(service: Service) -> None:
    if not kept(service, "fp8"):
        ask(service, "fp8")
        wait_for(lambda: kept(service, "fp8"), what="kept chunks")
    (pack, *_) = kept(service, "fp8")
    told = kv(service, "inspect", pack["pack"].rpartition("/")[2][:12])["store"]
    assert {chunk["form"] for chunk in told["chunks"]} == {"fp8"}
    assert told["chunks"][0]["made_of"]["scales"].startswith("fp8-e4m3")
    assert not kv(service, "verify")["bad_packs"]
    plain = CliRunner().invoke(app, ["kv", "ls", "-d", str(service.data_dir)]).output
    assert "FORM" in plain and "fp8" in plain


def test_a_lost_index_is_made_again_with_the_forms(service: Service) -> None:
    before = {form: sum(p["tokens"] for p in kept(service, form)) for form in ("fp8", "int4")}
    with sqlite3.connect(service.data_dir / "stoker.db", timeout=10) as database:
        database.execute("DELETE FROM kv_chunks")
        database.execute("DELETE FROM kv_packs")
    assert kv(service, "rebuild-index")["new"] > 0
    for form, tokens in before.items():
        assert sum(p["tokens"] for p in kept(service, form)) >= tokens
    loaded_cold(service, "fp8")


def test_a_damaged_chunk_is_a_miss(service: Service) -> None:
    if not kept(service, "int4"):
        ask(service, "int4")
        wait_for(lambda: kept(service, "int4"), what="kept chunks")
    for pack in kept(service, "int4"):
        path: Path = service.data_dir / "objects" / pack["pack"]
        raw = bytearray(path.read_bytes())
        chunks = kv(service, "inspect", pack["pack"].rpartition("/")[2][:12])["store"]["chunks"]
        first = min(chunks, key=lambda chunk: chunk["start"])
        # The last bytes of a chunk are the last layer's scales.
        raw[first["offset"] + first["nbytes"] - 3] ^= 4
        path.write_bytes(raw)
    to_zero(service)
    assert cached(ask(service, "int4")) == 0
    wait_for(lambda: any(p["state"] != "live" for p in kv(service, "ls")["data"]), what="the quarantine")
