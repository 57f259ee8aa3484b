"""Prometheus metrics of the server, updated from every engine step. Metric names are vLLM's where vLLM has one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter

from foretell.control.decision_log import DecisionLog
from foretell.engine.streams import Load, StepReport, StepTiming
from foretell.server.choice_state import skip_reason
from foretell.server.memory_report import process_memory
from foretell.types import TARGET

if TYPE_CHECKING:
    from foretell.engine.streams import StreamItem

PREFIX = "foretell:"
CREATED = re.compile(rb"(?m)^.*_created[ {].*\n")  # creation times of counters, which are left out
OWN_PREFIX = re.compile(rb"(?m)^(# HELP |# TYPE |)foretell:")
# Histogram buckets, in seconds; the last in ratios.
TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
TPOT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
LATENCY_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
RATIO_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MAX_PENDING_REPORTS = 32  # steps that are counted together

# Target seconds of a plain decode step by batch size and total context tokens; None if not known.
PlainSeconds = Callable[[int, int], float | None]
DrafterHealth = Mapping[str, tuple[int, bool]]  # by drafter: failures, disabled


@dataclass
class Speedup:
    """Speedup over plain decoding: tokens times the plain step's time at their batch and context, over the time taken.

    A plain step's time is the target's plus the measured step's host time. Steps with prefill are left out, and so are
    steps whose plain time is not known.
    """

    plain_seconds: PlainSeconds
    plain_decode_seconds: float = 0.0  # time that plain decoding would have taken
    decode_seconds: float = 0.0  # time taken

    def observe(self, report: StepReport) -> None:
        """Add the time of a decode step, and the estimate of what plain decoding would have taken."""
        step = plain_step_seconds(self.plain_seconds, report.timing)
        if step is not None:
            tokens = sum(len(item.delta.tokens) for item in report.items)
            self.plain_decode_seconds += tokens / report.timing.num_sequences * step
            self.decode_seconds += report.timing.seconds

    @property
    def value(self) -> float | None:
        return self.plain_decode_seconds / self.decode_seconds if self.decode_seconds > 0 else None


def plain_step_seconds(plain_seconds: PlainSeconds, timing: StepTiming) -> float | None:
    """Return the step's estimated time without drafts; None if it is not known or the step had prefill."""
    target_seconds = plain_seconds(timing.num_sequences, timing.context_tokens) if timing.is_decode_only else None
    return None if target_seconds is None else target_seconds + timing.host_seconds


def no_estimate(batch: int, context: int) -> float | None:
    """Return None: the PlainSeconds of an engine that does not measure plain steps."""
    return None


class CounterMetric:
    """A Prometheus counter with the model name as its first label. It can be set to a total counted elsewhere."""

    def __init__(self, counter: PrometheusCounter, model: str, labels: tuple[str, ...]) -> None:
        self._counter, self._model = counter, model
        if not labels:
            counter.labels(model)  # exposed from the start
        self._totals: dict[tuple[str, ...], float] = {}

    def inc(self, *labels: str, amount: float = 1) -> None:
        self._totals[labels] = self._totals.get(labels, 0) + amount
        self._counter.labels(self._model, *labels).inc(amount)

    def set_total(self, total: float, *labels: str) -> None:
        """Increment the counter up to a total that never decreases."""
        self.inc(*labels, amount=total - self._totals.get(labels, 0))


class PrometheusMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._add_speculation_metrics()
        self._add_request_metrics()
        self._add_engine_metrics()

    def _add_speculation_metrics(self) -> None:
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts verified: steps of sequences with a draft")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the draft", "position"
        )
        self.skips = self._counter("spec_decode_skipped", "Steps of sequences without a draft, by reason", "reason")
        self.drafter_drafted = self._counter("drafter_draft_tokens", "Draft tokens verified, by drafter", "drafter")
        self.drafter_accepted = self._counter("drafter_accepted_tokens", "Draft tokens accepted, by drafter", "drafter")
        self.drafter_failures = self._counter("drafter_failures", "Failed calls of each drafter", "drafter")
        self._drafter_disabled = Gauge(
            PREFIX + "drafter_disabled",
            "1: the drafter is disabled for a while after consecutive failures",
            ["model_name", "drafter"],
            registry=self.registry,
        )
        self.decisions = self._counter(
            "drafter_decisions",
            "Steps of sequences, by the controller's decision for each drafter and its reason",
            "drafter",
            "decision",
            "reason",
        )
        self.drafting_on = self._gauge(
            "drafting_on", "1: speculative decoding is on; 0: off because it would be slower"
        )
        self.switches = self._counter("drafting_switches", "Times that speculative decoding was switched off or on")
        self.accepted = self._counter("speculative_decoding_accepted_tokens", "Draft tokens accepted")
        self.rejected = self._counter("speculative_decoding_rejected_tokens", "Draft tokens rejected")
        self.acceptance_rate = self._gauge(
            "speculative_decoding_acceptance_rate", "Accepted over verified draft tokens"
        )
        self.speedup = self._gauge("speedup", "Estimated speedup over plain decoding; 0: not known")

    def show_health(self, drafter: str, failures: int, disabled: bool) -> None:
        """Set the failures of a drafter since the start and whether it is disabled now."""
        self.drafter_failures.set_total(failures, drafter)
        self._drafter_disabled.labels(self._model, drafter).set(disabled)

    def _add_request_metrics(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens generated")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.finished = self._counter("request_success", "Finished sequences, by finish reason", "finished_reason")
        self.failures = self._counter("request_failures", "Rejected or failed requests, by error code", "code")
        self.first_token = self._histogram("time_to_first_token_seconds", "Time to first token (TTFT)", TTFT_BUCKETS)
        self.per_token = self._histogram("time_per_output_token_seconds", "Time per output token (TPOT)", TPOT_BUCKETS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Time in the waiting queue", TTFT_BUCKETS)
        self.latency = self._histogram("e2e_request_latency_seconds", "End-to-end request latency", LATENCY_BUCKETS)
        self.acceptance = self._histogram("request_acceptance_rate", "Acceptance rate of a sequence", RATIO_BUCKETS)

    def _add_engine_metrics(self) -> None:
        self.running = self._gauge("num_requests_running", "Running sequences")
        self.waiting = self._gauge("num_requests_waiting", "Waiting sequences")
        self.page_use = self._gauge("kv_cache_usage_perc", "Fraction of KV cache pages in use; 1 is full")
        self.preemptions = self._counter("num_preemptions", "Preemptions of sequences for lack of KV pages")
        self.resident = self._gauge("resident_memory_bytes", "Resident memory of the process")
        self.resident_files = self._gauge(
            "resident_file_bytes", "File-backed part of it: libraries and mapped weights, shareable between processes"
        )
        self.step_seconds = self._histogram("step_seconds", "Duration of an engine step", TPOT_BUCKETS)

    def _counter(self, name: str, help_text: str, *labels: str) -> CounterMetric:
        counter = PrometheusCounter(PREFIX + name, help_text, ["model_name", *labels], registry=self.registry)
        return CounterMetric(counter, self._model, labels)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(PREFIX + name, help_text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, help_text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)

    def expose(self, names: str) -> bytes:
        """Return Prometheus's text format with the prefix foretell:, vllm: or both."""
        own = CREATED.sub(b"", generate_latest(self.registry))
        vllm = OWN_PREFIX.sub(rb"\1vllm:", own)
        return {"foretell": own, "vllm": vllm, "both": own + vllm}[names]


@dataclass
class Totals:
    """Sums since the start, for the log line and /server_info."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    num_finished: int = 0  # sequences
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    skips: Counter[str] = field(default_factory=Counter)  # steps of sequences without a draft, by reason
    per_position: list[int] = field(default_factory=list)  # accepted draft tokens by position in the draft
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)  # by drafter: draft tokens, accepted
    step_seconds: float = 0.0
    draft_seconds: float = 0.0  # drafting part of step_seconds
    target_seconds: float = 0.0  # target forward part of step_seconds

    @property
    def acceptance_rate(self) -> float:
        """Return accepted over drafted tokens, without the target's bonus token."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Return the tokens per step with a draft, including the target's bonus token."""
        return 1 + (self.accepted / self.drafts if self.drafts else 0.0)


class Metrics:
    """Counts every step and updates the Prometheus metrics.

    Steps are counted in batches, and before every read: counting each at once takes four times as long, because an
    engine step evicts the counters' code and data from the processor's caches.
    """

    def __init__(
        self,
        model: str,
        plain_seconds: PlainSeconds = no_estimate,
        decisions: DecisionLog | None = None,
        health: Callable[[], DrafterHealth] = dict,
    ) -> None:
        """`health` returns the failures of each drafter since the start and whether it is disabled now."""
        self.prometheus = PrometheusMetrics(model)
        self.decisions, self.health = decisions or DecisionLog(), health
        self._speedup = Speedup(plain_seconds)
        self._totals = Totals()
        self._pending: list[StepReport] = []

    @property
    def totals(self) -> Totals:
        """Return the totals of every step so far."""
        self._count_pending()
        return self._totals

    @property
    def speedup(self) -> Speedup:
        """Return the speedup over every step so far."""
        self._count_pending()
        return self._speedup

    def observe(self, report: StepReport) -> None:
        """Queue the report of a finished step; reports are counted in groups."""
        self._pending.append(report)
        if len(self._pending) >= MAX_PENDING_REPORTS:
            self._count_pending()

    def _count_pending(self) -> None:
        reports, self._pending = self._pending, []
        for report in reports:
            self.prometheus.step_seconds.observe(report.timing.seconds)
            self._observe_timing(report.timing)
            for item in report.items:
                self._observe_item(item)
            self._speedup.observe(report)
        if reports:
            self._totals.drafters = reports[-1].drafters  # sums since the start

    def _observe_timing(self, timing: StepTiming) -> None:
        totals = self._totals
        totals.step_seconds += timing.seconds
        totals.draft_seconds += timing.times.draft_seconds
        totals.target_seconds += timing.times.target_seconds

    def _observe_item(self, item: StreamItem) -> None:
        delta, totals = item.delta, self._totals
        totals.tokens += len(delta.tokens)
        if item.is_first and delta.choice == 0:  # a prompt counts once, whatever the number of choices
            self._observe_first_token(item)
        if delta.num_drafted:
            self._observe_draft(delta.num_drafted, sum(origin != TARGET for origin in delta.origins))
        else:
            totals.skips[skip_reason(item)] += 1
        if delta.finish_reason is not None:
            self._observe_finish(item)

    def _observe_draft(self, drafted: int, accepted: int) -> None:
        totals = self._totals
        totals.drafts += 1
        totals.drafted += drafted
        totals.accepted += accepted
        totals.per_position += [0] * (accepted - len(totals.per_position))
        for position in range(accepted):
            totals.per_position[position] += 1

    def _observe_first_token(self, item: StreamItem) -> None:
        state, times = item.state, item.state.timings
        self._totals.prompt_tokens += len(state.seq.request.prompt)
        self._totals.cached_tokens += state.cached_prompt_tokens
        if times.first_token is not None and times.started is not None:
            self.prometheus.first_token.observe(times.first_token - times.added)
            self.prometheus.queue_time.observe(times.started - times.added)

    def _observe_finish(self, item: StreamItem) -> None:
        prometheus, stats, times = self.prometheus, item.state.speculation, item.state.timings
        self._totals.num_finished += 1
        prometheus.finished.inc(item.delta.finish_reason or "")
        if stats.drafted:
            prometheus.acceptance.observe(stats.accepted / stats.drafted)
        if times.finished is not None and times.first_token is not None:
            prometheus.latency.observe(times.finished - times.added)
            if stats.tokens > 1:
                prometheus.per_token.observe((times.finished - times.first_token) / (stats.tokens - 1))

    def expose(self, names: str, load: Load = Load()) -> bytes:
        """Return Prometheus's text format; `load` is the engine's current load."""
        prometheus = self.prometheus
        self._show_totals(self.totals)
        self._show_load(load)
        prometheus.speedup.set(self.speedup.value or 0.0)
        memory = process_memory()
        prometheus.resident.set(memory.now)
        prometheus.resident_files.set(memory.files)
        for labels, count in self.decisions.counts.items():
            prometheus.decisions.set_total(count, *labels)
        for name, health in self.health().items():
            prometheus.show_health(name, *health)
        prometheus.drafting_on.set(self.decisions.on)
        prometheus.switches.set_total(self.decisions.num_switches)
        return prometheus.expose(names)

    def _show_totals(self, totals: Totals) -> None:
        prometheus = self.prometheus
        prometheus.generation_tokens.set_total(totals.tokens)
        prometheus.prompt_tokens.set_total(totals.prompt_tokens)
        prometheus.prefix_queries.set_total(totals.prompt_tokens)
        prometheus.prefix_hits.set_total(totals.cached_tokens)
        prometheus.drafts.set_total(totals.drafts)
        prometheus.draft_tokens.set_total(totals.drafted)
        for counter in (prometheus.accepted_tokens, prometheus.accepted):  # vLLM's name and the descriptive one
            counter.set_total(totals.accepted)
        prometheus.rejected.set_total(totals.drafted - totals.accepted)
        prometheus.acceptance_rate.set(totals.acceptance_rate)
        for position, count in enumerate(totals.per_position):
            prometheus.accepted_per_pos.set_total(count, str(position))
        for reason, count in totals.skips.items():
            prometheus.skips.set_total(count, reason)
        for name, (drafted, accepted) in totals.drafters.items():
            prometheus.drafter_drafted.set_total(drafted, name)
            prometheus.drafter_accepted.set_total(accepted, name)

    def _show_load(self, load: Load) -> None:
        prometheus = self.prometheus
        prometheus.running.set(load.running)
        prometheus.waiting.set(load.waiting)
        prometheus.page_use.set(load.pages_held / load.pages if load.pages else 0.0)
        prometheus.preemptions.set_total(load.preemptions)
