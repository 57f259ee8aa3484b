"""The first rank's steps: told to the others, then run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foretell.errors import RankError
from foretell.runner.executor import Executor, StepOutput
from foretell.runner.pack import Packed
from foretell.runner.runner import ModelRunner

from .messages import move_message, step_message
from .team import Team


def lead(runner: ModelRunner, team: Team, model: int = 0) -> None:
    """Let the runner's steps and moves be those of all ranks; `model` is which of theirs."""
    runner.executor = LeadExecutor(runner.executor, team, model)
    runner.followers = Followers(team, model)


class LeadExecutor:
    """What the first rank's own executor gives: the others' parts are in its sums and logits."""

    def __init__(self, own: Executor, team: Team, model: int) -> None:
        self.own, self.team, self.model = own, team, model

    def __call__(self, packed: Packed, taps: tuple[int, ...]) -> StepOutput:
        """A step that breaks off leaves the others in the midst of it: then there is no next one."""
        self.team.check()
        with uninterrupted():
            try:
                self.team.tell(step_message(self.model, packed))
                return self.own(packed, taps)
            except RankError:
                raise
            except BaseException as error:
                raise self.team.lost(error) from error


class Followers:
    """The other ranks, as a runner knows them."""

    def __init__(self, team: Team, model: int) -> None:
        self._team, self._model = team, model

    def move(self, source: list[int], target: list[int]) -> None:
        """Move slots as the first rank does."""
        if source != target:
            self._team.tell(move_message(self._model, source, target))

    def check(self) -> None:
        """Raise if a rank was lost meanwhile: a CUDA device then ends a step as if all were well."""
        self._team.check()

    def listen(self, told: Callable[[RankError], None]) -> None:
        self._team.listen(told)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of what is in here; a second one does not."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if came:
            before(number, frame)  # type: ignore[arg-type]
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(came[0], None)
