"""What is asked to find out whether adapting is ever slower: cells, and how much of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.options import nearest

from .measure import Variant, default_names

ORACLE, USELESS = STAND_INS = ("oracle", "useless")
ASKED = (
    ("edit", 0.0),
    ("code", 0.0),
    ("chat", 0.0),
    ("extraction", 0.0),
    ("math", 0.0),
    ("story", 1.0),
    ("story", 1.5),
)
MAIN = ("ngram", "mix", ORACLE, USELESS)
BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class GridCell:
    """One cell: a task at a temperature, so many texts at once, and who guesses."""

    task: str
    temperature: float
    batch: int
    drafter: str

    def __str__(self) -> str:
        return f"{self.task}, T={self.temperature:g}, {self.batch} at once, {self.drafter}"


@dataclass(frozen=True)
class Extent:
    """How much of each cell: fixed lengths, prompts, output tokens, rounds until the first look and until the last."""

    lengths: tuple[int, ...] = (2, 4, 8)
    texts: int = 2  # at least; a larger batch has more
    max_tokens: int = 64
    rounds: int = 4
    most_rounds: int = 9

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise RequestError("max_tokens", f"must be 2 or more to be timed, not {self.max_tokens}")
        if not 1 <= self.rounds <= self.most_rounds:
            raise RequestError("rounds", f"must be 1 to most_rounds ({self.most_rounds}), not {self.rounds}")

    @property
    def looks(self) -> tuple[int, ...]:
        """Rounds after which a verdict is asked for: about twice as many each time. The number of looks is fixed before
        a run, for the error of a verdict is split between them."""
        found = [self.rounds]
        while 2 * found[-1] <= self.most_rounds:
            found.append(2 * found[-1])
        if len(found) == 1 and self.rounds < self.most_rounds:
            found.append(self.most_rounds)
        return *found[:-1], self.most_rounds

    def batches(self, batch: int) -> int:
        return math.ceil(self.texts / batch)


QUICK = Extent(lengths=(4,), texts=1, max_tokens=64, rounds=4, most_rounds=8)
QUICK_SCENES = tuple(
    GridCell(task, temperature, batch, drafter)
    for task, temperature, drafter in (("edit", 0.0, "ngram"), ("chat", 0.0, "mix"), ("story", 1.0, USELESS))
    for batch in (1, 4)
)


def all_scenes(kinds: Sequence[str], layers: int) -> list[GridCell]:
    """Every task with the main drafters at every batch size, and with the others alone; `kinds` are known drafters."""
    others = [name for name in default_names(kinds, layers, ()) if name not in ("auto", *MAIN)]
    return [
        GridCell(task, temperature, batch, drafter)
        for task, temperature in ASKED
        for batch in BATCHES
        for drafter in (*MAIN, *(others if batch == 1 else ()))
    ]


def chosen(
    scenes: Sequence[GridCell], tasks: Sequence[str], drafters: Sequence[str], batches: Sequence[int]
) -> list[GridCell]:
    """Those of them that a user asked for; nothing stands for all."""
    _check("tasks", tasks, [scene.task for scene in scenes])
    _check("drafters", drafters, [scene.drafter for scene in scenes])
    _check("batches", [str(batch) for batch in batches], [str(scene.batch) for scene in scenes])
    found = [
        scene
        for scene in scenes
        if (not tasks or scene.task in tasks)
        and (not drafters or scene.drafter in drafters)
        and (not batches or scene.batch in batches)
    ]
    if not found:
        raise RequestError("batches", "leave nothing to measure with these tasks and drafters")
    return found


def _check(field: str, asked: Sequence[str], known: Sequence[str]) -> None:
    for each in asked:
        if each not in known:
            raise RequestError(field, f"has no {each!r}; {nearest(each, list(dict.fromkeys(known)))}")


def adaptive_arm(drafter: str) -> Variant:
    """Who finds out how far to guess."""
    return Variant(f"{drafter}, adaptive", SpeculationConfig(drafter=drafter))


def fixed_arms(drafter: str, lengths: Sequence[int]) -> dict[int, Variant]:
    """Who always guesses so many."""
    return {
        length: Variant(
            f"{drafter}, {length} tokens", SpeculationConfig(drafter=drafter, num_speculative_tokens=length)
        )
        for length in lengths
    }


def arms_to_load(scenes: Sequence[GridCell]) -> list[Variant]:
    """What an engine must be opened with; stand-ins are made for the texts, and mix has no weights."""
    named = [scene.drafter for scene in scenes if scene.drafter not in STAND_INS]
    return [adaptive_arm(name) for name in dict.fromkeys(["mix", *named])]
