"""One branch of a program's state on the backend's event loop: executes what the program appends, in order."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from .backend import GenOutput, ProgramBackend
from .expressions import BeginRole, EndRole, GenPart, Part, SelectPart, TextPart
from .position import Cancelled, Position, ProgramError
from .prompt_state import PromptState
from .settings import GenSettings


@dataclass(frozen=True)
class TextChunk:
    """A piece of a branch's text; `last` marks the end of the value `name`."""

    text: str
    name: str | None = None
    last: bool = False


class TextStream:
    """The text of a branch in chunks, for readers in other threads. It ends when it is closed."""

    def __init__(self) -> None:
        self._chunks: list[TextChunk] = []
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None

    def write(self, chunk: TextChunk) -> None:
        with self._changed:
            self._chunks.append(chunk)
            self._changed.notify_all()

    def close(self, error: Exception | None = None) -> None:
        with self._changed:
            self._closed, self._error = True, self._error or error
            self._changed.notify_all()

    def read(self, name: str | None = None) -> Iterator[str]:
        """Yield the text as it arrives, or only that of one name."""
        index = 0
        while new := self._wait_from(index):
            index += len(new)
            for chunk in new:
                if chunk.text and name in (None, chunk.name):
                    yield chunk.text
                if chunk.last and name is not None and chunk.name == name:
                    return
        if self._error is not None:
            raise self._error

    def _wait_from(self, index: int) -> list[TextChunk]:
        """Wait for chunks from `index` on; return none once the stream is closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._chunks) > index or self._closed)
            return self._chunks[index:]


@dataclass(eq=False)
class AppendPart:
    """Task: append a part from a line of the program. `value` is the result of a generation or a selection."""

    part: Part
    position: Position
    value: Future[GenOutput] = field(default_factory=Future)

    def fail(self, error: Exception) -> None:
        self.value.set_exception(error)


@dataclass(eq=False)
class ReadState:
    """Task: return the prompt once all earlier tasks are done."""

    value: Future[PromptState] = field(default_factory=Future)

    def fail(self, error: Exception) -> None:
        self.value.set_exception(error)


@dataclass(eq=False)
class ForkState:
    """Task: start other branches with the prompt so far."""

    branches: Sequence[Branch]

    def fail(self, error: Exception) -> None:
        for branch in self.branches:
            branch.fail(error)


Task = AppendPart | ReadState | ForkState


@dataclass(frozen=True)
class RunContext:
    """Backend and settings shared by all branches of a run."""

    backend: ProgramBackend
    defaults: GenSettings = GenSettings()
    streams: bool = False  # a reader wants the text while it is generated


class Branch:
    """A queue of tasks. The program's thread submits them; the coroutine `work` executes them one after the other."""

    def __init__(self, context: RunContext, seed: int | None, is_root: bool = True) -> None:
        """A branch that is not the root waits for a `ForkState` task of its parent."""
        self.context, self.seed = context, seed
        self.prompt = PromptState()
        self.failure: Exception | None = None
        self.stream = TextStream()
        self._tasks: deque[Task] = deque()
        self._lock = threading.Lock()
        self._ended = False  # the program submits no more tasks
        self._changed, self._started = asyncio.Event(), asyncio.Event()
        self._generation: asyncio.Future[GenOutput] | None = None
        if is_root:
            self._started.set()

    # Called in the program's thread.

    def submit(self, task: Task) -> None:
        """Queue a task; raise at once if the branch has failed."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            assert not self._ended, "a program that has ended submits nothing"
            self._tasks.append(task)
        self._call(self._changed.set)

    def end(self) -> None:
        """Mark that no more tasks follow."""
        with self._lock:
            self._ended = True
        self._call(self._changed.set)

    def cancel(self, reason: Exception) -> None:
        """Cancel the running generation and all queued tasks; later `submit` calls raise."""
        with self._lock:
            self.failure = self.failure or reason
        self._call(self._cancel)

    def _call(self, callback: Callable[..., object], *values: object) -> None:
        loop = self.context.backend.thread.loop
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, *values)

    # Called on the event loop.

    async def work(self) -> None:
        """Execute tasks until the program has ended or the branch has failed."""
        try:
            await self._started.wait()
            while (task := await self._next_task()) is not None:
                await self._execute(task)
        except asyncio.CancelledError:  # the backend was closed
            self.fail(Cancelled())
        self.stream.close(self.failure)

    def begin(self, prompt: PromptState) -> None:
        """Start with the parent's prompt."""
        self.prompt = prompt
        self._started.set()

    def fail(self, error: Exception) -> None:
        """Fail all queued tasks; the first error counts."""
        with self._lock:
            self.failure = self.failure or error
            tasks = list(self._tasks)
            self._tasks.clear()
        for task in tasks:
            task.fail(self.failure)
        self._started.set()

    def _cancel(self) -> None:
        self.fail(Cancelled())  # an earlier failure takes precedence
        if self._generation is not None:
            self._generation.cancel()

    async def _next_task(self) -> Task | None:
        while True:
            self._changed.clear()
            with self._lock:
                if self._tasks:
                    return self._tasks.popleft()
                if self._ended:
                    return None
            await self._changed.wait()

    async def _execute(self, task: Task) -> None:
        match task:
            case ReadState():
                task.value.set_result(self.prompt)
            case ForkState():
                for branch in task.branches:
                    branch.begin(self.prompt)
            case AppendPart():
                await self._append_part(task)

    async def _append_part(self, task: AppendPart) -> None:
        try:
            match task.part:
                case TextPart(text):
                    self._append(text)
                case BeginRole(role):
                    self.prompt = self.prompt.begin(role)
                case EndRole():
                    self.prompt = self.prompt.end()
                case GenPart() | SelectPart() as part:
                    task.value.set_result(await self._generate(part))
        except asyncio.CancelledError:
            self.fail(Cancelled())
            task.fail(self.failure or Cancelled())
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # the backend was closed, not this branch cancelled
                raise
        except Exception as error:
            self.fail(ProgramError(task.position, error))
            task.fail(self.failure or error)

    async def _generate(self, part: GenPart | SelectPart) -> GenOutput:
        """Generate or select, and append the result."""
        self._generation = asyncio.ensure_future(self._call_backend(part))
        try:
            output = await self._generation
        finally:
            self._generation = None
        was_streamed = self.context.streams and isinstance(part, GenPart)
        self._append(output.text, part.name, was_streamed)
        return output

    async def _call_backend(self, part: GenPart | SelectPart) -> GenOutput:
        backend = self.context.backend
        if isinstance(part, SelectPart):
            return await backend.select(self.prompt, part.choices)
        settings = part.settings.over(self.context.defaults).seeded(self.seed)
        on_text = (lambda text: self.stream.write(TextChunk(text, part.name))) if self.context.streams else None
        return await backend.generate(self.prompt, settings, on_text)

    def _append(self, text: str, name: str | None = None, was_streamed: bool = False) -> None:
        self.prompt = self.prompt.append(text)
        self.stream.write(TextChunk("" if was_streamed else text, name, last=True))
