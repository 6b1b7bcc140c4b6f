"""The whole service on PostgreSQL: its control plane and its database are killed, and streams go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TOKEN_S
from tests.e2e.test_stub_service import PATH, TOKENS, Reader, body
from tests.support import postgres as postgresql
from tests.support.checkpoints import make_tiny_llama
from tests.support.postgres import PostgresServer
from tests.support.service import Service

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    """Killed here, so not the one that others use."""
    if (reason := postgresql.missing()) is not None:
        pytest.skip(reason)
    with postgresql.server() as server:
        yield server


@pytest.fixture(scope="module")
def service(database: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("postgres")
    checkpoint = make_tiny_llama(folder / "tiny")
    with database.database() as url:
        env = {"STOKER_STUB_TOKEN_S": TOKEN_S}
        with Service(folder / "data", env=env, args=("--database", url)) as service:
            service.deploy("stub", f"file://{checkpoint}", engine="stub", scaling={"keep_alive": 30})
            yield service


def rest_of(service: Service, reader: Reader) -> Reader:
    rest = Reader(service, f"{PATH}/{reader.request_id}/stream", Last_Event_ID=str(reader.places[-1]))
    rest.finish()
    assert rest.done, rest.error
    return rest


def test_after_a_kill_of_the_control_plane_a_reader_gets_the_rest_and_only_the_rest(service: Service) -> None:
    whole = service.call("POST", PATH, body())["choices"][0]["text"]
    assert not (service.data_dir / "stoker.db").exists()
    reader = Reader(service, sent=body(stream=True))
    reader.wait(10)
    service.kill("gateway")
    reader.finish()
    assert not reader.done
    service.start()
    rest = rest_of(service, reader)
    assert reader.places + rest.places == list(range(1, TOKENS + 1))
    assert reader.texts[0] + rest.texts.get(0, "") == whole


def test_a_stream_pauses_while_the_database_is_gone_and_loses_nothing(
    service: Service, database: PostgresServer
) -> None:
    whole = service.call("POST", PATH, body())["choices"][0]["text"]
    reader = Reader(service, sent=body(stream=True))
    reader.wait(10)
    database.kill()
    database.start()
    reader.finish()
    assert reader.done, reader.error
    assert reader.places == list(range(1, TOKENS + 1))
    assert reader.texts[0] == whole
