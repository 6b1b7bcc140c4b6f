"""Numbers for Prometheus: counted as plain integers on the hot path, named and rendered only when somebody asks.

Counters and histograms are of this process; gauges are read from the live objects at the moment of asking. The names of
request metrics follow vLLM's where it has one. Limits: labels are function and outcome, never tenant, key or request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from control_plane.histogram import Histogram
from control_plane.live_request import LiveRequest
from control_plane.picker_meter import picker_families
from control_plane.records import RequestState
from control_plane.scaling_meter import scaling_families
from control_plane.start_meter import StartMeter
from control_plane.store_meter import StoreMeter

if TYPE_CHECKING:
    from control_plane.context import AppContext


class Metrics:
    def __init__(self) -> None:
        self.ended: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.prompt_tokens: defaultdict[str, int] = defaultdict(int)
        self.cached_tokens: defaultdict[str, int] = defaultdict(int)
        self.generation_tokens: defaultdict[str, int] = defaultdict(int)
        self.lost_attempts: defaultdict[str, int] = defaultdict(int)
        self.duration_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.store_meter = StoreMeter()
        self.start_meter = StartMeter()
        self.queue_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.first_token_s: defaultdict[str, Histogram] = defaultdict(Histogram)

    def request_ended(self, live: LiveRequest, state: RequestState, total_s: float) -> None:
        function, stages = live.origin.function, live.stages
        self.ended[function, state.value] += 1
        self.prompt_tokens[function] += len(live.origin.prompt)
        self.cached_tokens[function] += live.cached_tokens
        self.generation_tokens[function] += live.log.last_seq
        self.lost_attempts[function] += max(live.epoch - 1, 0)
        self.duration_s[function].observe(total_s)
        waited_us = stages.queue_us + stages.cold_start_us
        self.queue_s[function].observe(waited_us / 1e6)
        if live.log.last_seq:
            self.first_token_s[function].observe((waited_us + stages.prefill_us) / 1e6)

    def render(self, context: AppContext) -> bytes:
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self, context))
        return generate_latest(registry)


class _Collector:
    def __init__(self, metrics: Metrics, context: AppContext) -> None:
        self._metrics = metrics
        self._context = context

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics, context = self._metrics, self._context
        ended = CounterMetricFamily(
            "stoker_requests", "Requests that ended, by outcome", labels=["function", "outcome"]
        )
        for (function, state), count in metrics.ended.items():
            ended.add_metric([function, state], count)
        yield ended
        for name, text, values in (
            ("stoker_prompt_tokens", "Prompt tokens of ended requests", metrics.prompt_tokens),
            ("stoker_prompt_tokens_cached", "Prompt tokens whose KV was not computed", metrics.cached_tokens),
            ("stoker_generation_tokens", "Tokens generated for ended requests", metrics.generation_tokens),
            ("stoker_lost_attempts", "Attempts that ended without an outcome", metrics.lost_attempts),
        ):
            family = CounterMetricFamily(name, text, labels=["function"])
            for function, count in values.items():
                family.add_metric([function], count)
            yield family
        for name, text, histograms in (
            ("stoker_request_duration_seconds", "From acceptance to the end", metrics.duration_s),
            ("stoker_request_wait_seconds", "Waiting for a replica", metrics.queue_s),
            ("stoker_time_to_first_token_seconds", "From acceptance to the first token", metrics.first_token_s),
        ):
            histogram = HistogramMetricFamily(name, text, labels=["function"])
            for function, observed in histograms.items():
                histogram.add_metric([function], observed.buckets(), observed.total)
            yield histogram
        refused = CounterMetricFamily(
            "stoker_refused_early", "Requests refused for the objective of their function", labels=["function"]
        )
        for function, count in context.objectives.refused.items():
            refused.add_metric([function], count)
        yield refused
        preempted = CounterMetricFamily(
            "stoker_preempted", "Replicas that ended to make room for others", labels=["function"]
        )
        for function, count in (context.loop.parking.preempted if context.loop.parking else {}).items():
            preempted.add_metric([function], count)
        yield preempted
        waiting = GaugeMetricFamily("stoker_requests_waiting", "Requests with no replica", labels=["function"])
        running = GaugeMetricFamily("stoker_requests_running", "Requests with a replica", labels=["function"])
        for function in {lane.function for lane in context.dispatcher.lanes}:
            lanes = [lane for lane in context.dispatcher.lanes if lane.function == function]
            waiting.add_metric([function], sum(len(lane.waiting) for lane in lanes))
            running.add_metric([function], sum(lane.in_flight for lane in lanes))
        yield waiting
        yield running
        replicas = GaugeMetricFamily("stoker_replicas", "Living replicas, by state", labels=["function", "state"])
        counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        for status in context.fleet.living():
            counts[status.function, status.state.value] += 1
        for (function, state), count in counts.items():
            replicas.add_metric([function, state], count)
        yield replicas
        workers = GaugeMetricFamily("stoker_warm_workers", "Forked workers that wait", labels=["slot"])
        for slot_id, slot in context.fleet.slots.items():
            workers.add_metric([slot_id], slot.warm_workers)
        yield workers
        yield from metrics.store_meter.families(context)
        yield from metrics.start_meter.families(context)
        yield from scaling_families(context)
        yield from picker_families(context)
        if context.cluster is not None:
            from control_plane.backends.kubernetes.meter import cluster_families

            yield from cluster_families(context.cluster)
        gateways = context.gateways
        yield GaugeMetricFamily("stoker_gateways", "Living gateways, this one too", value=len(gateways.peers) + 1)
        yield GaugeMetricFamily("stoker_gateway_leads", "1 where the control loop decides", value=int(gateways.leads))
        yield GaugeMetricFamily("stoker_gateway_holds", "1 while the lease is held", value=int(gateways.held))
        yield CounterMetricFamily(
            "stoker_adopted_requests", "Requests taken over from other gateways", value=context.adopting.adopted
        )
        yield from _kv_families(context)
        stats = context.db.stats
        yield CounterMetricFamily("stoker_journal_commits", "Commits of the database", value=stats.commits)
        yield CounterMetricFamily("stoker_journal_writes", "Writes in those commits", value=stats.writes)


def _kv_families(context: AppContext) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    asked, gone = context.kv_desk.counts, context.kv_collection.total
    for name, text, value in (
        ("asked", "Prompts for which a replica asked for stored KV", asked.asked),
        ("hits", "Of these, those that were told of some", asked.hits),
        ("late", "Of these, those that had no answer in time", asked.late),
        ("kept_chunks", "Chunks kept after their request was over", asked.chunks_kept),
        ("not_kept", "Requests whose KV was not worth keeping", asked.not_kept),
        ("quarantined", "Packs whose bytes were not what was recorded", asked.quarantined),
        ("orphans", "Packs in the store that nothing named", gone.orphans),
        ("lost_packs", "Packs of the index that were not in the store", gone.lost_packs),
        ("unreachable_chunks", "Chunks that went with their prefix", gone.unreachable_chunks),
        ("worthless_chunks", "Chunks that cost more than they saved", gone.worthless_chunks),
        ("over_quota_chunks", "Chunks that went because their tenant was over quota", gone.over_quota_chunks),
        ("deleted_packs", "Packs deleted from the store", gone.deleted_packs),
        ("deleted_bytes", "Bytes deleted from the store", gone.deleted_bytes),
        ("deletion_failures", "Deletions the store refused", gone.failures),
    ):
        yield CounterMetricFamily(f"stoker_kv_{name}", text, value=value)
