"""Merging the metrics of several replicas."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretell.cluster import gateway_metrics as exposition
from foretell.cluster.gateway_metrics import GatewayMetrics, MergedMetrics
from foretell.server.metrics import PrometheusMetrics


def replica(tokens: int, accepted: int, rejected: int, running: int = 0, use: float = 0.0) -> str:
    show = PrometheusMetrics("tiny")
    show.generation_tokens.set_total(tokens)
    show.accepted.set_total(accepted)
    show.rejected.set_total(rejected)
    show.acceptance_rate.set(accepted / (accepted + rejected))
    show.running.set(running)
    show.page_use.set(use)
    show.finished.inc("stop")
    show.latency.observe(0.15)
    show.latency.observe(tokens)
    return show.expose("foretell").decode()


def samples(text: bytes | str) -> dict[tuple[str, str], float]:
    """Return sample values by name and distinguishing label."""
    decoded = text.decode() if isinstance(text, bytes) else text
    return {
        (s.name.removeprefix("foretell:"), s.labels.get("replica") or s.labels.get("le") or ""): s.value
        for family in text_string_to_metric_families(decoded)
        for s in family.samples
    }


def test_counts_add_up_and_gauges_by_their_meaning() -> None:
    books = MergedMetrics()
    books.update({"a": replica(10, 1, 3, running=2, use=0.5), "b": replica(5, 6, 0, running=1, use=0.1)})
    found = samples(books.total(["a", "b"]).text())
    assert found["generation_tokens_total", ""] == 15
    assert found["num_requests_running", ""] == 3
    assert found["kv_cache_usage_perc", ""] == 0.3
    assert found["speculative_decoding_acceptance_rate", ""] == 0.7, "of all draft tokens, not the mean of 0.25 and 1"
    assert found["request_success_total", ""] == 2
    assert found["e2e_request_latency_seconds_bucket", "0.2"] == 2
    assert found["e2e_request_latency_seconds_count", ""] == 4
    assert found["e2e_request_latency_seconds_sum", ""] == 15.3


def test_the_merged_page_has_the_names_of_a_single_server() -> None:
    text = replica(3, 1, 1)
    books = MergedMetrics()
    books.update({"a": text})
    assert samples(books.total(["a"]).text()) == samples(text)
    assert set(books.total(["a"]).families.items()) == {
        (family.name, (family.type, family.documentation)) for family in text_string_to_metric_families(text)
    }


def test_what_a_lost_replica_counted_stays() -> None:
    books = MergedMetrics()
    books.update({"a": replica(10, 1, 1, running=4), "b": replica(5, 1, 1, running=1)})
    books.update({"b": replica(6, 1, 1, running=1)})
    found = samples(books.total(["b"]).text())
    assert found["generation_tokens_total", ""] == 16
    assert found["num_requests_running", ""] == 1, "who has gone runs nothing"
    books.update({"a": replica(11, 1, 1), "b": replica(6, 1, 1)})
    assert samples(books.total(["a", "b"]).text())["generation_tokens_total", ""] == 17, "it was only late"


def test_many_lost_replicas_are_kept_as_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MAX_GONE_REPLICAS", 4)
    books = MergedMetrics()
    for i in range(12):
        books.update({f"replica {i}": replica(1, 1, 1)})
    assert len(books._latest) == 5
    assert samples(books.total(["replica 11"]).text())["generation_tokens_total", ""] == 12


def test_per_replica_metrics_have_a_label() -> None:
    books = MergedMetrics()
    books.update({"a": replica(10, 1, 1), "b": replica(5, 1, 1)})
    found = samples(books.per_replica(["a", "b"]).text())
    assert (found["generation_tokens_total", "a"], found["generation_tokens_total", "b"]) == (10, 5)


def test_the_gateways_metrics() -> None:
    ledger = GatewayMetrics()
    ledger.moved.inc(2)
    page = ledger.response({"a": replica(4, 1, 1), "b": replica(5, 1, 1)}, per_replica=False)
    found = samples(bytes(page.body))
    assert (found["replicas", ""], found["requests_moved_total", ""], found["generation_tokens_total", ""]) == (2, 2, 9)
    assert "_created" not in bytes(page.body).decode()
    assert samples(bytes(ledger.response({}, per_replica=True).body))["replicas", ""] == 0
