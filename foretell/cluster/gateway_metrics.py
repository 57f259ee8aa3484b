"""The front's own counts, and the page that tells them together with the replicas'."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from foretell.server.errors import ApiError
from foretell.server.metric_definitions import CREATED, PREFIX
from foretell.server.routes.status import METRICS_TYPE

from .metrics_merge import MergedMetrics


class GatewayMetrics:
    """What was moved and cut, and what replicas counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.books = MergedMetrics()
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

    def refusal(self, failure: ApiError) -> Response:
        """Count a failure and return its response."""
        self.failures.labels(failure.code or "").inc()
        return failure.response()

    def page(self, told: Mapping[str, str], each: bool) -> Response:
        """Prometheus's text: of all as one server, or `each` replica's own."""
        self.books.hear(told)
        self.replicas.set(len(told))
        found = self.books.each(told) if each else self.books.merged(told)
        ours = CREATED.sub(b"", generate_latest(self.registry))
        return Response(found.text() + ours, media_type=METRICS_TYPE)
