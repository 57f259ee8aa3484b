"""What passes between an engine in its thread and those who wait for its texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretell.errors import ForetellError

if TYPE_CHECKING:
    from foretell.engine.sequence_state import SequenceState
    from foretell.types import Delta, Request, StepTimes

MOST_GATHERED = (
    256  # pieces, after which even a patient caller takes them: all at the end would keep the others waiting
)


class Unavailable(ForetellError):
    """Nothing new is taken up now; `retry_after` seconds from now may be better."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Unavailable):
    """As many texts wait as may."""


class StepFailed(ForetellError):
    """A text's own step failed, run alone; the text is lost, those that ran beside it are not."""


@dataclass(frozen=True)
class StepClock:
    """When a step ended, what its seconds went into, and how much it had to do."""

    ended: float  # by perf_counter
    seconds: float
    times: StepTimes
    rows: int  # tokens the target ran: of prompts, of texts, and guesses; 0 where a step failed and was mended
    texts: int  # that grew
    drafted: int  # guesses for them
    context: int  # tokens of these texts, together

    @property
    def decodes(self) -> bool:
        """Whether it ran no prompts, so that it can be held against a plain step."""
        return self.texts > 0 and self.rows == self.texts + self.drafted

    @property
    def host(self) -> float:
        """Neither for guessing nor for the target: a plain step would have taken them too."""
        return self.seconds - self.times.draft_seconds - self.times.target_seconds


@dataclass(frozen=True)
class StreamItem:
    """What one step brought one text. The text's record is safe to read once `delta.finish` is set."""

    delta: Delta
    track: SequenceState
    first: bool  # whether these are the text's first tokens
    clock: StepClock | None = None  # of the step, where somebody held one


@dataclass(frozen=True)
class Load:
    """How busy an engine is."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_held: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class StepReport:
    """What a step did and how the engine stands after it."""

    pieces: tuple[StreamItem, ...]
    clock: StepClock
    load: Load
    drafters: dict[str, tuple[int, int]]  # since the start, of each drafter: guesses, and those accepted


@dataclass(eq=False)
class Stream:
    """The pieces of the texts a caller asked for together, mixed, as they are written. `close` ends them early."""

    requests: list[Request]
    patient: bool = False  # whether nobody looks before the texts have ended, so that pieces may gather
    close: Callable[[], None] = lambda: None
    take: Callable[[StreamItem], bool] = lambda piece: (
        False
    )  # takes a piece at once, where somebody waits; False: it cannot
    unfinished: int = 0
    timer: asyncio.TimerHandle | None = None  # ends it when it has taken too long

    def __post_init__(self) -> None:
        self.unfinished = len(self.requests)
        self.names = tuple(dict.fromkeys(request.id for request in self.requests))
        self._came: list[StreamItem] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: StreamItem) -> None:
        """The next piece has come; `unfinished` knows of it."""
        waiter = self._waiter
        if piece.delta.finish_reason is None and waiter is not None and not waiter.done():  # nothing stands before it
            try:
                if self.take(piece):
                    return
            except Exception as error:  # it is this caller's alone
                self.fail(error)
                return
        self._came.append(piece)
        if (
            not (self.patient and self.unfinished)
            or piece.delta.finish_reason == "error"
            or len(self._came) >= MOST_GATHERED
        ):
            self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing comes any more."""
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def some(self) -> list[StreamItem]:
        """What has come since one asked last, or comes next; none when every text has ended. A failure is raised behind
        what came before it."""
        if not self._came and self._failure is None and self.unfinished:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        came, self._came = self._came, []
        if not came and self._failure is not None:
            raise self._failure
        return came

    async def pieces(self) -> AsyncGenerator[StreamItem, None]:
        """Until every text has ended; a failure is raised where it comes. Leaving early ends all of them."""
        try:
            while came := await self.some():
                for piece in came:
                    yield piece
        finally:
            self.close()
