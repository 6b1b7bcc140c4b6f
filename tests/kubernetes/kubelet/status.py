"""What a pod's status says of its containers.

Upstream: `pkg/kubelet/kubelet_pods.go` (getPhase), `pkg/kubelet/status/generate.go` (conditions).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.clock import stamp

Object = dict[str, Any]


@dataclass(slots=True)
class ContainerState:
    """One container, now and before."""

    name: str
    image: str
    init: bool = False
    sidecar: bool = False
    state: Object = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last: Object = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    started: bool = False
    uid: str = ""

    @property
    def ended(self) -> Object | None:
        found: Object | None = self.state.get("terminated")
        return found

    @property
    def running(self) -> bool:
        return "running" in self.state

    def wait(self, reason: str, message: str = "") -> None:
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        self.ready = self.started = False

    def run(self, uid: str) -> None:
        self.state = {"running": {"startedAt": stamp()}}
        self.uid = uid

    def end(self, code: int, reason: str = "", message: str = "") -> None:
        began = self.state.get("running", {}).get("startedAt") or stamp()
        ended: Object = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "startedAt": began,
            "finishedAt": stamp(),
            "containerID": f"processes://{self.uid}",
        }
        if code > 128:
            ended["signal"] = code - 128
        if message:
            ended["message"] = message
        self.state = {"terminated": ended}
        self.ready = self.init and code == 0
        self.started = False

    def written(self) -> Object:
        made: Object = {
            "name": self.name,
            "image": self.image,
            "imageID": f"tests://{self.image}" if self.uid else "",
            "state": self.state,
            "lastState": self.last,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
        }
        return {**made, "containerID": f"processes://{self.uid}"} if self.uid else made


def phase_of(states: list[ContainerState], policy: str) -> str:
    """Pending until every container has started once; ended when none will start again."""
    init = [each for each in states if each.init and not each.sidecar]
    main = [each for each in states if not each.init]
    broken = [each for each in init if each.ended and each.ended["exitCode"] != 0]
    if broken and policy == "Never":
        return "Failed"
    if any(each.ended is None or each.ended["exitCode"] != 0 for each in init):
        return "Pending"
    if any("waiting" in each.state and not each.last for each in main):
        return "Pending"
    if all(each.ended is not None for each in main) and policy != "Always":
        codes = [each.ended["exitCode"] for each in main if each.ended]
        if all(code == 0 for code in codes):
            return "Succeeded"
        if policy == "Never":
            return "Failed"
    return "Running"


def conditions_of(
    pod: Object, states: list[ContainerState], phase: str, old: list[Object], reason: str = ""
) -> list[Object]:
    """The conditions that a kubelet writes; those of others are merged around them by the server."""
    init = [each for each in states if each.init and not each.sidecar]
    counted = [each for each in states if not each.init or each.sidecar]
    initialized = all(each.ended is not None and each.ended["exitCode"] == 0 for each in init)
    waiting = [each.name for each in counted if not each.ready]
    known = {each["type"]: each for each in old}
    gates = [each["conditionType"] for each in pod["spec"].get("readinessGates") or []]
    gated = [each for each in gates if known.get(each, {}).get("status") != "True"]
    done = phase in ("Succeeded", "Failed")
    wanted: dict[str, tuple[bool, str, str]] = {
        "PodReadyToStartContainers": (not done and any(each.uid for each in states), "", ""),
        "Initialized": (initialized, "" if initialized else "ContainersNotInitialized", ""),
        "ContainersReady": (not waiting and not done, "", ""),
        "Ready": (not waiting and not done and not gated and not reason, "", ""),
        "PodScheduled": (True, "", ""),
    }
    words = f"containers with unready status: [{' '.join(waiting)}]" if waiting else ""
    for kind in ("ContainersReady", "Ready"):
        if not wanted[kind][0]:
            why = "PodCompleted" if phase == "Succeeded" else "PodFailed" if phase == "Failed" else "ContainersNotReady"
            wanted[kind] = (False, why, "" if done else words)
    if gated and not waiting and not done:
        text = "; ".join(f'corresponding condition of pod readiness gate "{each}" does not exist.' for each in gated)
        wanted["Ready"] = (False, "ReadinessGatesNotReady", text)
    if reason and not done:
        wanted["Ready"] = (False, reason, "")
    made = []
    for kind, (holds, why, message) in wanted.items():
        before = known.get(kind, {})
        since = before.get("lastTransitionTime") if before.get("status") == str(holds) else None
        each: Object = {"type": kind, "status": str(holds), "lastTransitionTime": since or stamp()}
        # Merged by the server into what is there: what no longer holds is taken away by name.
        made.append({**each, "reason": why or None, "message": message or None})
    return made
