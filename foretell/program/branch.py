"""One text of a program, on the backend's loop: does what was asked of it, in order."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from .backend import Backend, Written
from .expressions import Begin, End, Gen, Part, Select, Text
from .position import Cancelled, Place, ProgramError
from .prompt_state import Script
from .settings import Settings


@dataclass(frozen=True)
class Piece:
    """Some text; `name` is whose, where it has one, and `last` says that this is all of that."""

    text: str
    name: str | None = None
    last: bool = False


class Transcript:
    """Grows until it is closed, with the error that ended it where there was one."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None

    def write(self, piece: Piece) -> None:
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify_all()

    def close(self, error: Exception | None = None) -> None:
        with self._changed:
            self._closed, self._error = True, self._error or error
            self._changed.notify_all()

    def read(self, name: str | None = None) -> Iterator[str]:
        """All of it as it comes, or what was written under one name."""
        place = 0
        while new := self._behind(place):
            place += len(new)
            for piece in new:
                if piece.text and name in (None, piece.name):
                    yield piece.text
                if piece.last and name is not None and piece.name == name:
                    return
        if self._error is not None:
            raise self._error

    def _behind(self, place: int) -> list[Piece]:
        """What comes from a place on, as soon as there is some; nothing when that will never be."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pieces) > place or self._closed)
            return self._pieces[place:]


@dataclass(eq=False)
class Step:
    """A part to be added at a line of the program. `value` is what comes of a generation or a choice."""

    part: Part
    place: Place
    value: Future[Written] = field(default_factory=Future)

    def fail(self, error: Exception) -> None:
        self.value.set_exception(error)


@dataclass(eq=False)
class Look:
    """Somebody wants to know what the text is when it has come this far."""

    value: Future[Script] = field(default_factory=Future)

    def fail(self, error: Exception) -> None:
        self.value.set_exception(error)


@dataclass(eq=False)
class Split:
    """Here other texts begin with what this one says so far."""

    branches: Sequence[Branch]

    def fail(self, error: Exception) -> None:
        for branch in self.branches:
            branch.fail(error)


Task = Step | Look | Split


@dataclass(frozen=True)
class Manner:
    """How all texts of a run are written."""

    backend: Backend
    defaults: Settings = Settings()
    streams: bool = False  # whether somebody reads along


class Branch:
    """Tasks come from the program's thread through `ask`; the coroutine `work` does them, one after the other."""

    def __init__(self, manner: Manner, seed: int | None, begins: bool = True) -> None:
        """Where it does not begin itself, it waits for a `Split` of another text."""
        self.manner, self.seed = manner, seed
        self.script = Script()
        self.failure: Exception | None = None
        self.transcript = Transcript()
        self._tasks: deque[Task] = deque()
        self._lock = threading.Lock()
        self._over = False  # nothing more will be asked
        self._news, self._begun = asyncio.Event(), asyncio.Event()
        self._writing: asyncio.Future[Written] | None = None
        if begins:
            self._begun.set()

    # In the program's thread.

    def ask(self, task: Task) -> None:
        """Have something done behind what was asked before. A text that has failed says so at once."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            assert not self._over, "a program that has ended asks for nothing"
            self._tasks.append(task)
        self._call(self._news.set)

    def end(self) -> None:
        """Nothing more will be asked."""
        with self._lock:
            self._over = True
        self._call(self._news.set)

    def cancel(self, reason: Exception) -> None:
        """Give up what is being written and all that was asked for. From now on nothing can be asked."""
        with self._lock:
            self.failure = self.failure or reason
        self._call(self._cancel)

    def _call(self, what: Callable[..., object], *values: object) -> None:
        loop = self.manner.backend.thread.loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(what, *values)

    # On the loop.

    async def work(self) -> None:
        """Until the program has ended and all it asked for is done, or cannot be."""
        try:
            await self._begun.wait()
            while (task := await self._next()) is not None:
                await self._do(task)
        except asyncio.CancelledError:  # the backend was closed
            self.fail(Cancelled())
        self.transcript.close(self.failure)

    def begin(self, script: Script) -> None:
        """The other text has come to where this one begins."""
        self.script = script
        self._begun.set()

    def fail(self, error: Exception) -> None:
        """Nothing of what is left can be done, and nothing that would be asked; the first error counts."""
        with self._lock:
            self.failure = self.failure or error
            left = list(self._tasks)
            self._tasks.clear()
        for task in left:
            task.fail(self.failure)
        self._begun.set()

    def _cancel(self) -> None:
        self.fail(Cancelled())  # what is known already goes before it
        if self._writing is not None:
            self._writing.cancel()

    async def _next(self) -> Task | None:
        while True:
            self._news.clear()
            with self._lock:
                if self._tasks:
                    return self._tasks.popleft()
                if self._over:
                    return None
            await self._news.wait()

    async def _do(self, task: Task) -> None:
        match task:
            case Look():
                task.value.set_result(self.script)
            case Split():
                for branch in task.branches:
                    branch.begin(self.script)
            case Step():
                await self._step(task)

    async def _step(self, step: Step) -> None:
        try:
            match step.part:
                case Text(text):
                    self._add(text)
                case Begin(role):
                    self.script = self.script.begin(role)
                case End():
                    self.script = self.script.end()
                case Gen() | Select() as part:
                    step.value.set_result(await self._written(part))
        except asyncio.CancelledError:
            self.fail(Cancelled())
            step.fail(self.failure or Cancelled())
            closing = asyncio.current_task()
            if closing is not None and closing.cancelling():  # it is not the text that was cancelled
                raise
        except Exception as error:
            self.fail(ProgramError(step.place, error))
            step.fail(self.failure or error)

    async def _written(self, part: Gen | Select) -> Written:
        """What comes of a generation or a choice, once it has entered the text."""
        self._writing = asyncio.ensure_future(self._write(part))
        try:
            written = await self._writing
        finally:
            self._writing = None
        told = self.manner.streams and isinstance(part, Gen)
        self._add(written.text, part.name, told)
        return written

    async def _write(self, part: Gen | Select) -> Written:
        backend = self.manner.backend
        if isinstance(part, Select):
            return await backend.select(self.script, part.choices)
        settings = part.settings.over(self.manner.defaults).seeded(self.seed)
        tell = (lambda text: self.transcript.write(Piece(text, part.name))) if self.manner.streams else None
        return await backend.write(self.script, settings, tell)

    def _add(self, text: str, name: str | None = None, told: bool = False) -> None:
        self.script = self.script.append(text)
        self.transcript.write(Piece("" if told else text, name, last=True))
