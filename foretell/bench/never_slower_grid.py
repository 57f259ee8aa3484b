"""The grid of `bench never-slower`: its cells, how much of each is measured, and their variants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.options import nearest

from .measure import Variant, default_drafters

ORACLE, USELESS = SYNTHETIC = ("oracle", "useless")
TASKS = (
    ("edit", 0.0),
    ("code", 0.0),
    ("chat", 0.0),
    ("extraction", 0.0),
    ("math", 0.0),
    ("story", 1.0),
    ("story", 1.5),
)
MAIN_DRAFTERS = ("ngram", "mix", ORACLE, USELESS)
BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class GridCell:
    """A task at a temperature and batch size with a drafter."""

    task: str
    temperature: float
    batch: int
    drafter: str

    def __str__(self) -> str:
        return f"{self.task}, T={self.temperature:g}, batch {self.batch}, {self.drafter}"


@dataclass(frozen=True)
class CellSettings:
    """Extent of each cell: fixed draft lengths, sequences, output tokens, and rounds until the first and last look."""

    lengths: tuple[int, ...] = (2, 4, 8)
    min_sequences: int = 2  # a larger batch has more
    max_tokens: int = 64
    rounds: int = 4
    max_rounds: int = 9

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise RequestError("max_tokens", f"must be 2 or more to be timed, not {self.max_tokens}")
        if not 1 <= self.rounds <= self.max_rounds:
            raise RequestError("rounds", f"must be 1 to {self.max_rounds}, not {self.rounds}")

    @property
    def looks(self) -> tuple[int, ...]:
        """Return the rounds of the interim looks of a group-sequential test, each about twice the one before.

        The number of looks is fixed before a run, because the error of a verdict is split between them.
        """
        found = [self.rounds]
        while 2 * found[-1] <= self.max_rounds:
            found.append(2 * found[-1])
        if len(found) == 1 and self.rounds < self.max_rounds:
            found.append(self.max_rounds)
        return *found[:-1], self.max_rounds

    def batches(self, batch: int) -> int:
        return math.ceil(self.min_sequences / batch)


QUICK = CellSettings(lengths=(4,), min_sequences=1, max_tokens=64, rounds=4, max_rounds=8)
QUICK_CELLS = tuple(
    GridCell(task, temperature, batch, drafter)
    for task, temperature, drafter in (("edit", 0.0, "ngram"), ("chat", 0.0, "mix"), ("story", 1.0, USELESS))
    for batch in (1, 4)
)


def all_cells(kinds: Sequence[str], layers: int) -> list[GridCell]:
    """Return every task with the main drafters at every batch size and with the others at batch size 1.

    `kinds` are the known drafters.
    """
    others = [name for name in default_drafters(kinds, layers, ()) if name not in ("auto", *MAIN_DRAFTERS)]
    return [
        GridCell(task, temperature, batch, drafter)
        for task, temperature in TASKS
        for batch in BATCHES
        for drafter in (*MAIN_DRAFTERS, *(others if batch == 1 else ()))
    ]


def select_cells(
    cells: Sequence[GridCell], tasks: Sequence[str], drafters: Sequence[str], batches: Sequence[int]
) -> list[GridCell]:
    """Return the cells that a user chose; an empty choice means all."""
    _check("tasks", tasks, [cell.task for cell in cells])
    _check("drafters", drafters, [cell.drafter for cell in cells])
    _check("batches", [str(batch) for batch in batches], [str(cell.batch) for cell in cells])
    found = [
        cell
        for cell in cells
        if (not tasks or cell.task in tasks)
        and (not drafters or cell.drafter in drafters)
        and (not batches or cell.batch in batches)
    ]
    if not found:
        raise RequestError("batches", "leave no cell to measure with these tasks and drafters")
    return found


def _check(field: str, params: Sequence[str], known: Sequence[str]) -> None:
    for each in params:
        if each not in known:
            raise RequestError(field, f"has no {each!r}; {nearest(each, list(dict.fromkeys(known)))}")


def adaptive_variant(drafter: str) -> Variant:
    """Return the variant with adaptive draft length."""
    return Variant(f"{drafter}, adaptive", SpeculationConfig(drafter=drafter))


def fixed_variants(drafter: str, lengths: Sequence[int]) -> dict[int, Variant]:
    """Return a variant for each fixed draft length."""
    return {
        length: Variant(
            f"{drafter}, {length} tokens", SpeculationConfig(drafter=drafter, num_speculative_tokens=length)
        )
        for length in lengths
    }


def variants_to_load(cells: Sequence[GridCell]) -> list[Variant]:
    """Return the variants whose drafters the engine must load; synthetic drafters are built per batch."""
    named = [cell.drafter for cell in cells if cell.drafter not in SYNTHETIC]
    return [adaptive_variant(name) for name in dict.fromkeys(["mix", *named])]
