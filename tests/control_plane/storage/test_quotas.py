"""Quotas of tenants on both databases: what one gateway sets another reads."""

from __future__ import annotations

from autoscaler.shares import NO_QUOTA, Quota
from control_plane.database import Database
from control_plane.quotas import Quotas


async def test_a_quota_that_one_gateway_sets_is_every_gateways(database: Database) -> None:
    here, there = Quotas(database), Quotas(database)
    changes: list[Quota] = []
    there.on_change = lambda: changes.append(there.of("acme"))
    await here.put("acme", Quota(4, 2.5))
    assert (here.of("acme"), there.of("acme")) == (Quota(4, 2.5), NO_QUOTA)
    await there.refresh()
    await there.refresh()
    assert (there.of("acme"), there.tenants) == (Quota(4, 2.5), frozenset({"acme"}))
    await here.put("acme", Quota(None, 0.5))
    await there.refresh()
    assert await here.drop("acme") and not await here.drop("acme")
    await there.refresh()
    assert changes == [Quota(4, 2.5), Quota(None, 0.5), NO_QUOTA]
