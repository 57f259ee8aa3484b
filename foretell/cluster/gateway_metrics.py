"""The front's own counts, and the page that tells them together with the replicas'."""

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

from foretell.cluster.replicas import OK, UNAVAILABLE, Answers
from foretell.server.errors import ApiError
from foretell.server.metrics import CREATED, PREFIX
from foretell.server.routes.status import METRICS_TYPE

MAX_GONE_REPLICAS = 64  # replicas that have gone and whose counts are kept apart; older ones are added up
SUMMED = ("num_requests_running", "num_requests_waiting")  # of the gauges; of others the mean is told
RATE, ACCEPTED, REJECTED = (
    f"speculative_decoding_{name}" for name in ("acceptance_rate", "accepted_tokens_total", "rejected_tokens_total")
)

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]  # a sample's name and labels


class Exposition:
    """What one replica told: families in order, and every sample."""

    def __init__(self, text: str = "") -> None:
        self.families: dict[str, tuple[str, str]] = {}  # name -> kind, words
        self.samples: dict[str, dict[Key, float]] = {}
        for family in text_string_to_metric_families(text):
            self.families[family.name] = (family.type, family.documentation)
            self.samples[family.name] = {(s.name, tuple(s.labels.items())): s.value for s in family.samples}

    def add(self, other: Exposition, gauges: bool) -> None:
        """Add up with another; `gauges`: those too, which mean something only while their replica lives."""
        for name, (kind, words) in other.families.items():
            self.families.setdefault(name, (kind, words))
            mine = self.samples.setdefault(name, {})
            if kind == "gauge" and not gauges:
                continue
            for key, value in other.samples[name].items():
                mine[key] = mine.get(key, 0.0) + value

    def text(self) -> bytes:
        """In Prometheus's own form."""
        registry = CollectorRegistry()
        registry.register(_Told(self))
        return generate_latest(registry)


class _Told(Collector):
    def __init__(self, told: Exposition) -> None:
        self.told = told

    def collect(self) -> Iterable[Metric]:
        for name, (kind, words) in self.told.families.items():
            if self.told.samples[name]:
                metric = Metric(name, words, kind)
                for (sample, labels), value in self.told.samples[name].items():
                    metric.add_sample(sample, dict(labels), value)
                yield metric


class MergedMetrics:
    """The counts of replicas that live and of those that have gone: what was counted once never goes down again."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, Exposition] = OrderedDict()  # of each replica, the one heard longest ago first
        self._older = Exposition()  # of those that are not kept apart any more

    def update(self, told: Mapping[str, str]) -> None:
        """What every living replica says now."""
        for replica, text in told.items():
            self._last[replica] = Exposition(text)
            self._last.move_to_end(replica)
        while len(self._last) > len(told) + MAX_GONE_REPLICAS:
            self._older.add(self._last.popitem(last=False)[1], gauges=False)

    def total(self, living: Iterable[str]) -> Exposition:
        """One server's worth: counts add up, gone replicas included; gauges are of the living."""
        here = set(living)
        found = Exposition()
        for replica in sorted(self._last, key=lambda name: name not in here):  # the living say what there is
            found.add(self._last[replica], gauges=replica in here)
        found.add(self._older, gauges=False)
        for name, (kind, _) in found.families.items():
            if kind == "gauge" and not name.endswith(SUMMED):
                found.samples[name] = {key: value / max(1, len(here)) for key, value in found.samples[name].items()}
        _settle_rate(found)
        return found

    def per_replica(self, living: Iterable[str]) -> Exposition:
        """Every living replica's own, told apart by a label."""
        found = Exposition()
        for replica in sorted(living):
            last = self._last[replica]
            marked = Exposition()
            marked.families = last.families
            marked.samples = {
                name: {(sample, (*labels, ("replica", replica))): value for (sample, labels), value in samples.items()}
                for name, samples in last.samples.items()
            }
            found.add(marked, gauges=True)
        return found


def _settle_rate(found: Exposition) -> None:
    """A mean of rates is not the rate: it comes from the counts."""
    values = {key[0]: value for samples in found.samples.values() for key, value in samples.items()}
    for name in [name for name in found.families if name.endswith(RATE)]:
        prefix = name.removesuffix(RATE)
        accepted, rejected = values.get(prefix + ACCEPTED, 0.0), values.get(prefix + REJECTED, 0.0)
        rate = accepted / (accepted + rejected) if accepted + rejected else 0.0
        found.samples[name] = dict.fromkeys(found.samples[name], rate)


UNHEALTHY = {"status": "unavailable"}


def merge_health(found: Answers) -> tuple[int, dict[str, Any]]:
    """Return status 200 as long as one replica has it: the others are being replaced."""
    each = {name: _health(status, body) for name, (status, body) in sorted(found.items())}
    if any(status == OK for status, _ in found.values()):
        return OK, {"status": "ok", "reason": None, "replicas": each}
    reasons = sorted({str(health["reason"]) for health in each.values()})
    reason = "; ".join(reasons) if reasons else "no replica runs"
    return UNAVAILABLE, UNHEALTHY | {"reason": reason, "replicas": each}


def _health(status: int, body: bytes) -> dict[str, Any]:
    """Return a replica's report of its health, whatever its answer looks like."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    report = found if isinstance(found, dict) else {}
    default = {"status": "ok", "reason": None} if status == OK else UNHEALTHY | {"reason": f"answered {status}"}
    return default | report


def merge_server_info(told: Mapping[str, bytes]) -> dict[str, Any]:
    """The first one's, with the states of all of them, each by its replica's name."""
    each = {name: json.loads(body) for name, body in sorted(told.items())}
    first = next(iter(each.values()))
    states = [{"replica": name, **state} for name, said in each.items() for state in said["internal_states"]]
    return {**first, "replicas": list(each), "internal_states": states}


class GatewayMetrics:
    """What was moved and cut, and what replicas counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.merged = MergedMetrics()
        self.replicas = Gauge(PREFIX + "replicas", "Replicas that answer", registry=self.registry)
        self.moved = Counter(
            PREFIX + "requests_moved", "Times a request was given to another replica before its first byte",
            registry=self.registry,
        )  # fmt: skip
        self.cut = Counter(PREFIX + "requests_cut", "Answers whose replica was lost midway", registry=self.registry)
        self.failures = Counter(
            PREFIX + "gateway_failures", "Requests that the gateway refused or that failed there", ["code"],
            registry=self.registry,
        )  # fmt: skip

    def error_response(self, failure: ApiError) -> Response:
        """Count a failure and return its response."""
        self.failures.labels(failure.code or "").inc()
        return failure.response()

    def response(self, told: Mapping[str, str], each: bool) -> Response:
        """Prometheus's text: of all as one server, or `each` replica's own."""
        self.merged.update(told)
        self.replicas.set(len(told))
        found = self.merged.per_replica(told) if each else self.merged.total(told)
        ours = CREATED.sub(b"", generate_latest(self.registry))
        return Response(found.text() + ours, media_type=METRICS_TYPE)
