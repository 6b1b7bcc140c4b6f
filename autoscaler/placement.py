"""Where work goes: expected seconds to the first token for every home, the least of them, and the runner-up.

    expected = queue + max(weights from the best tier, worker) + start + min(prefill, load of stored KV) + contention

`place` chooses a slot and its devices for a new replica, `place_request` a ready replica for a request. Contention is
what those who share a device wait for one another: by processor sharing a token takes 1 / (1 - busy share) as long
(Kleinrock, Queueing Systems II, 4.4), and where the loads predicted for the same moment exceed the device, the backlog.
Where nothing has room, `place` names who would have to go (`victims`), least loss first.
Limits: of a cluster's slots all that hold the checkpoint are looked at, up to `LOOK_AT`, and the `LOOK_AT` soonest of
the others: exact up to that many slots, close beyond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from autoscaler.homes import DISK, LOADING, MAKE, PEER, POOL, STORE, Device, Homes, Resident, SlotHome, SlotRow, is_full
from autoscaler.room import MayEnd, choose_victims, loss_s, may_end_by_default
from autoscaler.work import Work

LOOK_AT = 16
MORE_DEVICES = 1
"""Of a slot's devices with room, the quietest are looked at: as many as are needed, and this many more."""
BUSIEST = 0.95
"""Busy share at which a device counts as saturated."""
ENDING_S = 0.5
"""From asking an idle replica to end to its memory's being back."""
PARKING_S = 3.0
"""The same for one that runs requests, which it parks before."""
ALIKE = 0.01
"""Expected seconds that differ by a smaller share are the same: they were not measured better."""
BYTES_PER_S = {DISK: 1.5e9, PEER: 1.0e9, STORE: 0.3e9}
"""Until it was measured."""

__all__ = [
    "Device", "Homes", "MayEnd", "Placement", "ReplicaHome", "Resident", "SlotHome", "Work", "choose_victims",
    "contention_s", "loss_s", "may_end_by_default", "place", "place_request", "weights_from",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    choice: str
    """Replica or slot id."""
    expected_s: float
    reason: str
    runner_up: str | None = None
    runner_up_s: float | None = None
    inputs: dict[str, dict[str, float | int | str]] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    """Which of the slot's devices."""
    tier: str = ""
    """Where the weights come from."""
    victims: tuple[str, ...] = ()
    """Replicas that have to end before."""


@dataclass(frozen=True, slots=True)
class ReplicaHome:
    """A ready replica as a home for a request."""

    replica_id: str
    in_flight: int
    max_requests: int
    step_s: float = 0.05
    """Measured seconds of an engine step."""
    prefill_tokens_per_s: float = 500.0
    cached_tokens: int = 0
    """Tokens of this prompt whose KV the replica is believed to hold."""
    prefill_tokens: int = 0
    """Of prompts that are to be computed there before."""
    load: float = 0.0
    """Share of its device that other replicas take."""


@dataclass(slots=True)
class _Found:
    expected_s: float
    left_bytes: int
    home: SlotHome
    devices: tuple[int, ...]
    tier: str
    queue_s: float
    weights_s: float
    worker_s: float
    contention_s: float
    victims: tuple[Resident, ...] = ()

    @property
    def rank(self) -> tuple[float, int, str]:
        """Among equals the tightest fit: large holes are left for large models."""
        return (round(self.expected_s, 4), self.left_bytes, self.home.slot_id)


def place(
    work: Work, slots: Homes | Iterable[SlotHome], now_s: float, may_end: MayEnd | None = None
) -> Placement | None:
    """The slot and devices where the first token comes soonest; None: there is room nowhere, and none can be made.

    `may_end(resident, work)` says who may have to go where there is no room; by default lower priorities, and idle
    replicas whose end costs less than waiting for room. `now_s` is the caller's clock; forecasts in `work` and `slots`
    begin there.
    """
    homes = slots if isinstance(slots, Homes) else Homes(slots)
    peers = homes.peers(work.identity) if work.identity else []
    found = _free(work, homes, peers)
    if not found:
        found = _cleared(work, homes, peers, may_end)
    if not found:
        return None
    found.sort(key=lambda each: each.rank)
    best, second = found[0], found[1] if len(found) > 1 else None
    return Placement(
        choice=best.home.slot_id,
        expected_s=best.expected_s,
        reason=_reason(best),
        runner_up=second.home.slot_id if second else None,
        runner_up_s=second.expected_s if second else None,
        inputs={each.home.slot_id: _inputs(each) for each in found[:4]},
        devices=best.devices,
        tier=best.tier,
        victims=tuple(each.replica_id for each in best.victims),
    )


def _free(work: Work, homes: Homes, peers: list[SlotHome]) -> list[_Found]:
    """Homes with room as they are."""
    found: list[_Found] = []
    seen: set[str] = set()
    for row in islice(homes.holders(work.identity), LOOK_AT):
        seen.add(row.home.slot_id)
        if row.home.kind == work.kind and row.most_bytes >= work.device_bytes:
            scored = _score(work, row, peers)
            if scored is not None:
                found.append(scored)
    looked = 0
    for row in homes.with_room(work.device_bytes, work.kind):
        if row.home.slot_id in seen:
            continue
        scored = _score(work, row, peers)
        if scored is None:
            continue
        found.append(scored)
        looked += 1
        if looked >= LOOK_AT:
            break
    return found


def _score(work: Work, row: SlotRow, peers: list[SlotHome]) -> _Found | None:
    home = row.home
    fitting: list[tuple[float, int, int, float, float]] = []
    for place_ in row.devices:
        wait_s = 0.0
        if place_.room_bytes < work.device_bytes:
            if place_.room_bytes + place_.coming_bytes < work.device_bytes:
                continue
            wait_s = place_.device.freed_in_s
        device = place_.device
        contention = contention_s(work, device)
        cost_s = wait_s + contention + (0.0 if device.residents else work.fresh_s)
        fitting.append((cost_s, device.free_bytes - work.device_bytes, place_.index, wait_s, contention))
        if len(fitting) >= work.devices + MORE_DEVICES:
            break
    if len(fitting) < work.devices:
        return None
    fitting.sort()
    # A replica over several devices goes at the pace of the slowest.
    cost_s, left_bytes, _, wait_s, contention = fitting[work.devices - 1]
    tier, weights_s = weights_from(work, home, peers)
    worker_s = 0.0 if home.warm_workers > home.starting else work.fork_s
    start_s = work.start_s * (1.0 + max(home.starting, home.devices[fitting[0][2]].load_now))
    expected_s = home.ready_in_s + cost_s + max(weights_s, worker_s) + start_s + work.first_s
    chosen = tuple(sorted(each[2] for each in fitting[: work.devices]))
    queue_s = home.ready_in_s + wait_s
    return _Found(expected_s, left_bytes, home, chosen, tier, queue_s, weights_s, worker_s + start_s, contention)


def weights_from(work: Work, home: SlotHome, peers: Sequence[SlotHome] = ()) -> tuple[str, float]:
    """The tier from which the weights are there soonest, and after how many seconds. A link is shared by the loads that
    are under way on it; a peer is read by others as well."""
    identity, loads = work.identity, home.loads
    if not identity or identity in home.pool:
        return POOL, 0.0
    tier, least_s = MAKE, work.make_s * (1 + loads.get(MAKE, 0)) if loads else work.make_s
    if home.loading and home.loading.get(identity, least_s) < least_s:
        tier, least_s = LOADING, home.loading[identity]
    if not work.weights_bytes:
        return tier, least_s  # how long a copy takes is not known
    measured = home.bytes_per_s
    if identity in home.disk:
        seconds = work.weights_bytes * (1 + loads.get(DISK, 0)) / (measured.get(DISK) or BYTES_PER_S[DISK])
        if seconds < least_s:
            tier, least_s = DISK, seconds
    if peers:
        # A slot that has it itself was answered above: these are others.
        sharing = 1 + max(loads.get(PEER, 0), min([peer.serving for peer in peers]))
        seconds = work.weights_bytes * sharing / (measured.get(PEER) or BYTES_PER_S[PEER])
        if seconds < least_s:
            tier, least_s = PEER, seconds
    if work.in_store:
        seconds = work.weights_bytes * (1 + loads.get(STORE, 0)) / (measured.get(STORE) or BYTES_PER_S[STORE])
        if seconds < least_s:
            tier, least_s = STORE, seconds
    return tier, least_s


def contention_s(work: Work, device: Device) -> float:
    """Seconds that this work and those on the device cost one another's first tokens.

    Each is slowed by how busy the other is when it is busy itself: functions that peak together are dear to each other,
    those that take turns are not. Worked example (`test_functions_that_peak_together_are_kept_apart`): loads of 0.8 at
    the same hours need 1.6 of a device, so a backlog grows; at different hours nobody waits.
    """
    if not device.residents and not device.load:
        return 0.0
    mine, theirs = work.load, device.load
    if not mine or not theirs:
        busy = min(device.load_now if not theirs else sum(theirs) / len(theirs), BUSIEST)
        return (work.first_s + work.start_s) * busy / (1.0 - busy)
    together = own = others = backlog_s = late_s = 0.0
    for a, b in zip(mine, theirs, strict=False):
        together += a * b
        own += a
        others += b
        backlog_s = max(backlog_s + (a + b - 1.0) * work.step_s, 0.0)
        late_s += backlog_s
    steps = min(len(mine), len(theirs))
    slowed = min(together / own, BUSIEST) if own else 0.0
    slowing = min(together / others, BUSIEST) if others else 0.0
    return work.first_s * slowed / (1 - slowed) + device.first_token_s * slowing / (1 - slowing) + late_s / steps


def _cleared(work: Work, homes: Homes, peers: list[SlotHome], may_end: MayEnd | None) -> list[_Found]:
    """Homes with room once somebody has gone."""
    found: list[_Found] = []
    allowed, looked = may_end or may_end_by_default, 0
    for row in homes.with_endable(work.kind, None if may_end is not None else work.priority):
        if len(row.devices) < work.devices:
            continue
        looked += 1
        if looked > LOOK_AT:
            break
        cleared = _clear(work, row.home, peers, allowed)
        if cleared is not None:
            found.append(cleared)
    return found


def _clear(work: Work, home: SlotHome, peers: list[SlotHome], may_end: MayEnd) -> _Found | None:
    options: list[tuple[float, int, tuple[Resident, ...]]] = []
    for index, device in enumerate(home.devices):
        if device.quarantined:
            continue
        missing = max(work.device_bytes - device.free_bytes - device.freeing_bytes, int(is_full(home)))
        victims = choose_victims(device.residents, missing, work, may_end)
        if victims is not None:
            options.append((sum(each.loss_s for each in victims), index, victims))
    if len(options) < work.devices:
        return None
    options.sort(key=lambda option: option[:2])
    chosen = options[: work.devices]
    victims = tuple({each.replica_id: each for option in chosen for each in option[2]}.values())
    queue_s = max((ENDING_S if each.idle else PARKING_S for each in victims), default=0.0) + home.ready_in_s
    lost_s = sum(each.loss_s for each in victims)
    tier, weights_s = weights_from(work, home, peers)
    worker_s = 0.0 if home.warm_workers > home.starting else work.fork_s
    expected_s = queue_s + lost_s + max(weights_s, worker_s) + work.start_s + work.first_s
    devices = tuple(sorted(option[1] for option in chosen))
    started_s = worker_s + work.start_s
    return _Found(expected_s, 0, home, devices, tier, queue_s, weights_s, started_s, lost_s, victims)


def _reason(best: _Found) -> str:
    if best.victims:
        return "no room anywhere: least expected seconds with what has to end for it"
    return "least expected seconds to the first token"


def _inputs(found: _Found) -> dict[str, float | int | str]:
    inputs: dict[str, float | int | str] = {
        "queue_s": round(found.queue_s, 4),
        "weights_s": round(found.weights_s, 4),
        "worker_s": round(found.worker_s, 4),
        "contention_s": round(found.contention_s, 4),
        "tier": found.tier,
        "replicas": found.home.replicas,
        "warm_workers": found.home.warm_workers,
    }
    if found.victims:
        inputs["victims"] = ",".join(each.replica_id for each in found.victims)
    return inputs


# --- requests ---


def place_request(
    prompt_tokens: int,
    stored_kv_s: float | None,
    homes: Sequence[ReplicaHome],
    left_tokens: Callable[[str], float] | None = None,
) -> Placement | None:
    """The ready replica with room where the first token comes soonest; None: none has room.

    `stored_kv_s`: seconds to load this request's stored KV, or None if there is none. A prefix that one replica has
    cached draws a request there as long as computing it elsewhere takes longer than the queue there does.
    `left_tokens`: output tokens that a replica's requests are expected to make still. Where the first token comes as
    soon at several, the one with the least work left is taken: it is the first to have its steps to itself.
    """
    scored = sorted(
        (sum(_request_s(prompt_tokens, stored_kv_s, home)), home.replica_id)
        for home in homes
        if home.in_flight < home.max_requests
    )
    if not scored:
        return None
    reason = "least expected seconds to the first token"
    alike = bisect_right(scored, (scored[0][0] * (1.0 + ALIKE), "\U0010ffff"))
    if left_tokens is not None and alike > 1:
        least = min(scored[:alike], key=lambda score: (left_tokens(score[1]), score))
        if least is not scored[0]:
            scored.remove(least)
            scored.insert(0, least)
        reason = "of those with the soonest first token, the least work left"
    best, second = scored[0], scored[1] if len(scored) > 1 else None
    cached, affine = 0, ""
    for home in homes:
        if home.cached_tokens > cached and home.in_flight < home.max_requests:
            cached, affine = home.cached_tokens, home.replica_id
    if affine and affine != best[1]:
        reason = f"the queue of {affine} costs more than the {cached} tokens it holds would save"
    shown = {best[1], second[1] if second else ""}
    inputs: dict[str, dict[str, float | int | str]] = {}
    for home in homes:
        if home.replica_id in shown or home.replica_id == affine:
            queue_s, first_s = _request_s(prompt_tokens, stored_kv_s, home)
            inputs[home.replica_id] = {
                "in_flight": home.in_flight,
                "queue_s": round(queue_s, 4),
                "prefill_s": round(first_s, 4),
                "cached_tokens": home.cached_tokens,
            }
    return Placement(best[1], best[0], reason, second[1] if second else None, second[0] if second else None, inputs)


def _request_s(prompt_tokens: int, stored_kv_s: float | None, home: ReplicaHome) -> tuple[float, float]:
    """Seconds of queue, and of the request's own way to its first token."""
    stretch = 1.0 / (1.0 - min(max(home.load, 0.0), BUSIEST))
    queue_s = (home.in_flight * home.step_s + home.prefill_tokens / home.prefill_tokens_per_s) * stretch
    prefill_s = max(prompt_tokens - home.cached_tokens, 1) / home.prefill_tokens_per_s * stretch
    return queue_s, prefill_s if stored_kv_s is None else min(prefill_s, stored_kv_s)
