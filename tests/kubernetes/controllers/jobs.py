"""Jobs: pods until enough of them succeeded, or too many failed.

Upstream: `pkg/controller/job/job_controller.go`, `pkg/controller/ttlafterfinished`.

Limits: no indexed completion, no pod failure or success policies, no back-off between failed pods.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.kubernetes.clock import seconds_since, stamp
from tests.kubernetes.controllers.base import (
    Controller,
    Key,
    Object,
    condition,
    controlled_by,
    deleting,
    ended,
    key_of,
    owned,
    owner_of,
    ready,
    with_condition,
)
from tests.kubernetes.controllers.deployments import pod_of


class Jobs(Controller):
    plurals = ("jobs", "pods")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "jobs":
            return [key_of(value)]
        owner = owner_of(value)
        return [(value["metadata"]["namespace"], owner["name"])] if owner and owner["kind"] == "Job" else []

    async def sync(self, key: Key) -> float | None:
        job = self.world.get("jobs", key)
        if job is None or deleting(job):
            return None
        spec = job["spec"]
        if condition(job, "Complete") or condition(job, "Failed"):
            return await self._expire(job)
        pods = owned(self.world.all("pods", key[0]), job["metadata"]["uid"])
        active = [each for each in pods if not ended(each) and not deleting(each)]
        done = sum((each.get("status") or {}).get("phase") == "Succeeded" for each in pods)
        failed = sum((each.get("status") or {}).get("phase") == "Failed" for each in pods)
        started = (job.get("status") or {}).get("startTime")
        status: Object = {"startTime": started or stamp()}
        reason = ""
        deadline = spec.get("activeDeadlineSeconds")
        if deadline is not None and started and seconds_since(started) >= deadline:
            reason = "DeadlineExceeded"
        elif failed > spec["backoffLimit"]:
            reason = "BackoffLimitExceeded"
        if reason:
            for each in active:
                await self.world.delete("pods", each)
            active = []
            words = {
                "DeadlineExceeded": "Job was active longer than specified deadline",
                "BackoffLimitExceeded": "Job has reached the specified backoff limit",
            }
            status["conditions"] = with_condition(job, "Failed", "True", reason, words[reason])
        elif done >= spec["completions"]:
            status |= {"completionTime": stamp()}
            told = ("CompletionsReached", "Reached expected number of succeeded pods")
            seen = {**job, "status": {"conditions": with_condition(job, "SuccessCriteriaMet", "True", *told)}}
            status["conditions"] = with_condition(seen, "Complete", "True", *told)
        elif not spec["suspend"]:
            for _ in range(min(spec["parallelism"], spec["completions"] - done) - len(active)):
                pod = pod_of(spec["template"], prefix=job["metadata"]["name"] + "-")
                pod["metadata"]["ownerReferences"] = controlled_by(job, "batch/v1", "Job")
                made = await self.world.create("pods", key[0], pod)
                if made is not None:
                    active.append(made)
        counts = {
            "active": len(active),
            "ready": sum(ready(each) for each in active),
            "succeeded": done,
            "failed": failed,
        }
        status |= {name: each for name, each in counts.items() if each or name == "ready"}
        await self.world.set_status("jobs", job, {**status, "uncountedTerminatedPods": {}})
        return None if deadline is None else 1.0

    async def _expire(self, job: Object) -> float | None:
        lasting_s = job["spec"].get("ttlSecondsAfterFinished")
        if lasting_s is None:
            return None
        ended_at = (condition(job, "Complete") or condition(job, "Failed"))["lastTransitionTime"]
        left_s = lasting_s - seconds_since(ended_at)
        if left_s > 0:
            return float(left_s) + 0.1
        await self.world.delete("jobs", job, propagationPolicy="Background")
        return None
