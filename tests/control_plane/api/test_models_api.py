"""`/api/v1/models`: who sees and does what, and what each answer holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from control_plane.functions import ImportState
from control_plane.spec import FunctionSpec
from control_plane.tenants import Role
from model_loader.importer import import_model
from model_loader.manifest import Manifest
from tests.control_plane.api.conftest import Service
from tests.support.checkpoints import make_tiny_llama

BASE = "/api/v1/models"


@pytest.fixture
def manifest(tmp_path: Path, service: Service) -> Manifest:
    return import_model(f"file://{make_tiny_llama(tmp_path / 'tiny')}", service.models_dir)


async def lines(service: Service, path: str, body: Any = None, key: str | None = None) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key or service.admin}"}
    async with service.client.post(path, headers=headers, json=body) as response:
        assert response.status == 200, await response.text()
        return [json.loads(line) for line in (await response.text()).splitlines()]


def alter(manifest: Manifest) -> Path:
    path = Path(manifest.files[0].path)
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    return path


async def use(service: Service, manifest: Manifest, name: str, tenant: str = "default") -> None:
    function = await service.functions.put(FunctionSpec(name=name, model="pypi://x"), tenant)
    await service.functions.set_import(
        name, tenant, function.revision, ImportState.READY,
        identity=manifest.identity, manifest_path=str(manifest.path),
    )  # fmt: skip


async def test_models_are_listed_and_inspected_by_uri_or_digits(service: Service, manifest: Manifest) -> None:
    await use(service, manifest, "smol")
    (model,) = (await service.call("GET", BASE))["data"]
    assert (model["identity"], model["uris"], model["state"]) == (manifest.identity, [manifest.uri], "ready")
    assert (model["format"], model["dtype"], model["functions"]) == ("safetensors", "float32", ["smol"])
    for name in (manifest.identity[:8], quote(manifest.uri, safe="")):
        found = await service.call("GET", f"{BASE}/{name}")
        assert found["identity"] == manifest.identity
        assert [file["sha256"] for file in found["files"]] == [each.sha256 for each in manifest.contents]
        assert len(found["tensor_list"]) == len(manifest.tensors)
    assert (await service.call("GET", f"{BASE}/abcd1234", status=404))["error"]["code"] == "model_not_found"
    await service.call("GET", f"{BASE}/x", status=400)


async def test_an_import_tells_how_far_it_is_and_what_it_found(service: Service, tmp_path: Path) -> None:
    root = make_tiny_llama(service.allowed_dir / "m")
    told = await lines(service, f"{BASE}/import", {"model": f"file://{root}"})
    assert {line["event"] for line in told[:-1]} == {"progress"}
    assert told[-1]["event"] == "done"
    assert Manifest.load(Path(told[-1]["manifest_path"])).identity == told[-1]["identity"]
    (root / "model.safetensors").write_bytes(b"x")
    told = await lines(service, f"{BASE}/import", {"model": f"file://{root}"})
    assert (told[-1]["event"], told[-1]["code"]) == ("error", "model_format_invalid")
    assert "model.safetensors is truncated" in told[-1]["message"]


async def test_what_is_not_allowed_or_no_uri_is_refused_at_once(service: Service) -> None:
    for uri, said in (
        ("file:///etc/passwd", "none of the patterns"),
        ("s3://B", "none of the patterns"),
        ("pypi://x/m.bin", "is a pickle"),
        ("pypi://", "malformed"),
    ):
        refused = await service.call("POST", f"{BASE}/import", json={"model": uri}, status=400)
        assert said in refused["error"]["message"]


async def test_verification_names_file_offset_and_expected_value(service: Service, manifest: Manifest) -> None:
    assert (await lines(service, f"{BASE}/verify"))[-1]["bad_models"] == 0
    path = alter(manifest)
    told = await lines(service, f"{BASE}/verify", {"models": [manifest.identity[:8]]})
    (bad,) = [line for line in told if line["event"] == "bad"]
    assert (bad["file"], bad["offset"]) == (str(path), 0)
    assert bad["expected"] == manifest.chunk_lists()[0].expected(0).hex()
    assert told[-1]["bad_models"] == 1


async def test_a_model_that_a_function_uses_is_not_removed(service: Service, manifest: Manifest) -> None:
    await use(service, manifest, "smol")
    refused = await service.call("DELETE", f"{BASE}/{manifest.identity}", status=409)
    assert refused["error"]["code"] == "model_in_use" and "default/smol" in refused["error"]["message"]
    assert manifest.path.exists()
    await service.functions.delete("smol", "default")
    removed = await service.call("DELETE", f"{BASE}/{manifest.identity}")
    assert removed["deleted"] and removed["left"] == [manifest.files[0].path]
    assert (await service.call("GET", BASE))["data"] == []


async def test_another_tenant_sees_what_its_functions_use_and_removes_nothing(
    service: Service, manifest: Manifest
) -> None:
    _, other = await service.keys.create("acme", "ops", Role.ADMIN)
    assert (await service.call("GET", BASE, key=other))["data"] == []
    await service.call("GET", f"{BASE}/{manifest.identity}", key=other, status=404)
    assert (await lines(service, f"{BASE}/verify", key=other))[-1]["models"] == 0
    await use(service, manifest, "theirs", "acme")
    (seen,) = (await service.call("GET", BASE, key=other))["data"]
    assert seen["functions"] == ["theirs"]
    await service.call("DELETE", f"{BASE}/{manifest.identity}", key=other, status=403)
    await service.call("GET", BASE, key=service.user, status=403)
    await service.call("POST", f"{BASE}/import", key=service.user, json={"model": "pypi://x"}, status=403)
