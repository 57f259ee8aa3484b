"""The state of a program: its growing prompt, its named values, and its forks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from foretell.errors import RequestError
from foretell.options import nearest

from .backend import GenOutput
from .branch import AppendPart, Branch, ForkState, ReadState
from .expressions import Expression, GenPart, SelectPart, as_expression
from .position import caller_position
from .prompt_state import PromptState
from .run import ProgramRun

Addition = str | Expression


class Forks:
    """Forked states. `forks += ...` appends to all of them, a list one item to each; they generate as one batch."""

    def __init__(self, parent: ProgramState, branches: list[ProgramState]) -> None:
        self._parent, self._branches = parent, branches

    def __iadd__(self, other: Addition | Sequence[Addition]) -> Forks:
        each = [other] * len(self) if isinstance(other, str | Expression) else list(other)
        if len(each) != len(self):
            raise RequestError(
                "forks", f"has {len(self)} branches and got {len(each)} items; give one, or one per branch"
            )
        for branch, addition in zip(self._branches, each, strict=True):
            branch += addition  # noqa: PLW2901 - += returns the same state
        return self

    def __len__(self) -> int:
        return len(self._branches)

    def __getitem__(self, index: int) -> ProgramState:
        return self._branches[index]

    def __setitem__(self, index: int, branch: ProgramState) -> None:
        """Allow `forks[i] += ...`, which assigns the same state back."""
        if branch is not self._branches[index]:
            raise RequestError("forks", "has fixed branches; append to them with +=")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._branches)

    def join(self) -> None:
        """Wait for all branches and add their named values to the parent state, as lists.

        A branch that failed or never generated a name has None in its list; its `error()` has the reason. The other
        branches are not affected.
        """
        self._parent.gather(self._branches)


JoinedValue = GenOutput | None | list["JoinedValue"]  # None: the branch failed or never generated it
Value = Future[GenOutput] | list[JoinedValue]


class ProgramState:
    """`s += ...` appends and returns at once; `s[name]` waits for a value."""

    def __init__(self, run: ProgramRun, branch: Branch, values: dict[str, Value] | None = None) -> None:
        self.ret_value: Any = None  # the return value of the program
        self._run, self._branch = run, branch
        self._values: dict[str, Value] = values or {}
        self._own: dict[str, None] = {}  # names generated on this branch, in order
        self._forks = 0

    def execute(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run a program on this state."""
        self.ret_value = self._run.execute(program, self, *args, **kwargs)

    @property
    def seed(self) -> int | None:
        """Return the seed of its generations, if the run has one."""
        return self._branch.seed

    def __iadd__(self, other: str | Expression) -> ProgramState:
        position = caller_position()
        for part in as_expression(other).parts:
            task = AppendPart(part, position)
            if isinstance(part, GenPart | SelectPart):
                self._run.count(position)
            self._branch.submit(task)
            if isinstance(part, GenPart | SelectPart) and part.name is not None:
                self._store(part.name, task.value)
        return self

    def _store(self, name: str, value: Value) -> None:
        self._values[name] = value
        self._own[name] = None

    def __getitem__(self, name: str) -> Any:
        """Return the text of a generation or a selection; a list with one text per branch after `join`."""
        return _text_of(self._value(name))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get_meta_info(self, name: str) -> Any:
        """Return a value's metadata: tokens, finish reason, seed and draft tokens; of a selection all mean scores."""
        return _meta_of(self._value(name))

    def _value(self, name: str) -> Value:
        if name not in self._values:
            self._wait_outside()
        if name not in self._values:
            if self._branch.failure is not None:
                raise self._branch.failure
            raise KeyError(f"this state has no {name!r}; {nearest(name, self._values)}")
        return self._values[name]

    def fork(self, size: int = 1) -> Forks:
        """Fork the state into `size` branches that continue from the prompt so far."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RequestError("fork", f"must be 1 or more, not {size!r}")
        self._run.count(caller_position(), size)
        branches = [Branch(self._branch.context, self._next_seed(), is_root=False) for _ in range(size)]
        self._branch.submit(ForkState(branches))
        for branch in branches:
            self._run.start(branch)
        return Forks(self, [ProgramState(self._run, branch, dict(self._values)) for branch in branches])

    def _next_seed(self) -> int | None:
        """Return a seed that differs from this state's and from those of other branches."""
        self._forks += 1
        if self.seed is None:
            return None
        from foretell.sampling.noise import derive_seed  # imports torch

        return derive_seed(self.seed, self._forks)

    def gather(self, branches: Sequence[ProgramState]) -> None:
        """Wait for branches and collect their new values as lists."""
        for branch in branches:
            branch.error()  # waits; a failed branch keeps its error
        names = dict.fromkeys(name for branch in branches for name in branch._own)
        for name in names:
            self._store(name, [branch.joined_value(name) for branch in branches])

    def joined_value(self, name: str) -> JoinedValue:
        """Return a finished value of this branch, None if it failed or was never generated."""
        value = self._values[name] if name in self._own else None
        if not isinstance(value, Future):
            return value
        return None if value.exception() is not None else value.result()

    def text(self) -> str:
        """Return the prompt so far; a chat with the chat template applied."""
        prompt = self._prompt()
        backend = self._branch.context.backend
        return backend.thread.run(backend.render(prompt)) if prompt.is_chat else prompt.text

    def messages(self) -> list[dict[str, str]]:
        """Return the finished turns of a chat."""
        return [message.as_json() for message in self._prompt().messages]

    def sync(self) -> None:
        """Wait for everything appended so far."""
        self._prompt()

    def _prompt(self) -> PromptState:
        self._wait_outside()
        if self._run.over.is_set():
            if self._branch.failure is not None:
                raise self._branch.failure
            return self._branch.prompt
        task = ReadState()
        self._branch.submit(task)
        return task.value.result()

    def _wait_outside(self) -> None:
        """Wait for the end of the run, unless called by the program itself."""
        if threading.get_ident() != self._run.thread:
            self._run.over.wait()

    def error(self) -> Exception | None:
        """Wait for everything appended so far and return the error of this branch, if any."""
        with suppress(Exception):  # it is in `failure`
            self.sync()
        return self._branch.failure

    def cancel(self) -> None:
        """Cancel the run with all its branches."""
        self._run.cancel()

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """Yield the text as it is generated, or only the value `name`; of a chat the turns' content."""
        return self._branch.stream.read(name)

    async def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]:
        """Yield what `text_iter` yields, in an event loop."""
        chunks = self.text_iter(name)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk


def _text_of(value: Value | JoinedValue) -> Any:
    match value:
        case None:
            return None
        case list():
            return [_text_of(each) for each in value]
        case GenOutput(text):
            return text
    return value.result().text


def _meta_of(value: Value | JoinedValue) -> Any:
    match value:
        case None:
            return None
        case list():
            return [_meta_of(each) for each in value]
        case GenOutput(_, meta):
            return meta
    return value.result().meta
