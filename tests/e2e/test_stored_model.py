"""A whole service whose model lies in a bucket: deployed, and served by the engine as the same files here are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from model_loader.objects import open_store
from tests.support.checkpoints import make_tiny_llama
from tests.support.seaweed import ADMIN, Seaweed
from tests.support.service import HttpError, Service

pytestmark = pytest.mark.e2e


def test_a_model_in_a_bucket_is_deployed_and_answers_as_the_same_files_here(
    tmp_path: Path, seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ADMIN.environ().items():
        monkeypatch.setenv(name, value)
    root = make_tiny_llama(tmp_path / "tiny")
    uri = seaweed.uri(f"models-{os.getpid()}/tiny")
    upload = open_store(uri)
    for path in root.iterdir():
        upload.put(path.name, path.read_bytes())
    upload.close()
    body = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0}
    with Service(tmp_path / "data", env=ADMIN.environ()) as service:
        service.deploy("stored", uri)
        service.deploy("here", f"file://{root}")
        stored, here = (service.wait_imported(name) for name in ("stored", "here"))
        assert stored["import"]["state"] == here["import"]["state"] == "ready"
        (model,) = service.call("GET", "/api/v1/models")["data"]
        assert sorted(model["uris"]) == sorted([uri, f"file://{root}"])
        assert model["functions"] == ["here", "stored"]
        texts = [
            service.call("POST", "/v1/completions", {"model": name, **body})["choices"][0]["text"]
            for name in ("stored", "here")
        ]
        assert texts[0] == texts[1]
        with pytest.raises(HttpError) as refused:
            service.call("DELETE", f"/api/v1/models/{model['identity']}")
        assert refused.value.status == 409
