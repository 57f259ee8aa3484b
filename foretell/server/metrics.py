"""Counts every step of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from foretell.engine.streams import Load
from foretell.types import TARGET

from .choice_state import skip_reason
from .memory_report import resident
from .metric_definitions import MetricSet
from .speedup import PlainSeconds, Speedup, unknown

if TYPE_CHECKING:
    from foretell.engine.streams import StepReport, StepTiming, StreamItem

MOST_UNCOUNTED = 32  # steps

Health = Mapping[str, tuple[int, bool]]  # by drafter: failures, disabled


class Deciding(Protocol):
    """A controller: how often each thing was decided, whether guessing is on and why, and how often that changed."""

    @property
    def decision_counts(self) -> Mapping[tuple[str, str, str], int]: ...

    @property
    def speculation_state(self) -> tuple[bool, str]: ...

    @property
    def num_switches(self) -> int: ...


@dataclass(frozen=True)
class Undecided:
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
    texts: int = 0  # that ended
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    skips: Counter[str] = field(default_factory=Counter)  # steps of texts without a draft, by reason
    per_position: list[int] = field(default_factory=list)
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each: guesses, and those accepted
    seconds: float = 0.0  # of all steps
    drafting: float = 0.0  # of these, for guessing
    running: float = 0.0  # and for the target

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
        plain_seconds: PlainSeconds = unknown,
        controller: Deciding = Undecided(),
        health: Callable[[], Health] = dict,
    ) -> None:
        """`health` returns the failures of each drafter since the start and whether it is disabled now."""
        self.instruments = MetricSet(model)
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
        if len(self._uncounted) >= MOST_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        reports, self._uncounted = self._uncounted, []
        for report in reports:
            self.instruments.step_seconds.observe(report.timing.seconds)
            self._observe_clock(report.timing)
            for piece in report.items:
                self._observe_piece(piece)
            self._speedup.observe(report)
        if reports:
            self._totals.drafters = reports[-1].drafters  # they are sums already

    def _observe_clock(self, clock: StepTiming) -> None:
        totals = self._totals
        totals.seconds += clock.seconds
        totals.drafting += clock.times.draft_seconds
        totals.running += clock.times.target_seconds

    def _observe_piece(self, piece: StreamItem) -> None:
        delta, totals = piece.delta, self._totals
        totals.tokens += len(delta.tokens)
        if piece.is_first and delta.choice == 0:  # a prompt counts once, whatever the number of choices
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
        show, track, clock = self.instruments, piece.state, piece.state.timings
        prompt = len(track.seq.request.prompt)
        self._totals.prompt_tokens += prompt
        self._totals.cached_tokens += track.cached_prompt_tokens
        if clock.first_token is not None and clock.started is not None:
            show.first_token.observe(clock.first_token - clock.added)
            show.queue_time.observe(clock.started - clock.added)

    def _observe_end(self, piece: StreamItem) -> None:
        show, record, clock = self.instruments, piece.state.speculation, piece.state.timings
        self._totals.texts += 1
        show.finished.add(piece.delta.finish_reason or "")
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
        self.instruments.speedup.set(self.speedup.value or 0.0)
        memory = resident()
        self.instruments.resident.set(memory.now)
        self.instruments.resident_files.set(memory.files)
        for labels, count in self.controller.decision_counts.items():
            self.instruments.decisions.follow(count, *labels)
        for name, health in self.health().items():
            self.instruments.show_health(name, *health)
        self.instruments.drafting_on.set(self.controller.speculation_state[0])
        self.instruments.switches.follow(self.controller.num_switches)
        return self.instruments.expose(names)

    def _show_totals(self, totals: Totals) -> None:
        show = self.instruments
        show.generation_tokens.follow(totals.tokens)
        show.prompt_tokens.follow(totals.prompt_tokens)
        show.prefix_queries.follow(totals.prompt_tokens)
        show.prefix_hits.follow(totals.cached_tokens)
        show.drafts.follow(totals.drafts)
        show.draft_tokens.follow(totals.drafted)
        for accepted in (show.accepted_tokens, show.accepted):  # vLLM's name and the one people look for
            accepted.follow(totals.accepted)
        show.rejected.follow(totals.drafted - totals.accepted)
        show.acceptance_rate.set(totals.acceptance_rate)
        for position, count in enumerate(totals.per_position):
            show.accepted_per_pos.follow(count, str(position))
        for reason, count in totals.skips.items():
            show.skips.follow(count, reason)
        for name, (drafted, accepted_of_it) in totals.drafters.items():
            show.drafter_drafted.follow(drafted, name)
            show.drafter_accepted.follow(accepted_of_it, name)

    def _show_load(self, load: Load) -> None:
        show = self.instruments
        show.running.set(load.running)
        show.waiting.set(load.waiting)
        show.page_use.set(load.pages_held / load.pages if load.pages else 0.0)
        show.preemptions.follow(load.preemptions)
