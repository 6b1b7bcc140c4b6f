from __future__ import annotations

from tests.control_plane.api.conftest import Service

PATH = "/api/v1/retention"


async def test_a_tenant_sets_how_long_its_requests_are_kept(service: Service) -> None:
    rule = await service.call("GET", PATH)
    assert (rule["log_s"], rule["own"]) == (3600.0, {"log_s": None, "request_s": None})
    told = await service.call("PUT", PATH, json={"log_s": 60})
    assert (told["log_s"], told["own"]["log_s"], told["own"]["request_s"]) == (60.0, 60.0, None)
    assert await service.call("GET", PATH) == told
    assert (await service.call("DELETE", PATH))["own"] == {"log_s": None, "request_s": None}
    assert (await service.call("GET", PATH))["log_s"] == 3600.0


async def test_what_makes_no_sense_is_refused_by_name(service: Service) -> None:
    for body, field in (({"log_s": -1}, "log_s"), ({"log_s": 1e12}, "log_s"), ({"request_s": 60}, "request_s"),
                        ({"log_days": 1}, "log_days"), ({"log_s": "soon"}, "log_s")):  # fmt: skip
        refused = await service.call("PUT", PATH, json=body, status=400)
        assert field in refused["error"]["message"]


async def test_it_is_an_admins_to_set_and_another_tenants_only_for_who_runs_the_installation(service: Service) -> None:
    await service.call("GET", PATH, key=service.user, status=403)
    made = await service.call("POST", "/api/v1/keys", json={"name": "x", "role": "admin", "tenant": "acme"}, status=201)
    await service.call("PUT", PATH, json={"log_s": 5}, key=made["key"])
    await service.call("GET", f"{PATH}?tenant=default", key=made["key"], status=403)
    assert (await service.call("GET", f"{PATH}?tenant=acme"))["log_s"] == 5.0
    assert (await service.call("GET", PATH))["own"]["log_s"] is None
