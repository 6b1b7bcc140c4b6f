from __future__ import annotations

from tests.control_plane.api.conftest import Service

PATH = "/api/v1/quotas"


async def test_a_quota_is_set_shown_changed_and_taken_away(service: Service) -> None:
    told = await service.call("PUT", f"{PATH}?tenant=acme", json={"devices": 4, "weight": 2})
    assert (told["tenant"], told["devices"], told["weight"], told["held"]) == ("acme", 4, 2.0, 0)
    await service.call("PUT", f"{PATH}?tenant=acme", json={"weight": 0.5})
    listed = (await service.call("GET", PATH))["data"]
    assert [(each["tenant"], each["devices"], each["weight"]) for each in listed] == [
        ("acme", None, 0.5),
        ("default", None, 1.0),
    ]
    assert (await service.call("DELETE", f"{PATH}?tenant=acme"))["deleted"]
    await service.call("DELETE", f"{PATH}?tenant=acme", status=404)


async def test_how_much_kv_of_a_tenant_is_kept_is_a_quota_too(service: Service) -> None:
    told = await service.call("PUT", f"{PATH}?tenant=acme", json={"kv_bytes": 1 << 30})
    assert (told["devices"], told["kv_bytes"], told["kv_held_bytes"]) == (None, 1 << 30, 0)
    assert (await service.call("PUT", f"{PATH}?tenant=acme", json={"devices": 2}))["kv_bytes"] is None
    assert "kv_bytes" in (await service.call("PUT", PATH, json={"kv_bytes": 0}, status=400))["error"]["message"]


async def test_a_tenant_sees_its_own_quota_and_sets_none(service: Service) -> None:
    made = await service.call("POST", "/api/v1/keys", json={"name": "x", "role": "admin", "tenant": "acme"}, status=201)
    await service.call("PUT", f"{PATH}?tenant=other", json={"devices": 1})
    acme = made["key"]
    await service.call("PUT", PATH, json={"devices": 99}, key=acme, status=403)
    await service.call("DELETE", PATH, key=acme, status=403)
    await service.call("GET", f"{PATH}?tenant=other", key=acme, status=403)
    assert [each["tenant"] for each in (await service.call("GET", PATH, key=acme))["data"]] == ["acme"]
    await service.call("GET", PATH, key=service.user, status=403)


async def test_what_makes_no_sense_is_refused_by_name(service: Service) -> None:
    for fields, named in (({"devices": -1}, "devices"), ({"weight": 0}, "weight"), ({"weight": 1e9}, "weight"),
                          ({"device": 1}, "device")):  # fmt: skip
        refused = await service.call("PUT", PATH, json=fields, status=400)
        assert named in refused["error"]["message"]
