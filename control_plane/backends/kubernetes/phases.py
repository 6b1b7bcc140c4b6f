"""How far a slot's pod is, and what to tell whoever waits for it: read from its conditions, containers and events.

    requested -> pending -> unschedulable <-> pulling -> starting -> ready -> leaving -> gone
                                                         then, of a replica there: specialising -> loading

Each phase before `ready` has a budget of its own and words of its own, since a node that has to be bought and an image
that has to be pulled are not the same wait. Limits: that an image is being pulled is known from events only; without
them a pull counts as starting, with the longer budget of the two.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from control_plane.backends.kubernetes.api import Object
from control_plane.settings import KubernetesSettings

AGENT: Final = "agent"
"""The container."""


class Phase(enum.StrEnum):
    REQUESTED = "requested"
    """Asked for; the API server has not answered yet, or refuses."""
    PENDING = "pending"
    """There; the scheduler has not looked at it."""
    UNSCHEDULABLE = "unschedulable"
    """No node has room: the cluster's autoscaler may bring one."""
    PULLING = "pulling"
    STARTING = "starting"
    """On its node, with its image: volumes, container, agent."""
    READY = "ready"
    """Its agent answers."""
    SPECIALISING = "specialising"
    """A replica waits there for a worker."""
    LOADING = "loading"
    """A worker loads the replica's checkpoint."""
    LEAVING = "leaving"
    """Takes no new work: deleted, evicted, or its node is going."""
    GONE = "gone"


TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.REQUESTED: frozenset({Phase.PENDING, Phase.GONE}),
    Phase.PENDING: frozenset({Phase.UNSCHEDULABLE, Phase.PULLING, Phase.STARTING, Phase.LEAVING, Phase.GONE}),
    Phase.UNSCHEDULABLE: frozenset({Phase.PULLING, Phase.STARTING, Phase.LEAVING, Phase.GONE}),
    Phase.PULLING: frozenset({Phase.STARTING, Phase.LEAVING, Phase.GONE}),
    Phase.STARTING: frozenset({Phase.PULLING, Phase.READY, Phase.LEAVING, Phase.GONE}),
    Phase.READY: frozenset({Phase.STARTING, Phase.SPECIALISING, Phase.LEAVING, Phase.GONE}),
    Phase.SPECIALISING: frozenset({Phase.LOADING, Phase.READY, Phase.STARTING, Phase.LEAVING, Phase.GONE}),
    Phase.LOADING: frozenset({Phase.READY, Phase.STARTING, Phase.LEAVING, Phase.GONE}),
    Phase.LEAVING: frozenset({Phase.GONE}),
    Phase.GONE: frozenset(),
}
"""`STARTING -> PULLING`: the news of a pull came late. `READY -> STARTING`: the agent died and is started anew, where
its pool still is. Watches may miss steps between: `can_follow`."""

SILENT_S: Final = 8.0
"""Longer than an agent takes to be there again in its pod; what ran there is moved after twenty seconds of silence."""
COMING: Final = (Phase.REQUESTED, Phase.PENDING, Phase.UNSCHEDULABLE, Phase.PULLING, Phase.STARTING)
WORDS: Final = {
    Phase.REQUESTED: "the cluster has been asked for a slot",
    Phase.PENDING: "a slot waits for the scheduler",
    Phase.UNSCHEDULABLE: "no node has room for a slot; the cluster may be bringing one",
    Phase.PULLING: "a slot's node is pulling its image",
    Phase.STARTING: "a slot is starting",
    Phase.READY: "a slot is ready",
    Phase.SPECIALISING: "a slot is there, its replica is being specialised",
    Phase.LOADING: "a slot is there, its replica is loading the model",
    Phase.LEAVING: "a slot is going",
    Phase.GONE: "a slot is gone",
}


def can_follow(before: Phase, after: Phase) -> bool:
    """In one step, or in several that nobody saw."""
    seen: set[Phase] = set()
    reached = {before}
    while reached:
        seen |= reached
        reached = {after for each in reached for after in TRANSITIONS[each]} - seen
    return after in seen and before is not Phase.GONE


@dataclass(frozen=True, slots=True)
class Seen:
    phase: Phase
    reason: str = ""
    """As Kubernetes calls it."""
    message: str = ""
    trouble: bool = False
    """A fault that may pass, but should not last."""
    ended: bool = False
    """It comes back by no effort of Kubernetes' own."""

    @property
    def words(self) -> str:
        said = ": ".join(part for part in (self.reason, self.message) if part)
        return f"{WORDS[self.phase]} ({said})" if said else WORDS[self.phase]


def phase_of(pod: Object, events: Iterable[Object] = (), *, answers: bool = False, silent: str = "") -> Seen:
    """`events`: of this pod, oldest first; `answers`: its agent does, which is truer than any condition; `silent`: why
    it does not, where that is known."""
    metadata, spec, status = (pod.get(part) or {} for part in ("metadata", "spec", "status"))
    if status.get("phase") in ("Failed", "Succeeded"):
        return _ended(status)
    if metadata.get("deletionTimestamp"):
        disrupted = _condition(status, "DisruptionTarget")
        if disrupted is not None:
            return Seen(Phase.LEAVING, str(disrupted.get("reason") or ""), str(disrupted.get("message") or ""))
        return Seen(Phase.LEAVING, "Deleted", f"its pod was deleted at {metadata['deletionTimestamp']}")
    if answers:
        return Seen(Phase.READY)
    if not spec.get("nodeName"):
        scheduled = _condition(status, "PodScheduled")
        if scheduled is not None and scheduled.get("status") == "False":
            reason, message = str(scheduled.get("reason") or ""), str(scheduled.get("message") or "")
            return Seen(Phase.UNSCHEDULABLE, reason, message or _last(events, "FailedScheduling"))
        return Seen(Phase.PENDING)
    seen = _on_its_node(status, list(events))
    return seen if seen.message or seen.phase is not Phase.STARTING else dataclasses.replace(seen, message=silent)


def _on_its_node(status: Object, events: list[Object]) -> Seen:
    container: Object = next((each for each in status.get("containerStatuses") or () if each.get("name") == AGENT), {})
    state = container.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"):
        return Seen(Phase.PULLING, reason, _with_cause(message, events), trouble=True)
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return Seen(Phase.STARTING, reason, message or _last(events, "Failed"), trouble=True)
    if reason == "CrashLoopBackOff":
        return Seen(Phase.STARTING, reason, _last_end(container) or message, trouble=True)
    if ended:
        return Seen(Phase.STARTING, str(ended.get("reason") or "Error"), _end_words(ended), trouble=True)
    if "running" in state:
        before = _last_end(container)
        # NOTE: still trouble while it starts anew, or a crash that repeats would have its time again each time.
        return Seen(Phase.STARTING, "Restarted" if before else "", before, trouble=bool(before))
    for event in reversed(events):
        if event.get("reason") == "Pulling":
            return Seen(Phase.PULLING, "Pulling", str(event.get("message") or ""))
        if event.get("reason") == "Pulled":
            break
        if event.get("reason") in ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"):
            return Seen(Phase.STARTING, str(event["reason"]), str(event.get("message") or ""), trouble=True)
    return Seen(Phase.STARTING, reason, message)


def _ended(status: Object) -> Seen:
    disrupted = _condition(status, "DisruptionTarget")
    if disrupted is not None:
        return Seen(Phase.GONE, str(disrupted.get("reason") or ""), str(disrupted.get("message") or ""), ended=True)
    if status.get("reason"):  # Evicted, NodeLost, Preempting, UnexpectedAdmissionError, NodeAffinity, ...
        return Seen(Phase.GONE, str(status["reason"]), str(status.get("message") or ""), ended=True)
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            return Seen(Phase.GONE, str(ended.get("reason") or ""), _end_words(ended), ended=True)
    return Seen(Phase.GONE, str(status.get("phase") or ""), ended=True)


def _last_end(container: Object) -> str:
    ended = (container.get("lastState") or {}).get("terminated") or {}
    return f"{ended.get('reason') or 'Error'}, {_end_words(ended)}" if ended else ""


def _end_words(ended: Object) -> str:
    said = str(ended.get("message") or "").strip()[-300:]
    code = ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return "it needed more memory than resources.limits.memory allows" + (f": {said}" if said else "")
    return f"its agent ended with {code}" + (f": {said}" if said else "")


def _condition(status: Object, kind: str) -> Object | None:
    return next((each for each in status.get("conditions") or () if each.get("type") == kind), None)


def _with_cause(message: str, events: Iterable[Object]) -> str:
    """That a pull is backed off does not say why; the event of the pull that failed does, where `Error: ErrImagePull`
    beside it does not."""
    told = [str(event.get("message") or "") for event in events if event.get("reason") == "Failed"]
    cause = next((each for each in reversed(told) if ": " in each.removeprefix("Error: ")), "")
    return message if cause in message else "; ".join(part for part in (message, cause) if part)


def _last(events: Iterable[Object], reason: str) -> str:
    found = [str(event.get("message") or "") for event in events if event.get("reason") == reason]
    return found[-1] if found else ""


# --- how long each may take ---------------------------------------------------------------------------------------


def budget_s(seen: Seen, settings: KubernetesSettings) -> float:
    """How long a slot may be in this phase before it is given up."""
    match seen.phase:
        case Phase.UNSCHEDULABLE | Phase.PENDING | Phase.REQUESTED:
            return settings.unschedulable_s
        case Phase.PULLING:
            return settings.trouble_s if seen.trouble else settings.pulling_s
        case Phase.STARTING if seen.trouble:
            return settings.trouble_s
        case Phase.STARTING if seen.reason in ("ContainerCreating", "PodInitializing"):
            return max(settings.pulling_s, settings.starting_s)  # a pull that nobody told of looks like this
        case Phase.STARTING:
            return settings.starting_s
        case _:
            return float("inf")


@dataclass(slots=True)
class Progress:
    """One pod's, from when it was first seen."""

    seen: Seen
    since_s: float
    """When it entered its phase."""
    asked_s: float
    """When it was asked for."""
    was_ready: bool = False

    def note(self, seen: Seen, now_s: float) -> bool:
        """Whether this is another phase."""
        if seen.phase is self.seen.phase and seen.trouble == self.seen.trouble:
            self.seen = seen
            return False
        moved = can_follow(self.seen.phase, seen.phase) or seen.phase is self.seen.phase
        if not moved:
            return False  # news that is older than what is known: an event that was late
        self.was_ready = self.was_ready or self.seen.phase is Phase.READY
        self.seen, self.since_s = seen, now_s
        return True

    def is_silent(self, now_s: float) -> bool:
        """Whether it was of use and has not come back for so long that nobody is to wait for it: its agent does not
        come up again, or its node cannot be reached."""
        return self.was_ready and self.seen.phase in COMING and now_s - self.since_s > SILENT_S

    def late_s(self, now_s: float, settings: KubernetesSettings) -> float:
        """Beyond its budget; negative while there is some left."""
        return now_s - self.since_s - budget_s(self.seen, settings)


def event_time(event: Object) -> str:
    """To sort events by; those of both APIs."""
    metadata = event.get("metadata") or {}
    return str(event.get("lastTimestamp") or event.get("eventTime") or metadata.get("creationTimestamp") or "")


def now_text(now_s: float) -> str:
    """As Kubernetes writes a time."""
    return datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
