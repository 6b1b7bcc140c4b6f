"""Places for slots: whose they are, and whether one is wanted there."""

from __future__ import annotations

from control_plane.database import Database
from control_plane.slot_table import SlotPlace, SlotTable


async def test_a_place_is_wanted_or_not_and_whoever_changes_it_second_is_told(database: Database) -> None:
    table = SlotTable(database, "gw-one")
    await table.put_places([SlotPlace("s-0", "", True, True), SlotPlace("s-1", "", False, False)])
    assert await table.want("s-1", True) is True
    assert await table.want("s-1", True) is False, "another was quicker: it is not asked for twice"
    assert await table.want("s-9", True) is False
    assert await table.places() == [SlotPlace("s-0", "gw-one", True, True), SlotPlace("s-1", "gw-one", False, True)]


async def test_a_new_life_of_a_gateway_owns_its_places_and_drops_those_it_has_no_more(database: Database) -> None:
    await SlotTable(database, "gw-one").put_places(
        [SlotPlace("s-0", "", True, True), SlotPlace("s-1", "", False, True), SlotPlace("s-2", "", False, True)]
    )
    again = SlotTable(database, "gw-one-again")
    await again.put_places([SlotPlace("s-0", "", True, True), SlotPlace("s-1", "", False, False)], ["s-2"])
    assert [(each.slot_id, each.owner, each.wanted) for each in await again.places()] == [
        ("s-0", "gw-one-again", True),
        ("s-1", "gw-one-again", False),
    ]
