"""What a controller is told at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from foretell.types import Sequence

TREE_ROWS = 256  # of all texts' trees in one step: more rows than that cost what they are on any machine


class Presence(Protocol):
    """Which drafters are away, because their memory was given back, and a way to call them."""

    @property
    def unavailable(self) -> frozenset[str]: ...

    def request_load(self, name: str) -> None: ...


class AllHere:
    """Drafters that never leave."""

    unavailable: frozenset[str] = frozenset()

    def request_load(self, name: str) -> None:
        """Nobody is away."""


@dataclass(frozen=True)
class ControllerSettings:
    """How the controller may act. `fixed` gives the nodes for a batch of so many, where lengths are not adapted."""

    most: int = 16
    fixed: Callable[[int], int] | None = None
    throughput: bool = False
    shortest: int = 0  # drafts of fewer nodes are not checked
    margin: float = 0.01
    tree: int = 0  # the most nodes of a tree for one text; 0: drafters that are asked make chains

    def cap(self, seq: Sequence) -> int:
        """The most that may be guessed for a text."""
        wanted = seq.request.speculation.max_draft
        most = self.most if wanted is None else min(self.most, wanted)
        room = seq.remaining_tokens - 1  # the step adds a token of its own
        return max(0, most if most < room else room)

    def tree_cap(self, seq: Sequence, writers: int) -> int:
        """The most nodes of a tree for a text, one of so many that are written; its branches are as long as `cap`."""
        wanted = seq.request.speculation.max_draft
        most = min(self.tree, TREE_ROWS // writers)
        return most if wanted is None else min(most, wanted)
