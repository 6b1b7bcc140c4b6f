"""An API server that keeps the wire contract of Kubernetes 1.37, in memory, for the tests.

Model: `Store` keeps objects and the log of their changes; `Registry` is what a write goes through (defaults,
validation, ownership of fields, admission); `ApiServer` speaks HTTP. Each imitated behaviour names its upstream
source.

Limits: one version per kind is stored and served as it came, without conversion webhooks; admission webhooks, API
aggregation, audit and priority-and-fairness are not there; nothing is persisted.
"""

from tests.kubernetes.apiserver.errors import ApiError
from tests.kubernetes.apiserver.faults import Faults
from tests.kubernetes.apiserver.server import ApiServer

__all__ = ["ApiError", "ApiServer", "Faults"]
