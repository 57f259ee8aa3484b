"""What the server counts, by name. The names behind the prefix are vLLM's where vLLM has one."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "foretell:"
CREATED = re.compile(rb"(?m)^.*_created[ {].*\n")  # when each counter began: lines that nobody asks for
OURS = re.compile(rb"(?m)^(# HELP |# TYPE |)foretell:")
FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class CounterMetric:
    """A counter, perhaps with labels of its own; it can also follow a total that is kept elsewhere."""

    def __init__(self, counter: Counter, model: str, labels: tuple[str, ...]) -> None:
        self._counter, self._model = counter, model
        if not labels:
            counter.labels(model)  # shown from the start
        self._totals: dict[tuple[str, ...], float] = {}

    def add(self, *labels: str, amount: float = 1) -> None:
        self._totals[labels] = self._totals.get(labels, 0) + amount
        self._counter.labels(self._model, *labels).inc(amount)

    def follow(self, total: float, *labels: str) -> None:
        """Catch up with a total that only grows."""
        self.add(*labels, amount=total - self._totals.get(labels, 0))


class MetricSet:
    """The counters of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._make_speculation()
        self._make_requests()
        self._make_engine()

    def _make_speculation(self) -> None:
        self.drafts = self._tally("spec_decode_num_drafts", "Steps in which a text had a draft")
        self.draft_tokens = self._tally("spec_decode_num_draft_tokens", "Guesses that were checked")
        self.accepted_tokens = self._tally("spec_decode_num_accepted_tokens", "Guesses that entered a text")
        self.accepted_per_pos = self._tally(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts of which the guess at this place was accepted",
            "position",
        )
        self.skips = self._tally("spec_decode_skipped", "Steps in which a text had no draft", "reason")
        self.drafter_drafted = self._tally("drafter_draft_tokens", "Guesses of each drafter", "drafter")
        self.drafter_accepted = self._tally("drafter_accepted_tokens", "Its guesses that entered a text", "drafter")
        self.drafter_failures = self._tally("drafter_failures", "Failed calls of each drafter", "drafter")
        self._drafter_disabled = Gauge(
            PREFIX + "drafter_disabled",
            "1: the drafter pauses after failures in a row",
            ["model_name", "drafter"],
            registry=self.registry,
        )
        self.decisions = self._tally(
            "drafter_decisions", "Steps of texts by what was decided for a drafter", "drafter", "decision", "reason"
        )
        self.drafting_on = self._gauge("drafting_on", "1: guessing is on; 0: it does not pay")
        self.switches = self._tally("drafting_switches", "How often guessing went off or on")
        self.accepted = self._tally("speculative_decoding_accepted_tokens", "Guesses that entered a text")
        self.rejected = self._tally("speculative_decoding_rejected_tokens", "Guesses that did not")
        self.acceptance_rate = self._gauge("speculative_decoding_acceptance_rate", "Accepted guesses over all guesses")
        self.speedup = self._gauge(
            "speedup", "Tokens times the plain step's time at their batch and context, over decode time; 0: not known"
        )

    def show_health(self, drafter: str, failures: int, disabled: bool) -> None:
        """Set the failures of a drafter since the start and whether it is disabled now."""
        self.drafter_failures.follow(failures, drafter)
        self._drafter_disabled.labels(self._model, drafter).set(disabled)

    def _make_requests(self) -> None:
        self.prompt_tokens = self._tally("prompt_tokens", "Tokens of prompts")
        self.generation_tokens = self._tally("generation_tokens", "Tokens written")
        self.prefix_queries = self._tally("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache")
        self.prefix_hits = self._tally("prefix_cache_hits", "Tokens of prompts found there")
        self.finished = self._tally("request_success", "Texts that ended", "finished_reason")
        self.failures = self._tally("request_failures", "Requests that were refused or failed", "code")
        self.first_token = self._histogram("time_to_first_token_seconds", "From asking to the first token", FIRST_TOKEN)
        self.per_token = self._histogram("time_per_output_token_seconds", "Mean time of a further token", PER_TOKEN)
        self.queue_time = self._histogram("request_queue_time_seconds", "From asking until taken up", FIRST_TOKEN)
        self.latency = self._histogram("e2e_request_latency_seconds", "From asking to the end", WHOLE)
        self.acceptance = self._histogram("request_acceptance_rate", "Accepted over all guesses of a text", SHARES)

    def _make_engine(self) -> None:
        self.running = self._gauge("num_requests_running", "Texts being written")
        self.waiting = self._gauge("num_requests_waiting", "Texts that wait")
        self.page_use = self._gauge("kv_cache_usage_perc", "Pages in use, of all; 1 is full")
        self.preemptions = self._tally("num_preemptions", "Texts that had to give their pages back")
        self.resident = self._gauge("resident_memory_bytes", "Memory the process has")
        self.resident_files = self._gauge(
            "resident_file_bytes", "Of that, pages of files: libraries and mapped weights, which others may share"
        )
        self.step_seconds = self._histogram("step_seconds", "Time of a step", PER_TOKEN)

    def _tally(self, name: str, words: str, *labels: str) -> CounterMetric:
        counter = Counter(PREFIX + name, words, ["model_name", *labels], registry=self.registry)
        return CounterMetric(counter, self._model, labels)

    def _gauge(self, name: str, words: str) -> Gauge:
        return Gauge(PREFIX + name, words, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(PREFIX + name, words, ["model_name"], buckets=buckets, registry=self.registry)
        return made.labels(self._model)

    def expose(self, names: str) -> bytes:
        """Prometheus's text, under our names, vLLM's or both."""
        ours = CREATED.sub(b"", generate_latest(self.registry))
        theirs = OURS.sub(rb"\1vllm:", ours)
        return {"foretell": ours, "vllm": theirs, "both": ours + theirs}[names]
