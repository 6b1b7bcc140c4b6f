from __future__ import annotations

from tests.control_plane.api.conftest import Service

PATH = "/api/v1/budgets"
DAY = {"kind": "requests", "period": "day", "amount": 5}


async def test_budgets_are_set_listed_changed_and_taken_away(service: Service) -> None:
    told = await service.call("PUT", PATH, json=DAY)
    assert (told["amount"], told["spent"], told["key"], told["tenant"]) == (5, 0, None, "default")
    await service.call("PUT", PATH, json={**DAY, "amount": 7})
    made = await service.call("POST", "/api/v1/keys", json={"name": "ci"}, status=201)
    await service.call("PUT", PATH, json={**DAY, "kind": "microusd", "key": made["id"]})
    listed = (await service.call("GET", PATH))["data"]
    assert [(each["key"], each["kind"], each["amount"]) for each in listed] == [
        (None, "requests", 7),
        (made["id"], "microusd", 5),
    ]
    assert (await service.call("DELETE", f"{PATH}?kind=requests&period=day"))["deleted"]
    await service.call("DELETE", f"{PATH}?kind=requests&period=day", status=404)
    assert len((await service.call("GET", PATH))["data"]) == 1


async def test_what_makes_no_sense_is_refused_by_name(service: Service) -> None:
    for fields, named in (({"kind": "cookies"}, "kind"), ({"period": "year"}, "period"), ({"amount": -1}, "amount"),
                          ({"amount": 1 << 60}, "amount")):  # fmt: skip
        refused = await service.call("PUT", PATH, json={**DAY, **fields}, status=400)
        assert named in refused["error"]["message"]
    await service.call("PUT", PATH, json={**DAY, "key": "key_none"}, status=404)
    await service.call("DELETE", f"{PATH}?kind=requests&period=year", status=400)


async def test_a_tenant_bounds_its_keys_and_who_runs_the_installation_the_tenant(service: Service) -> None:
    made = await service.call("POST", "/api/v1/keys", json={"name": "x", "role": "admin", "tenant": "acme"}, status=201)
    await service.call("PUT", f"{PATH}?tenant=acme", json=DAY)
    acme = made["key"]
    await service.call("PUT", PATH, json={**DAY, "amount": 1 << 40}, key=acme, status=403)
    await service.call("DELETE", f"{PATH}?kind=requests&period=day", key=acme, status=403)
    await service.call("PUT", PATH, json={**DAY, "key": made["id"]}, key=acme)
    await service.call("GET", f"{PATH}?tenant=default", key=acme, status=403)
    assert len((await service.call("GET", PATH, key=acme))["data"]) == 2
    await service.call("GET", PATH, key=service.user, status=403)
