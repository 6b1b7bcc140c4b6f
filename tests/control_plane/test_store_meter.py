"""What replicas asked of the object store is added up by function and never goes back."""

from __future__ import annotations

import msgspec

from control_plane.store_meter import StoreMeter
from function_runtime.protocol import EngineOptions, ReplicaSpec, ReplicaState, ReplicaStatus, StoreTotals


def status(replica_id: str, function: str, **totals: int) -> ReplicaStatus:
    spec = ReplicaSpec(replica_id, function, 1, "default", "", "", EngineOptions())
    return ReplicaStatus(replica_id, function, 1, ReplicaState.READY, spec, store=StoreTotals(**totals))


def see(meter: StoreMeter, *statuses: ReplicaStatus) -> dict[str, int]:
    meter.see({status.replica_id: status for status in statuses})
    return {name: count for name, count in meter.totals["f"].items() if count}


def test_totals_of_a_functions_replicas_are_added_up() -> None:
    meter = StoreMeter()
    one, two = status("r1", "f", writes=3, written_bytes=100), status("r2", "f", writes=1, reads=5)
    assert see(meter, one, two, status("r3", "g", writes=50)) == {"writes": 4, "written_bytes": 100, "reads": 5}
    assert see(meter, one, two) == {"writes": 4, "written_bytes": 100, "reads": 5}, "seen twice, counted once"
    grown = msgspec.structs.replace(one, store=StoreTotals(writes=10, written_bytes=900))
    assert see(meter, grown, two) == {"writes": 11, "written_bytes": 900, "reads": 5}


def test_what_a_replica_used_stays_counted_when_it_is_gone() -> None:
    meter = StoreMeter()
    see(meter, status("r1", "f", reads=7))
    assert see(meter) == {"reads": 7}
    assert see(meter, status("r2", "f", reads=2)) == {"reads": 9}
