"""What a program holds: a text that grows, and the values in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from foretell.errors import RequestError
from foretell.options import nearest

from .backend import Written
from .branch import Branch, Look, Split, Step
from .expressions import Expression, Gen, Select, expression
from .forks import Forks
from .position import asking_place
from .prompt_state import Script
from .run import Run

Settled = Written | None | list["Settled"]  # None: what a branch does not have, because it failed or never asked
Value = Future[Written] | list[Settled]


class ProgramState:
    """`s += ...` adds to the text and returns at once; `s[name]` waits for a value."""

    def __init__(self, run: Run, branch: Branch, values: dict[str, Value] | None = None) -> None:
        self.ret_value: Any = None  # what the program returned
        self._run, self._branch = run, branch
        self._values: dict[str, Value] = values or {}
        self._own: dict[str, None] = {}  # of them, those that it did not begin with
        self._forks = 0

    def execute(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run a program on this state to its end."""
        self.ret_value = self._run.execute(program, self, *args, **kwargs)

    @property
    def seed(self) -> int | None:
        """That of its generations, where the run has one."""
        return self._branch.seed

    def __iadd__(self, other: str | Expression) -> ProgramState:
        place = asking_place()
        for part in expression(other).parts:
            step = Step(part, place)
            if isinstance(part, Gen | Select):
                self._run.count(place)
            self._branch.ask(step)
            if isinstance(part, Gen | Select) and part.name is not None:
                self._keep(part.name, step.value)
        return self

    def _keep(self, name: str, value: Value) -> None:
        self._values[name] = value
        self._own[name] = None

    def __getitem__(self, name: str) -> Any:
        """The text of a generation or a choice; of names that `join` gathered, one for each branch."""
        return _texts(self._value(name))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get_meta_info(self, name: str) -> Any:
        """What is known of a value: tokens, how it ended, its seed, what was guessed; of a choice all mean scores."""
        return _metas(self._value(name))

    def _value(self, name: str) -> Value:
        if name not in self._values:
            self._wait_outside()
        if name not in self._values:
            if self._branch.failure is not None:
                raise self._branch.failure
            raise KeyError(f"this state has no {name!r}; {nearest(name, self._values)}")
        return self._values[name]

    def fork(self, size: int = 1) -> Forks:
        """So many states that begin with this text, and go on side by side."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RequestError("fork", f"must be 1 branch or more, not {size!r}")
        self._run.count(asking_place(), size)
        branches = [Branch(self._branch.manner, self._next_seed(), begins=False) for _ in range(size)]
        self._branch.ask(Split(branches))
        for branch in branches:
            self._run.start(branch)
        return Forks(self, [ProgramState(self._run, branch, dict(self._values)) for branch in branches])

    def _next_seed(self) -> int | None:
        """Branches draw apart from each other and from this text."""
        self._forks += 1
        if self.seed is None:
            return None
        from foretell.sampling.noise import derive_seed  # brings torch

        return derive_seed(self.seed, self._forks)

    def gather(self, branches: Sequence[ProgramState]) -> None:
        """Wait for branches, and take over what they wrote since they were forked, as lists."""
        for branch in branches:
            branch.error()  # once all it was asked for is done; a branch that failed keeps its reason
        names = dict.fromkeys(name for branch in branches for name in branch._own)
        for name in names:
            self._keep(name, [branch.settled(name) for branch in branches])

    def settled(self, name: str) -> Settled:
        """A value of its own once it is there; None where it will never be."""
        value = self._values[name] if name in self._own else None
        if not isinstance(value, Future):
            return value
        return None if value.exception() is not None else value.result()

    def text(self) -> str:
        """All of it so far; a chat as its template writes it."""
        script = self._script()
        backend = self._branch.manner.backend
        return backend.thread.run(backend.render(script)) if script.is_chat else script.text

    def messages(self) -> list[dict[str, str]]:
        """The turns of a chat so far."""
        return [message.as_json() for message in self._script().messages]

    def sync(self) -> None:
        """Wait for all that was asked so far."""
        self._script()

    def _script(self) -> Script:
        self._wait_outside()
        if self._run.over.is_set():
            if self._branch.failure is not None:
                raise self._branch.failure
            return self._branch.script
        look = Look()
        self._branch.ask(look)
        return look.value.result()

    def _wait_outside(self) -> None:
        """Who is not the program itself cannot know how far it will come, and waits for its end."""
        if threading.get_ident() != self._run.thread:
            self._run.over.wait()

    def error(self) -> Exception | None:
        """Why this text could not go on, if it could not, once all is done that was asked so far."""
        with suppress(Exception):  # that is the failure
            self.sync()
        return self._branch.failure

    def cancel(self) -> None:
        """End the whole run, and free what it holds."""
        self._run.cancel()

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text as it comes, or the one value `name`; of a chat the turns' own words."""
        return self._branch.transcript.read(name)

    async def text_async_iter(self, name: str | None = None) -> AsyncIterator[str]:
        """The same for an event loop."""
        pieces = self.text_iter(name)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece


def _texts(value: Value | Settled) -> Any:
    match value:
        case None:
            return None
        case list():
            return [_texts(each) for each in value]
        case Written(text):
            return text
    return value.result().text


def _metas(value: Value | Settled) -> Any:
    match value:
        case None:
            return None
        case list():
            return [_metas(each) for each in value]
        case Written(_, meta):
            return meta
    return value.result().meta
