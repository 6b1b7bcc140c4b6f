"""A prompt's KV outlives its replica: kept, listed, loaded by the next cold one, verified, and its index made again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from control_plane.cli.main import app
from tests.support.checkpoints import make_tiny_llama
from tests.support.replica_client import wait_for
from tests.support.service import Service

PROMPT = [(7 * i) % 450 + 20 for i in range(1500)]
Stoker = Callable[..., Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("stored")
    checkpoint = make_tiny_llama(folder / "tiny", layers=4, hidden=128)
    with Service(folder / "data", env={"STOKER_KV_GRACE_S": "0", "STOKER_KV_LOAD": "always"}) as service:
        for name, shares in (("fn", "tenant"), ("twin", "tenant"), ("alone", "function"), ("none", "none")):
            service.deploy(
                name,
                f"file://{checkpoint}",
                share_prefixes=shares,
                scaling={"keep_alive": 600},
                price={"device_hour_usd": "100000"},
                engine_options={"kv_bytes": 64 << 20, "threads": 1},
            )
        yield service


@pytest.fixture
def stoker(service: Service) -> Stoker:
    def run(*arguments: str, status: int = 0) -> Any:
        done = CliRunner().invoke(app, ["kv", *arguments, "-d", str(service.data_dir), "--json"])
        assert done.exit_code == status, (done.output, done.exception)
        return json.loads(done.stdout)

    return run


def ask(service: Service, function: str = "fn", prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    body = {"model": function, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    answer: dict[str, Any] = service.call("POST", "/v1/completions", body)
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def to_zero(service: Service) -> None:
    for row in service.replicas():
        service.call("DELETE", f"/api/v1/replicas/{row['replica_id']}")
    service.wait_zero()


WHOLE = len(PROMPT) // 32 * 32


def loaded_cold(service: Service, function: str = "fn") -> dict[str, Any]:
    """An answer whose prompt came from the store, by a replica that began for it and so has nothing of its own. A busy
    machine may read a chunk later than computing it takes, and then rightly computes it: it gets some tries."""
    for _ in range(8):
        to_zero(service)
        answer = ask(service, function)
        if cached(answer) >= WHOLE // 2:
            return answer
    raise AssertionError(f"the prompt of {function} was never loaded, the last time {cached(answer)} tokens of it")


def live(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [pack for pack in told["data"] if pack["state"] == "live"]


def test_the_next_cold_replica_loads_what_the_last_one_computed(service: Service, stoker: Stoker) -> None:
    first = ask(service)
    assert cached(first) == 0
    wait_for(lambda: sum(p["tokens"] for p in live(stoker("ls"))) >= WHOLE, what="kept chunks")
    second = loaded_cold(service)
    assert second["choices"] == first["choices"]
    why = service.call("GET", f"/api/v1/why/{first['id']}")
    assert any(event["what"] == "kv_kept" and "saved" in event["detail"] for event in why["timeline"])


def test_functions_share_within_a_tenant_only_where_they_say_so(service: Service, stoker: Stoker) -> None:
    assert cached(ask(service, "alone")) == 0
    assert cached(ask(service, "none")) == 0
    loaded_cold(service, "twin")
    loaded_cold(service, "alone")
    to_zero(service)
    assert cached(ask(service, "none")) == 0


def test_a_pack_can_be_looked_into(service: Service, stoker: Stoker) -> None:
    pack = live(stoker("ls"))[-1]
    told = stoker("inspect", pack["pack"].rpartition("/")[2][:12])
    assert told["store"].get("event") == "pack", told
    chunks = told["store"]["chunks"]
    assert sum(c["tokens"] for c in chunks) >= pack["tokens"]
    assert chunks[0]["made_of"]["layers"] == 4 and chunks[0]["made_of"]["dtype"] == "float32"
    assert stoker("inspect", chunks[0]["chain"])["store"]["pack"] == pack["pack"]
    assert "scope" not in json.dumps(told["index"])


def test_a_lost_index_is_made_again_from_the_store(service: Service, stoker: Stoker) -> None:
    known = sum(p["tokens"] for p in live(stoker("ls")))
    with sqlite3.connect(service.data_dir / "stoker.db", timeout=10) as database:
        database.execute("DELETE FROM kv_chunks")
        database.execute("DELETE FROM kv_packs")
    to_zero(service)
    assert cached(ask(service, prompt=PROMPT[:640], max_tokens=1)) == 0
    told = stoker("rebuild-index")
    assert told["new"] > 0 and told["strangers"] == 0 and not told["bad_packs"]
    assert sum(p["tokens"] for p in live(stoker("ls"))) >= known
    loaded_cold(service)


def test_a_changed_byte_is_found_quarantined_and_never_served(service: Service, stoker: Stoker) -> None:
    assert stoker("verify")["checked"] == len(live(stoker("ls")))
    for pack in live(stoker("ls")):
        path: Path = service.data_dir / "objects" / pack["pack"]
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    packs = len(live(stoker("ls")))
    told = stoker("verify", status=1)
    assert len(told["bad_packs"]) == packs and not live(stoker("ls"))
    to_zero(service)
    assert cached(ask(service)) == 0
    stoker("rebuild-index")
    assert not [p for p in live(stoker("ls")) if p["pack"] in {bad["pack"] for bad in told["bad_packs"]}]


def test_what_nothing_names_is_collected(service: Service, stoker: Stoker) -> None:
    orphan = service.data_dir / "objects" / "kv" / "packs" / "ab" / ("ab" * 32)
    orphan.parent.mkdir(parents=True, exist_ok=True)
    orphan.write_bytes(b"left behind")
    wait_for(lambda: not orphan.exists() or (stoker("gc") and False), what="the orphan's end")
