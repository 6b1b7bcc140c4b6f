"""How many slots each class should have: `decide_slots`, the second level of scaling, in minutes where replicas take
seconds.

Out when replicas find no room (as many slots as they fill, packed largest first) or are expected to before a slot asked
for now would be there; in when a slot has been empty for as long as getting it again is worth, and what was in use
within that time fits the others. Limits: a slot that is in use is never emptied from here (`autoscaler.defragmenting`
moves idle replicas together); slots of a class are alike.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from autoscaler.readings import AHEAD_S, LATE_S

EMPTY_MIN_S: Final = 60.0
"""However cheap a slot is to get again, it is not given back while work moves from one replica to the next."""
FOLLOWED_S: Final = 600.0
"""How far beyond a slot's own provisioning expected load is looked at: a slot is not got for less."""
AGAIN_S: Final = 15.0


class SlotPhase(enum.StrEnum):
    PROVISIONING = "provisioning"
    READY = "ready"
    DRAINING = "draining"
    UNUSABLE = "unusable"
    """Quarantined, or out of sight: what it had is counted as unplaced by whoever observes, and it has no room."""


class SlotReason(enum.StrEnum):
    HOLD_NO_DATA = "hold_no_data"
    HOLD_BAD_DATA = "hold_bad_data"
    NO_ROOM = "no_room"
    """Replicas wait for devices."""
    EXPECTED = "expected"
    """Devices will be wanted by the time a slot asked for now is there."""
    BOUND = "bound"
    """More would be right, but there are `max_slots`; or fewer, but `min_slots` are kept."""
    ENOUGH = "enough"
    HOLD_PROVISIONING = "hold_provisioning"
    """Fewer would do, but one is still on its way, and what is on its way is never counted as useless."""
    HOLD_EMPTY = "hold_empty"
    """Empty, but not yet for as long as getting it again is worth."""
    HOLD_WINDOW = "hold_window"
    """Empty, but what was in use within that time would not fit the others."""
    SCALE_IN = "scale_in"


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of one device kind, image and trust domain."""

    name: str
    devices: int = 1
    """Of each slot."""
    min_slots: int = 0
    max_slots: int = 1
    provision_s: float = 120.0
    """Expected seconds from asking for a slot to its agent being there."""
    provision_high_s: float | None = None
    """The 0.9 quantile of the same."""
    waiting_weight: float = 30.0
    """Device-seconds that one second of a person's waiting is worth."""
    keep_empty_s: float | None = None
    """None: chosen from what a slot costs to get again."""


@dataclass(frozen=True, slots=True)
class SlotView:
    slot_id: str
    phase: SlotPhase
    since_s: float
    """When it entered its phase."""
    used_devices: float = 0.0
    """Held by replicas, draining ones included."""
    empty_since_s: float | None = None
    """Since when no replica is there; None: some are."""
    warm_bytes: int = 0
    """Weights in its pool: what is lost with it."""


@dataclass(frozen=True, slots=True)
class SlotDemand:
    """What is known of one class now."""

    slots: tuple[SlotView, ...]
    unplaced: tuple[int, ...] = ()
    """Devices of each replica that should be and finds no room."""
    waiting: int = 0
    """Requests that wait for those."""
    peaks: tuple[tuple[float, int], ...] = ()
    """(when so many devices were last in use, how many), falling (`autoscaler.peaks`)."""
    watched_s: float = math.inf
    """How long that has been watched."""
    expected: tuple[tuple[float, float], ...] = ()
    """(from when on, devices in use that are then expected), in order, up to the end of what is known."""
    complete: bool = True
    seen_s: float | None = None


@dataclass(frozen=True, slots=True)
class SlotDecision:
    desired: int
    """Slots that should be provisioning or ready."""
    reason: SlotReason
    detail: str
    ask_again_s: float | None
    victims: tuple[str, ...] = ()
    """Empty slots to give back. Void for any that has got a replica since."""
    inputs: dict[str, float | int | str | None] = field(default_factory=dict)


def decide_slots(
    classes: Sequence[SlotClass], demand: Mapping[str, SlotDemand], now_s: float
) -> dict[str, SlotDecision]:
    """By class name. A class of which nothing was observed holds."""
    return {kind.name: _decide(kind, demand.get(kind.name), now_s) for kind in classes}


def keep_empty_s(kind: SlotClass) -> float:
    """Seconds an empty slot is kept: the break-even of getting it again, with one person waiting for it.

    8 devices and 120 s at a weight of 30: 120 * (8 + 30) / 8 = 570 s.
    """
    if kind.keep_empty_s is not None:
        return kind.keep_empty_s
    devices = max(kind.devices, 1)
    return max(kind.provision_s * (devices + kind.waiting_weight) / devices, EMPTY_MIN_S)


def slots_for(unplaced: Sequence[int], free: Sequence[float], devices: int) -> int:
    """New slots that replicas of so many devices each need beyond the free devices of those on their way: first fit,
    the largest first (within 11/9 of the best packing: Johnson, 1973). What fits no slot at all asks for none."""
    room = sorted(free)
    fresh = 0
    for wanted in sorted(unplaced, reverse=True):
        if wanted > devices:
            continue
        for index, left in enumerate(room):
            if left >= wanted:
                room[index] = left - wanted
                break
        else:
            fresh += 1
            room.append(devices - wanted)
    return fresh


def _fault(demand: SlotDemand, now_s: float) -> str:
    age_s = 0.0 if demand.seen_s is None else now_s - demand.seen_s
    if not -AHEAD_S <= age_s <= LATE_S:
        return f"observed {age_s:.1f} s ago"
    if not demand.watched_s >= 0 or not demand.waiting >= 0:
        return "watched_s or waiting is negative or not a number"
    if any(not wanted > 0 for wanted in demand.unplaced):
        return "a replica without room wants no device"
    if any(not used >= 0 for _, used in demand.expected) or any(not used >= 0 for _, used in demand.peaks):
        return "devices in use are negative or not a number"
    return next((f"{slot.slot_id} uses {slot.used_devices}" for slot in demand.slots if not slot.used_devices >= 0), "")


def _decide(kind: SlotClass, demand: SlotDemand | None, now_s: float) -> SlotDecision:
    slots = demand.slots if demand is not None else ()
    provisioning = [slot for slot in slots if slot.phase is SlotPhase.PROVISIONING]
    ready = [slot for slot in slots if slot.phase is SlotPhase.READY]
    current = len(provisioning) + len(ready)
    inputs: dict[str, float | int | str | None] = {
        "ready": len(ready),
        "provisioning": len(provisioning),
        "min_slots": kind.min_slots,
        "max_slots": kind.max_slots,
        "devices": kind.devices,
        "provision_s": kind.provision_s,
    }

    def answer(
        desired: int, reason: SlotReason, detail: str, again_s: float | None = None, victims: tuple[str, ...] = ()
    ) -> SlotDecision:
        return SlotDecision(desired, reason, detail, again_s, victims, inputs)

    if demand is None:
        return answer(current, SlotReason.HOLD_NO_DATA, "nothing was observed")
    fault = _fault(demand, now_s)
    if fault:
        return answer(current, SlotReason.HOLD_BAD_DATA, fault)
    used = sum(slot.used_devices for slot in ready)
    inputs.update(used=round(used, 3), unplaced=sum(demand.unplaced), waiting=demand.waiting)
    # What has room now was offered to the unplaced already, and did not fit.
    by_room = current + slots_for(demand.unplaced, [float(kind.devices)] * len(provisioning), kind.devices)
    lead_s = kind.provision_s if kind.provision_high_s is None else max(kind.provision_high_s, kind.provision_s)
    ahead = _expected_by(demand.expected, now_s, now_s + lead_s + FOLLOWED_S)
    by_forecast = math.ceil(round(ahead, 6) / kind.devices)
    inputs["expected"] = round(ahead, 3)
    needed = max(by_room, by_forecast, kind.min_slots)
    desired = min(needed, max(kind.max_slots, kind.min_slots))
    if desired > current:
        # Somebody who waits does not wait to see what runs on a slot that nobody hears.
        if not demand.complete and current > 0 and not demand.waiting:
            return answer(current, SlotReason.HOLD_NO_DATA, "not everything is in sight yet")
        if by_room >= by_forecast and demand.unplaced:
            detail = f"{len(demand.unplaced)} replicas with {sum(demand.unplaced)} devices find no room"
            return answer(desired, SlotReason.NO_ROOM, detail, now_s + AGAIN_S)
        if by_forecast > current:
            detail = f"{ahead:.1f} devices expected within {lead_s + FOLLOWED_S:.0f} s need {by_forecast} slots"
            return answer(desired, SlotReason.EXPECTED, detail, now_s + AGAIN_S)
        return answer(desired, SlotReason.BOUND, f"min_slots is {kind.min_slots}")
    if not demand.complete:
        return answer(current, SlotReason.HOLD_NO_DATA, "not everything is in sight yet")
    if needed > current:
        return answer(current, SlotReason.BOUND, f"{needed} would be right, max_slots is {kind.max_slots}")
    return _scale_in(kind, demand, ready, provisioning, by_forecast, now_s, answer)


def _expected_by(expected: tuple[tuple[float, float], ...], now_s: float, until_s: float) -> float:
    """The most that is expected between now and then; each value holds until the next."""
    most = 0.0
    for index, (from_s, used) in enumerate(expected):
        ends_s = expected[index + 1][0] if index + 1 < len(expected) else math.inf
        if from_s <= until_s and ends_s > now_s:
            most = max(most, used)
    return most


def _scale_in(
    kind: SlotClass,
    demand: SlotDemand,
    ready: list[SlotView],
    provisioning: list[SlotView],
    by_forecast: int,
    now_s: float,
    answer: Callable[..., SlotDecision],
) -> SlotDecision:
    """Empty slots go, the longest empty first, as far as peaks, forecast and `min_slots` let them."""
    current = len(ready) + len(provisioning)
    empty = sorted(
        (slot for slot in ready if slot.empty_since_s is not None and slot.used_devices == 0),
        key=lambda slot: (slot.empty_since_s or 0.0, slot.warm_bytes, slot.slot_id),
    )
    if not empty:
        return answer(current, SlotReason.ENOUGH, f"{current} slots, none empty")
    if provisioning:
        return answer(current, SlotReason.HOLD_PROVISIONING, f"{len(provisioning)} on their way")
    kept_s = keep_empty_s(kind)
    if demand.watched_s < min(kept_s, EMPTY_MIN_S):
        again_s = now_s + kept_s - demand.watched_s
        return answer(current, SlotReason.HOLD_WINDOW, f"watched {demand.watched_s:.0f} s so far", again_s)
    due = [slot for slot in empty if now_s - (slot.empty_since_s or 0.0) >= kept_s]
    if not due:
        again_s = (empty[0].empty_since_s or 0.0) + kept_s
        return answer(current, SlotReason.HOLD_EMPTY, f"{len(empty)} empty, kept for {kept_s:.0f} s", again_s)
    peak = max((used for at_s, used in demand.peaks if now_s - at_s < kept_s), default=0)
    least = max(math.ceil(peak / kind.devices), by_forecast, kind.min_slots, len(ready) - len(empty))
    spare = min(current - least, len(due))
    if spare <= 0:
        if current <= kind.min_slots:
            return answer(current, SlotReason.BOUND, f"min_slots is {kind.min_slots}")
        detail = f"{peak} devices in use within {kept_s:.0f} s and {by_forecast} slots expected need {least}"
        return answer(current, SlotReason.HOLD_WINDOW, detail, now_s + AGAIN_S)
    victims = tuple(slot.slot_id for slot in due[:spare])
    return answer(current - spare, SlotReason.SCALE_IN, f"{spare} empty for {kept_s:.0f} s", now_s + AGAIN_S, victims)
