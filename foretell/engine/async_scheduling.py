"""A step between its beginning and its end, and the one that begins before it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from foretell.draft.base import Drafter
from foretell.engine.scheduler import Scheduler
from foretell.runner.executor import StepOutput, StepTokens
from foretell.sampling.cuda_sampler import Draws
from foretell.types import Budget, Draft, ScheduledSequence, StepTimes

UNSEEN_ROWS = 64  # of a step whose guesses the host has not seen


@dataclass
class InFlightStep:
    """A step that was given to the device, and when; what it was planned for and how long guessing took."""

    plan: list[ScheduledSequence]
    drafts: list[Draft]
    output: StepOutput
    began: float  # when it was planned
    drafted: float  # when its guesses were made
    launched: float
    proposing: float = 0.0
    away: float = 0.0  # seconds since the last step had its tokens, until this was launched, that are a caller's
    moment: tuple[int, int] = (0, 0)  # steps its device has run, and texts that had to leave: after more it is lost
    is_ahead: bool = False  # whether it began before the tokens were known that it begins with
    odd: bool = False  # whether to begin it took longer than it will take again
    landed: Callable[[], StepTokens] | None = None  # set where another was sent behind it: its logits are lost
    arrived: float = 0.0  # when its tokens were known; what is done with them comes after

    @property
    def brings_first_words(self) -> bool:
        """Whether somebody has waited for what it writes from the beginning, and is to hear of it at once."""
        return any(share.reaches_end and share.length == len(share.seq.request.prompt) for share in self.plan)

    def see(self, drafts: list[Draft], now: float) -> None:
        """Its guesses were made on the device, and are known now: only then the step itself began there."""
        self.proposing += now - self.drafted
        self.drafted = now
        self.launched = max(self.launched, now)
        self.drafts = drafts


def may_stay_unseen(plan: list[ScheduledSequence], budgets: list[Budget], drafter: Drafter, device: str) -> bool:
    """Whether a step there can run guesses that no host has seen: all of one drafter, behind texts that write and hold
    guesses against their own tokens, and so few rows that it does not matter that none is left out as unlikely."""
    names = {budget.drafter for budget in budgets if budget.nodes}
    if len(names) != 1 or any(share.num_new_tokens > 1 or share.seq.request.rule != "match" for share in plan):
        return False
    (name,) = names
    rows = sum(1 + budget.nodes for budget in budgets)
    return drafter.drafters.get(name, drafter).unseen_on == device and rows <= UNSEEN_ROWS


def followers(
    flight: InFlightStep,
    scheduler: Scheduler,
    lives: Callable[[ScheduledSequence], bool],
    alone: Callable[[ScheduledSequence], bool],
) -> list[int]:
    """The rows of a step whose texts go on in the next, if that can begin before the tokens are known; else none.

    It can where all that run are in the step, write one token each, each `alone`, and nobody could come in.
    """
    if flight.output.argmax is None or any(map(len, flight.drafts)):
        return []
    going: list[int] = []
    there = 0
    for row, share in enumerate(flight.plan):
        seq = share.seq
        if not share.reaches_end:
            return []
        if not lives(share):
            continue
        there += 1
        if not alone(share):
            return []
        if share.num_new_tokens > 1 and seq.request.drafters and len(flight.plan) == 1:
            return []  # alone, guesses may pay at once behind a prompt, and nobody has looked yet
        if seq.remaining_tokens > 1:
            going.append(row)
    comes_in = len(going) < scheduler.max_num_seqs and scheduler.may_admit
    return [] if comes_in or there < len(scheduler.running) else going


def next_shares(flight: InFlightStep, rows: list[int]) -> list[ScheduledSequence]:
    """Of these rows' texts one token each, behind the one that the step comes to."""
    shares = [flight.plan[row] for row in rows]
    return [ScheduledSequence(share.seq, 1, start=share.length, length=share.length + 1) for share in shares]


def draws_of(flight: InFlightStep) -> Draws | None:
    """How the tokens of a step's rows are drawn; None: all are the likeliest."""
    requests = [share.seq.request for share in flight.plan]
    if all(request.params.temperature == 0 for request in requests):
        return None
    params, seeds = [request.params for request in requests], [request.seed for request in requests]
    return Draws(params, seeds, [share.length for share in flight.plan])


LATE = 0.9  # of a step's time: if the host was elsewhere for so much of it, the device was done before it came back


class StepTimer:
    """Where nothing is sent ahead, all that the host does belongs to the step it does it for. Where steps are, it runs
    beside the device, and what counts is when a step had its tokens and how long the device had nothing to do."""

    def __init__(self) -> None:
        self._landed: float | None = None  # when the last step had its tokens
        self._texts = 0  # in that step, if each of them ran one token
        self._left: float | None = None  # when the engine had done with the last step
        self.away = 0.0  # seconds since that landed in which nobody asked: what callers do is not its own

    def enter(self) -> None:
        """A step is asked for."""
        if self._left is not None:
            self.away += perf_counter() - self._left
            self._left = None

    def leave(self) -> None:
        """What came of it is given back."""
        self._left = perf_counter()

    def apart(self, flight: InFlightStep, curious: float) -> StepTimes:
        """Of a step that is over and written down; `curious` are seconds of what only drafters want to know of it."""
        running = perf_counter() - flight.drafted - curious
        return StepTimes(flight.drafted - flight.began + curious, running, flight.proposing, flight.odd)

    def beside(self, flight: InFlightStep, curious: float) -> StepTimes:
        """Of one that has arrived, on a device that steps are sent to ahead. What the host does with its tokens is no
        part of it, and what the next one waits for, unless that was sent ahead: a step would else seem longer for
        nothing but that the host had looked on."""
        before, texts, landed = self._landed, self._texts, flight.arrived
        elsewhere = self.away - flight.away  # what the host did for others while this ran
        self._landed, self.away = landed, 0.0
        self._texts = len(flight.plan) if all(share.num_new_tokens == 1 for share in flight.plan) else 0
        since = flight.launched if before is None else max(before, flight.launched)
        drafting = 0.0 if flight.is_ahead else flight.drafted - flight.began
        waiting = None
        if before is not None and not flight.is_ahead and 0 < self._texts == texts:
            waiting = max(0.0, since - before - flight.away - flight.proposing)
        odd = flight.odd or elsewhere > LATE * (landed - since)
        return StepTimes(drafting + curious, landed - since, flight.proposing, odd, waiting)

    def rest(self) -> None:
        """Nobody writes any more: until somebody does, no device waits for anything."""
        self._landed = self._left = None
        self.away = 0.0
