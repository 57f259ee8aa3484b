"""Counts every step of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from foretell.types import TARGET

from .answers import skip_reason
from .instruments import Instruments
from .speedup import PlainSeconds, Speedup, unknown

if TYPE_CHECKING:
    from foretell.engine.streams import Load, Piece, StepReport


class Deciding(Protocol):
    """A controller: how often each thing was decided, whether guessing is on and why, and how often that changed."""

    @property
    def decided(self) -> Mapping[tuple[str, str, str], int]: ...

    @property
    def standing(self) -> tuple[bool, str]: ...

    @property
    def switches(self) -> int: ...


@dataclass(frozen=True)
class Undecided:
    """Nobody decides anything."""

    decided: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    standing: tuple[bool, str] = (True, "")
    switches: int = 0


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
    """Hears of every step and keeps the instruments true."""

    def __init__(self, model: str, plain_seconds: PlainSeconds = unknown, controller: Deciding = Undecided()) -> None:
        self.instruments = Instruments(model)
        self.speedup = Speedup(plain_seconds)
        self.totals = Totals()
        self.controller = controller
        self._preemptions = 0

    def observe(self, report: StepReport) -> None:
        """Count one step."""
        show = self.instruments
        show.step_seconds.observe(report.clock.seconds)
        self.observe_load(report.load)
        self._observe_clock(report)
        for name, (drafted, accepted) in report.drafters.items():
            show.drafter_drafted.follow(drafted, name)
            show.drafter_accepted.follow(accepted, name)
        for piece in report.pieces:
            self._observe_piece(piece)
        self.speedup.observe(report)

    def _observe_clock(self, report: StepReport) -> None:
        totals, clock = self.totals, report.clock
        totals.drafters = report.drafters
        totals.seconds += clock.seconds
        totals.drafting += clock.times.drafting
        totals.running += clock.times.running

    def observe_load(self, load: Load) -> None:
        """How busy the engine is now."""
        self.instruments.running.set(load.running)
        self.instruments.waiting.set(load.waiting)
        self.instruments.page_use.set(load.pages_held / load.pages if load.pages else 0.0)
        self.instruments.preemptions.inc(load.preemptions - self._preemptions)
        self._preemptions = load.preemptions

    def _observe_piece(self, piece: Piece) -> None:
        delta = piece.delta
        self.totals.tokens += len(delta.tokens)
        self.instruments.generation_tokens.inc(len(delta.tokens))
        if piece.first and piece.delta.choice == 0:  # a prompt counts once, whatever the number of choices
            self._observe_first(piece)
        if delta.drafted:
            self._observe_draft(delta.drafted, sum(origin != TARGET for origin in delta.origins))
        else:
            self.instruments.skips.add(skip_reason(piece))
        if delta.finish is not None:
            self._observe_end(piece)

    def _observe_draft(self, drafted: int, accepted: int) -> None:
        show, totals = self.instruments, self.totals
        show.drafts.inc()
        show.draft_tokens.inc(drafted)
        show.accepted_tokens.inc(accepted)
        show.accepted.inc(accepted)
        show.rejected.inc(drafted - accepted)
        totals.drafts += 1
        totals.drafted += drafted
        totals.accepted += accepted
        totals.per_position += [0] * (accepted - len(totals.per_position))
        for position in range(accepted):
            totals.per_position[position] += 1
            show.accepted_per_pos.add(str(position))

    def _observe_first(self, piece: Piece) -> None:
        show, track, clock = self.instruments, piece.track, piece.track.timings
        prompt = len(track.seq.request.prompt)
        self.totals.prompt_tokens += prompt
        self.totals.cached_tokens += track.cached_prompt_tokens
        show.prompt_tokens.inc(prompt)
        show.prefix_queries.inc(prompt)
        show.prefix_hits.inc(track.cached_prompt_tokens)
        if clock.first_token is not None and clock.started is not None:
            show.first_token.observe(clock.first_token - clock.added)
            show.queue_time.observe(clock.started - clock.added)

    def _observe_end(self, piece: Piece) -> None:
        show, record, clock = self.instruments, piece.track.speculation, piece.track.timings
        self.totals.texts += 1
        show.finished.add(piece.delta.finish or "")
        if record.drafted:
            show.acceptance.observe(record.accepted / record.drafted)
        if clock.finished is not None and clock.first_token is not None:
            show.latency.observe(clock.finished - clock.added)
            if record.tokens > 1:
                show.per_token.observe((clock.finished - clock.first_token) / (record.tokens - 1))

    def expose(self, names: str) -> bytes:
        """Prometheus's text."""
        self.instruments.acceptance_rate.set(self.totals.acceptance_rate)
        self.instruments.speedup.set(self.speedup.value or 0.0)
        for labels, count in self.controller.decided.items():
            self.instruments.decisions.follow(count, *labels)
        self.instruments.drafting_on.set(self.controller.standing[0])
        self.instruments.switches.follow(self.controller.switches)
        return self.instruments.expose(names)
