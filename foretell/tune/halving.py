"""Successive halving: all arms for a short while, then the better third of them for longer, to the end of the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

from foretell.bench.item import Item
from foretell.bench.measure import PLAIN, Arm, Sample, Stage, Watch, measure
from foretell.bench.plan import Plan
from foretell.bench.results import Cell, summarise

KEPT = 3  # of so many arms one goes on
FINALISTS = 2
FIRST_TEXTS = 2  # of a rung's first pass; each pass has twice as many


class OutOfTime(Exception):
    """A rung's time is over; no fault of anybody's."""


@dataclass(frozen=True)
class Rung:
    """The arms that took part, how many texts each was to write, and for how long."""

    arms: tuple[Arm, ...]
    texts: int
    seconds: float


@dataclass
class Search:
    """Arms that are tried within a time. `rungs` and `samples` grow, so that one that is stopped leaves what it has."""

    stage: Stage
    arms: Sequence[Arm]
    items: Sequence[Item]
    plan: Plan
    budget: float  # seconds
    clock: Callable[[], float]
    watch: Watch
    after: Callable[[], None] = lambda: None  # called when a rung is done
    rungs: list[Rung] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of all rungs: what was seen of an arm stays seen
    _passes: int = 0

    def run(self) -> None:
        """To the end of the time."""
        end = self.clock() + self.budget
        arms, left = list(self.arms), rungs_for(len(self.arms))
        while left:
            self._climb(arms, self.clock() + (end - self.clock()) / left)
            self.after()
            left -= 1
            better = [arm for arm, _ in self.standing() if arm in arms]
            arms = better[: max(FINALISTS, math.ceil(len(arms) / KEPT))]

    def _climb(self, arms: Sequence[Arm], until: float) -> None:
        """One rung: passes over more and more texts until its time is over, of which the first is always made."""
        began, before, number = self.clock(), self._written, 0
        texts = cycle(self.items)
        try:
            while number == 0 or self.clock() < until:
                some = list(islice(texts, min(len(self.items), FIRST_TEXTS << number)))
                self._pass(arms, some, until if number else math.inf)
                number += 1
        except OutOfTime:
            pass
        finally:
            if self._written > before:
                self.rungs.append(Rung(tuple(arms), self._written - before, self.clock() - began))

    def _pass(self, arms: Sequence[Arm], items: Sequence[Item], until: float) -> None:
        """Every arm writes these texts, plain decoding among them."""
        new: list[Sample] = []

        def look(done: int, total: int, what: str) -> None:
            if done and self.clock() >= until:
                raise OutOfTime
            self.watch(done, total, f"{len(arms)} arms, {what.partition(',')[0]}")

        try:
            measure(self.stage, [PLAIN, *arms], items, replace(self.plan, rounds=1), new, look)
        finally:
            self.samples += [replace(sample, round=self._passes) for sample in new]
            self._passes += 1

    @property
    def _written(self) -> int:
        """Texts that plain decoding has written, which it does for all."""
        return sum(sample.arm == PLAIN.name for sample in self.samples)

    def standing(self) -> list[tuple[Arm, Cell]]:
        """Every arm that was timed, with all that was seen of it: who came farther first, then who is faster."""
        _, cells = summarise(self.samples, [arm.name for arm in self.arms])
        seen = {cell.arm: (cell, cell.speedup) for cell in cells if cell.speedup is not None}
        found: dict[str, tuple[Arm, Cell]] = {}
        for rung in reversed(self.rungs):
            timed = [(seen[arm.name], arm) for arm in rung.arms if arm.name in seen]
            for (cell, _), arm in sorted(timed, key=lambda pair: -pair[0][1]):
                found.setdefault(arm.name, (arm, cell))
        return list(found.values())


def rungs_for(arms: int) -> int:
    """How often arms can be thinned out before the finalists have had their turn."""
    count = 1
    while arms > FINALISTS:
        arms = max(FINALISTS, math.ceil(arms / KEPT))
        count += 1
    return count


def evidence(standing: Sequence[tuple[Arm, Cell]]) -> list[dict[str, Any]]:
    """What is known of each arm."""
    return [
        {
            "arm": arm.name,
            "drafter": arm.speculation.drafter,
            "num_speculative_tokens": arm.speculation.num_speculative_tokens,
            "rule": arm.speculation.rule,
            "speedup": cell.speedup,
            "speedup_interval": cell.speedup_interval,
            "accepted_per_step": cell.accepted_per_step,
            "same_text": cell.same_text,
            "texts": cell.texts,
            "tokens": cell.tokens,
        }
        for arm, cell in standing
    ]
