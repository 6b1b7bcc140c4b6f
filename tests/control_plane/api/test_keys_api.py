from __future__ import annotations

from typing import Any

import pytest

from tests.control_plane.api.conftest import Service

PATH = "/api/v1/keys"


async def test_a_key_is_shown_once(service: Service) -> None:
    made = await service.call("POST", PATH, json={"name": "ci"}, status=201)
    assert made["key"].startswith("sk-stoker-") and made["role"] == "user"
    listed = await service.call("GET", PATH)
    assert made["id"] in [each["id"] for each in listed["data"]]
    assert made["key"] not in str(listed) and "key" not in listed["data"][0]
    assert (await service.call("GET", "/api/v1/functions", key=made["key"]))["data"] == []


async def test_a_revoked_key_opens_nothing(service: Service) -> None:
    made = await service.call("POST", PATH, json={"name": "ci"}, status=201)
    revoked = await service.call("DELETE", f"{PATH}/{made['id']}")
    assert revoked["revoked"] is True and revoked["revoked_us"] is not None
    await service.call("GET", "/api/v1/functions", key=made["key"], status=401)
    await service.call("DELETE", f"{PATH}/key_unknown", status=404)


async def test_an_admin_cannot_lock_itself_out(service: Service) -> None:
    listed = await service.call("GET", PATH)
    own = next(each["id"] for each in listed["data"] if each["role"] == "admin")
    await service.call("DELETE", f"{PATH}/{own}", status=409)


async def test_users_manage_no_keys(service: Service) -> None:
    await service.call("POST", PATH, json={"name": "x"}, key=service.user, status=403)
    await service.call("GET", PATH, key=service.user, status=403)


async def test_only_the_installations_admins_reach_into_other_tenants(service: Service) -> None:
    made = await service.call("POST", PATH, json={"name": "x", "role": "admin", "tenant": "acme"}, status=201)
    other = made["key"]
    assert [each["id"] for each in (await service.call("GET", f"{PATH}?tenant=acme"))["data"]] == [made["id"]]
    await service.call("GET", f"{PATH}?tenant=default", key=other, status=403)
    await service.call("POST", PATH, json={"name": "y", "tenant": "default"}, key=other, status=403)
    assert (await service.call("POST", PATH, json={"name": "y"}, key=other, status=201))["tenant"] == "acme"
    ids = [each["id"] for each in (await service.call("GET", PATH))["data"]]
    await service.call("DELETE", f"{PATH}/{ids[0]}", key=other, status=404)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": 1}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"name": "x", "role": "root"}, "role"),
        ({"name": "x", "tenant": "A B"}, "tenant"),
        ({"name": "x", "extra": 1}, "extra"),
    ],
)
async def test_a_bad_body_is_refused_by_field(service: Service, body: dict[str, Any], param: str) -> None:
    assert (await service.call("POST", PATH, json=body, status=400))["error"]["param"] == param
