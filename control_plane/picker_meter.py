"""What an endpoint picker reads of a gateway: how much waits, how much runs, and how full the KV memory behind it is.

The names are those that the Gateway API Inference Extension's picker looks for where a pod is not labelled otherwise
(its model server protocol, https://github.com/kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003):
vLLM's. A picker chooses between pods, so that each is one number over all functions of this gateway. Limits: replicas
that other gateways use, too, report their memory to each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from control_plane.context import AppContext


def picker_families(context: AppContext) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    lanes = list(context.dispatcher.lanes)
    waiting, running = sum(len(lane.waiting) for lane in lanes), sum(lane.in_flight for lane in lanes)
    yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests of this gateway with no replica", value=waiting)
    yield GaugeMetricFamily("vllm:num_requests_running", "Requests of this gateway with a replica", value=running)
    reports = [seat.link.progress for lane in lanes for seat in lane.seats.values() if seat.link.progress is not None]
    used, total = sum(said.kv_used_blocks for said in reports), sum(said.kv_total_blocks for said in reports)
    yield GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Share of the KV memory of its replicas in use, 0 to 1", value=used / max(total, 1)
    )
