"""A step between its beginning and its end, and the one that begins before it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.draft.base import Drafter
from foretell.runner.executor import Landed, StepOutput
from foretell.sampling.on_device import Draws
from foretell.types import Budget, Draft, Share

from .scheduler import Scheduler

UNSEEN_ROWS = 64  # of a step whose guesses the host has not seen


@dataclass
class Flight:
    """A step that was given to the device, and when; what it was planned for and how long guessing took."""

    plan: list[Share]
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
    landed: Callable[[], Landed] | None = None  # set where another was sent behind it: its logits are lost
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


def may_stay_unseen(plan: list[Share], budgets: list[Budget], drafter: Drafter, device: str) -> bool:
    """Whether a step there can run guesses that no host has seen: all of one drafter, behind texts that write and hold
    guesses against their own tokens, and so few rows that it does not matter that none is left out as unlikely."""
    names = {budget.drafter for budget in budgets if budget.nodes}
    if len(names) != 1 or any(share.take > 1 or share.seq.request.rule != "match" for share in plan):
        return False
    (name,) = names
    rows = sum(1 + budget.nodes for budget in budgets)
    return drafter.arms.get(name, drafter).unseen_on == device and rows <= UNSEEN_ROWS


def followers(
    flight: Flight, scheduler: Scheduler, lives: Callable[[Share], bool], alone: Callable[[Share], bool]
) -> list[int]:
    """The rows of a step whose texts go on in the next, if that can begin before the tokens are known; else none.

    It can where all that run are in the step, write one token each, each `alone`, and nobody could come in.
    """
    if flight.output.likeliest is None or any(map(len, flight.drafts)):
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
        if share.take > 1 and seq.request.drafters and len(flight.plan) == 1:
            return []  # alone, guesses may pay at once behind a prompt, and nobody has looked yet
        if seq.room > 1:
            going.append(row)
    comes_in = len(going) < scheduler.max_num_seqs and scheduler.may_admit
    return [] if comes_in or there < len(scheduler.running) else going


def next_shares(flight: Flight, rows: list[int]) -> list[Share]:
    """Of these rows' texts one token each, behind the one that the step comes to."""
    shares = [flight.plan[row] for row in rows]
    return [Share(share.seq, 1, start=share.length, length=share.length + 1) for share in shares]


def draws_of(flight: Flight) -> Draws | None:
    """How the tokens of a step's rows are drawn; None: all are the likeliest."""
    requests = [share.seq.request for share in flight.plan]
    if all(request.params.temperature == 0 for request in requests):
        return None
    params, seeds = [request.params for request in requests], [request.seed for request in requests]
    return Draws(params, seeds, [share.length for share in flight.plan])
