"""What kube-scheduler and kube-controller-manager do, as clients of the API: left out where a real cluster has them.

Model: informers keep copies of what is watched; a `Controller` is told which of its objects may need a look, one at a
time, and makes the next step towards what the object asks for. Nothing here touches the server but by its API.

Limits: no preemption, no HPA, no CronJob; revisions of StatefulSets are a hash, not objects.
"""

from tests.kubernetes.controllers.manager import EVERY, Controllers

__all__ = ["EVERY", "Controllers"]
