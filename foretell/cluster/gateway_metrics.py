"""The gateway's own metrics, and the merged metrics, health and server info of all replicas."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from foretell.cluster.replicas import OK, UNAVAILABLE, Responses
from foretell.server.dialects import dialect_of
from foretell.server.errors import ApiError
from foretell.server.metrics import CREATED, PREFIX
from foretell.server.routes.status import METRICS_TYPE

MAX_GONE_REPLICAS = 64  # removed replicas whose counters are kept apart; older ones are summed up
SUMMED_GAUGES = ("num_requests_running", "num_requests_waiting")  # other gauges are averaged over the replicas
RATE, ACCEPTED, REJECTED = (
    f"speculative_decoding_{name}" for name in ("acceptance_rate", "accepted_tokens_total", "rejected_tokens_total")
)
UNHEALTHY = {"status": "unavailable"}

Labels = tuple[tuple[str, str], ...]
SampleKey = tuple[str, Labels]  # a sample's name and labels


class Exposition:
    """A parsed Prometheus exposition: metric families in order, with their samples."""

    def __init__(self, text: str = "") -> None:
        self.families: dict[str, tuple[str, str]] = {}  # name -> type, help text
        self.samples: dict[str, dict[SampleKey, float]] = {}
        for family in text_string_to_metric_families(text):
            self.families[family.name] = (family.type, family.documentation)
            self.samples[family.name] = {(s.name, tuple(s.labels.items())): s.value for s in family.samples}

    def add(self, other: Exposition, gauges: bool) -> None:
        """Add another exposition's samples; its `gauges` only if its replica is alive."""
        for name, (kind, help_text) in other.families.items():
            self.families.setdefault(name, (kind, help_text))
            samples = self.samples.setdefault(name, {})
            if kind == "gauge" and not gauges:
                continue
            for key, value in other.samples[name].items():
                samples[key] = samples.get(key, 0.0) + value

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(_ExpositionCollector(self))
        return generate_latest(registry)


class _ExpositionCollector(Collector):
    def __init__(self, exposition: Exposition) -> None:
        self.exposition = exposition

    def collect(self) -> Iterable[Metric]:
        for name, (kind, help_text) in self.exposition.families.items():
            if self.exposition.samples[name]:
                metric = Metric(name, help_text, kind)
                for (sample, labels), value in self.exposition.samples[name].items():
                    metric.add_sample(sample, dict(labels), value)
                yield metric


class MergedMetrics:
    """The metrics of all replicas, removed ones included, so that merged counters never decrease."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, Exposition] = OrderedDict()  # by replica, least recently updated first
        self._older = Exposition()  # sum of replicas that are no longer kept apart

    def update(self, texts: Mapping[str, str]) -> None:
        """Take the current metrics of every live replica."""
        for replica, text in texts.items():
            self._latest[replica] = Exposition(text)
            self._latest.move_to_end(replica)
        while len(self._latest) > len(texts) + MAX_GONE_REPLICAS:
            self._older.add(self._latest.popitem(last=False)[1], gauges=False)

    def total(self, live: Iterable[str]) -> Exposition:
        """Return metrics as of one server: counters summed over all replicas, gauges over the live ones."""
        live_replicas = set(live)
        merged = Exposition()
        for replica in sorted(self._latest, key=lambda name: name not in live_replicas):  # live ones name the families
            merged.add(self._latest[replica], gauges=replica in live_replicas)
        merged.add(self._older, gauges=False)
        for name, (kind, _) in merged.families.items():
            if kind == "gauge" and not name.endswith(SUMMED_GAUGES):
                count = max(1, len(live_replicas))
                merged.samples[name] = {key: value / count for key, value in merged.samples[name].items()}
        _recompute_acceptance_rate(merged)
        return merged

    def per_replica(self, live: Iterable[str]) -> Exposition:
        """Return the metrics of every live replica, distinguished by the label `replica`."""
        merged = Exposition()
        for replica in sorted(live):
            latest = self._latest[replica]
            labeled = Exposition()
            labeled.families = latest.families
            labeled.samples = {
                name: {(sample, (*labels, ("replica", replica))): value for (sample, labels), value in samples.items()}
                for name, samples in latest.samples.items()
            }
            merged.add(labeled, gauges=True)
        return merged


def _recompute_acceptance_rate(merged: Exposition) -> None:
    """Set acceptance rates from the summed counters: the mean of the replicas' rates would be wrong."""
    values = {key[0]: value for samples in merged.samples.values() for key, value in samples.items()}
    for name in [name for name in merged.families if name.endswith(RATE)]:
        prefix = name.removesuffix(RATE)
        accepted, rejected = values.get(prefix + ACCEPTED, 0.0), values.get(prefix + REJECTED, 0.0)
        rate = accepted / (accepted + rejected) if accepted + rejected else 0.0
        merged.samples[name] = dict.fromkeys(merged.samples[name], rate)


def merge_health(responses: Responses) -> tuple[int, dict[str, Any]]:
    """Return the status and body of /health: 200 as long as one replica is healthy, as Ray replaces the others."""
    replicas = {name: _replica_health(status, body) for name, (status, body) in sorted(responses.items())}
    if any(status == OK for status, _ in responses.values()):
        return OK, {"status": "ok", "reason": None, "replicas": replicas}
    reasons = sorted({str(health["reason"]) for health in replicas.values()})
    reason = "; ".join(reasons) if reasons else "no replica runs"
    return UNAVAILABLE, UNHEALTHY | {"reason": reason, "replicas": replicas}


def _replica_health(status: int, body: bytes) -> dict[str, Any]:
    """Return a replica's health report, or one made from its status if the body is not a JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    report = value if isinstance(value, dict) else {}
    default = {"status": "ok", "reason": None} if status == OK else UNHEALTHY | {"reason": f"answered {status}"}
    return default | report


def merge_server_info(bodies: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the first replica's server info with the internal states of all replicas."""
    infos = {name: json.loads(body) for name, body in sorted(bodies.items())}
    first = next(iter(infos.values()))
    states = [{"replica": name, **state} for name, info in infos.items() for state in info["internal_states"]]
    return {**first, "replicas": list(infos), "internal_states": states}


class GatewayMetrics:
    """The gateway's counters, exposed together with the replicas' metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.merged = MergedMetrics()
        self.replicas = Gauge(PREFIX + "replicas", "Number of live replicas", registry=self.registry)
        self.moved = Counter(
            PREFIX + "requests_moved", "Retries of a request on another replica before its first byte",
            registry=self.registry,
        )  # fmt: skip
        self.cut = Counter(
            PREFIX + "requests_cut", "Responses cut off because their replica was lost", registry=self.registry
        )
        self.failures = Counter(
            PREFIX + "gateway_failures", "Requests that the gateway rejected or that failed there", ["code"],
            registry=self.registry,
        )  # fmt: skip

    def error_response(self, error: ApiError, path: str) -> Response:
        """Count an error and return its response in the shape of the path's API."""
        self.failures.labels(error.code or "").inc()
        return dialect_of(path).response(error)

    def response(self, texts: Mapping[str, str], per_replica: bool) -> Response:
        """Return the metrics of the live replicas, merged or `per_replica`, and the gateway's own."""
        self.merged.update(texts)
        self.replicas.set(len(texts))
        replicas = self.merged.per_replica(texts) if per_replica else self.merged.total(texts)
        own = CREATED.sub(b"", generate_latest(self.registry))
        return Response(replicas.text() + own, media_type=METRICS_TYPE)
