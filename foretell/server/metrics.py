"""Counts every step of the engine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter

from foretell.engine.streams import Load, StepClock, StepReport
from foretell.server.choice_state import skip_reason
from foretell.server.memory_report import process_memory
from foretell.types import TARGET

if TYPE_CHECKING:
    from foretell.engine.streams import StepClock, StepReport, StreamItem

# Seconds of the target in a plain step of so many texts that look at so many cached tokens; None where not known.
PlainSeconds = Callable[[int, int], float | None]


@dataclass
class Speedup:
    """Tokens times the plain step's time at their batch and context, over the time they took.

    A plain step's time is the target's, and what the step at hand took beside guessing and running the target.
    Steps that also ran prompts say nothing of decoding and are left out; so are steps whose plain time is not known.
    """

    plain_seconds: PlainSeconds
    plain_decode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def observe(self, report: StepReport) -> None:
        """Count one step."""
        step = plain_step_seconds(self.plain_seconds, report.clock)
        if step is not None:
            tokens = sum(len(piece.delta.tokens) for piece in report.pieces)
            self.plain_decode_seconds += tokens / report.clock.texts * step
            self.decode_seconds += report.clock.seconds

    @property
    def value(self) -> float | None:
        return self.plain_decode_seconds / self.decode_seconds if self.decode_seconds > 0 else None


def plain_step_seconds(plain_seconds: PlainSeconds, clock: StepClock) -> float | None:
    """What the same step would have taken without guesses; None where that is not known, or where it read prompts."""
    step = plain_seconds(clock.texts, clock.context) if clock.decodes else None
    return None if step is None else step + clock.host


def no_estimate(batch: int, context: int) -> float | None:
    """Where nobody measures plain steps."""
    return None


PREFIX = "foretell:"
CREATED = re.compile(rb"(?m)^.*_created[ {].*\n")  # when each counter began: lines that nobody asks for
OURS = re.compile(rb"(?m)^(# HELP |# TYPE |)foretell:")
FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class CounterMetric:
    """A counter, perhaps with labels of its own; it can also follow a total that is kept elsewhere."""

    def __init__(self, counter: PrometheusCounter, model: str, labels: tuple[str, ...]) -> None:
        self._counter, self._model = counter, model
        if not labels:
            counter.labels(model)  # shown from the start
        self._totals: dict[tuple[str, ...], float] = {}

    def inc(self, *labels: str, amount: float = 1) -> None:
        self._totals[labels] = self._totals.get(labels, 0) + amount
        self._counter.labels(self._model, *labels).inc(amount)

    def set_total(self, total: float, *labels: str) -> None:
        """Catch up with a total that only grows."""
        self.inc(*labels, amount=total - self._totals.get(labels, 0))


class PrometheusMetrics:
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
        self.drafter_failures.set_total(failures, drafter)
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
        self.process_memory = self._gauge("resident_memory_bytes", "Memory the process has")
        self.resident_files = self._gauge(
            "resident_file_bytes", "Of that, pages of files: libraries and mapped weights, which others may share"
        )
        self.step_seconds = self._histogram("step_seconds", "Time of a step", PER_TOKEN)

    def _tally(self, name: str, words: str, *labels: str) -> CounterMetric:
        counter = PrometheusCounter(PREFIX + name, words, ["model_name", *labels], registry=self.registry)
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


MAX_PENDING_REPORTS = 32  # steps

Health = Mapping[str, tuple[int, bool]]  # by drafter: failures, disabled


class ControllerStats(Protocol):
    """A controller: how often each thing was decided, whether guessing is on and why, and how often that changed."""

    @property
    def decision_counts(self) -> Mapping[tuple[str, str, str], int]: ...

    @property
    def speculation_state(self) -> tuple[bool, str]: ...

    @property
    def num_switches(self) -> int: ...


@dataclass(frozen=True)
class NoControllerStats:
    """Nobody decides anything."""

    decision_counts: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    speculation_state: tuple[bool, str] = (True, "")
    num_switches: int = 0


@dataclass
class Totals:
    """The sums that the log line and /server_info tell of."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    num_finished: int = 0  # that ended
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    skips: Counter[str] = field(default_factory=Counter)  # steps of texts without a draft, by reason
    per_position: list[int] = field(default_factory=list)
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each: guesses, and those accepted
    step_seconds: float = 0.0  # of all steps
    draft_seconds: float = 0.0  # of these, for guessing
    target_seconds: float = 0.0  # and for the target

    @property
    def acceptance_rate(self) -> float:
        """Excludes the token the target adds."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Includes it; steps without a draft do not count."""
        return 1 + (self.accepted / self.drafts if self.drafts else 0.0)


class Metrics:
    """Hears of every step and keeps the instruments true.

    Steps are counted some at a time, and before anybody looks: counting each as it comes takes four times as long,
    because a step of the engine leaves the processor's caches full of other things.
    """

    def __init__(
        self,
        model: str,
        plain_seconds: PlainSeconds = no_estimate,
        controller: ControllerStats = NoControllerStats(),
        health: Callable[[], Health] = dict,
    ) -> None:
        """`health` returns the failures of each drafter since the start and whether it is disabled now."""
        self.prometheus = PrometheusMetrics(model)
        self.controller, self.health = controller, health
        self._speedup = Speedup(plain_seconds)
        self._totals = Totals()
        self._uncounted: list[StepReport] = []

    @property
    def totals(self) -> Totals:
        """Of every step so far."""
        self._count()
        return self._totals

    @property
    def speedup(self) -> Speedup:
        """Over every step so far."""
        self._count()
        return self._speedup

    def observe(self, report: StepReport) -> None:
        """A step is done."""
        self._uncounted.append(report)
        if len(self._uncounted) >= MAX_PENDING_REPORTS:
            self._count()

    def _count(self) -> None:
        reports, self._uncounted = self._uncounted, []
        for report in reports:
            self.prometheus.step_seconds.observe(report.clock.seconds)
            self._observe_clock(report.clock)
            for piece in report.pieces:
                self._observe_piece(piece)
            self._speedup.observe(report)
        if reports:
            self._totals.drafters = reports[-1].drafters  # they are sums already

    def _observe_clock(self, clock: StepClock) -> None:
        totals = self._totals
        totals.step_seconds += clock.seconds
        totals.draft_seconds += clock.times.draft_seconds
        totals.target_seconds += clock.times.target_seconds

    def _observe_piece(self, piece: StreamItem) -> None:
        delta, totals = piece.delta, self._totals
        totals.tokens += len(delta.tokens)
        if piece.first and delta.choice == 0:  # a prompt counts once, whatever the number of choices
            self._observe_first(piece)
        if delta.num_drafted:
            self._observe_draft(delta.num_drafted, sum(origin != TARGET for origin in delta.origins))
        else:
            totals.skips[skip_reason(piece)] += 1
        if delta.finish_reason is not None:
            self._observe_end(piece)

    def _observe_draft(self, drafted: int, accepted: int) -> None:
        totals = self._totals
        totals.drafts += 1
        totals.drafted += drafted
        totals.accepted += accepted
        totals.per_position += [0] * (accepted - len(totals.per_position))
        for position in range(accepted):
            totals.per_position[position] += 1

    def _observe_first(self, piece: StreamItem) -> None:
        show, track, clock = self.prometheus, piece.track, piece.track.timings
        prompt = len(track.seq.request.prompt)
        self._totals.prompt_tokens += prompt
        self._totals.cached_tokens += track.cached_prompt_tokens
        if clock.first_token is not None and clock.started is not None:
            show.first_token.observe(clock.first_token - clock.added)
            show.queue_time.observe(clock.started - clock.added)

    def _observe_end(self, piece: StreamItem) -> None:
        show, record, clock = self.prometheus, piece.track.speculation, piece.track.timings
        self._totals.num_finished += 1
        show.finished.inc(piece.delta.finish_reason or "")
        if record.drafted:
            show.acceptance.observe(record.accepted / record.drafted)
        if clock.finished is not None and clock.first_token is not None:
            show.latency.observe(clock.finished - clock.added)
            if record.tokens > 1:
                show.per_token.observe((clock.finished - clock.first_token) / (record.tokens - 1))

    def expose(self, names: str, load: Load = Load()) -> bytes:
        """Prometheus's text; `load`: how busy the engine is now."""
        self._show_totals(self.totals)
        self._show_load(load)
        self.prometheus.speedup.set(self.speedup.value or 0.0)
        memory = process_memory()
        self.prometheus.process_memory.set(memory.now)
        self.prometheus.resident_files.set(memory.files)
        for labels, count in self.controller.decision_counts.items():
            self.prometheus.decisions.set_total(count, *labels)
        for name, health in self.health().items():
            self.prometheus.show_health(name, *health)
        self.prometheus.drafting_on.set(self.controller.speculation_state[0])
        self.prometheus.switches.set_total(self.controller.num_switches)
        return self.prometheus.expose(names)

    def _show_totals(self, totals: Totals) -> None:
        show = self.prometheus
        show.generation_tokens.set_total(totals.tokens)
        show.prompt_tokens.set_total(totals.prompt_tokens)
        show.prefix_queries.set_total(totals.prompt_tokens)
        show.prefix_hits.set_total(totals.cached_tokens)
        show.drafts.set_total(totals.drafts)
        show.draft_tokens.set_total(totals.drafted)
        for accepted in (show.accepted_tokens, show.accepted):  # vLLM's name and the one people look for
            accepted.set_total(totals.accepted)
        show.rejected.set_total(totals.drafted - totals.accepted)
        show.acceptance_rate.set(totals.acceptance_rate)
        for position, count in enumerate(totals.per_position):
            show.accepted_per_pos.set_total(count, str(position))
        for reason, count in totals.skips.items():
            show.skips.set_total(count, reason)
        for name, (drafted, accepted_of_it) in totals.drafters.items():
            show.drafter_drafted.set_total(drafted, name)
            show.drafter_accepted.set_total(accepted_of_it, name)

    def _show_load(self, load: Load) -> None:
        show = self.prometheus
        show.running.set(load.running)
        show.waiting.set(load.waiting)
        show.page_use.set(load.pages_held / load.pages if load.pages else 0.0)
        show.preemptions.set_total(load.preemptions)
