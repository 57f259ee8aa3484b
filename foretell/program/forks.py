"""Branches of a state, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from foretell.errors import RequestError

from .expressions import Expression

if TYPE_CHECKING:
    from .state import ProgramState

Addition = str | Expression


class Forks:
    """`forks += ...` adds to all branches, a list to each its own; what they generate is one batch."""

    def __init__(self, parent: ProgramState, branches: list[ProgramState]) -> None:
        self._parent, self._branches = parent, branches

    def __iadd__(self, other: Addition | Sequence[Addition]) -> Forks:
        each = [other] * len(self) if isinstance(other, str | Expression) else list(other)
        if len(each) != len(self):
            raise RequestError("forks", f"has {len(self)} branches and gets {len(each)} texts; give one, or one each")
        for branch, addition in zip(self._branches, each, strict=True):
            branch += addition  # noqa: PLW2901 - the same state
        return self

    def __len__(self) -> int:
        return len(self._branches)

    def __getitem__(self, place: int) -> ProgramState:
        return self._branches[place]

    def __setitem__(self, place: int, branch: ProgramState) -> None:
        """For `forks[i] += ...`, which puts back what it took."""
        if branch is not self._branches[place]:
            raise RequestError("forks", "keeps its branches; add to them with +=")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._branches)

    def join(self) -> None:
        """Wait for all branches. What they wrote under names is then in the state they came from, as lists.

        A branch that failed or did not write a name has None there; one that failed has its `error()` as well, and
        the others have lost nothing.
        """
        self._parent.gather(self._branches)
