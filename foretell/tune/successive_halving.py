"""Successive halving: all arms for a short while, then the better third of them for longer, to the end of the time."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foretell.bench.intervals import shown
from foretell.bench.measure import PLAIN, Backend, Sample, Variant, Watch, measure
from foretell.bench.plan import Plan
from foretell.bench.prompt import BenchPrompt
from foretell.bench.results import ALL, Cell, Group, cell_of, grouped
from foretell.tune.search_space import AUTO, DEFAULT_RULE, serve_settings

KEPT = 3  # of so many arms one goes on
FINALISTS = 2
FIRST_TEXTS = 2  # of a rung's first pass; each pass has twice as many


class OutOfTime(Exception):
    """A rung's time is over; no fault of anybody's."""


@dataclass(frozen=True)
class Rung:
    """The arms that took part, what each wrote, and for how long."""

    variants: tuple[Variant, ...]
    samples: tuple[Sample, ...]
    seconds: float

    @property
    def num_prompts(self) -> int:
        """Texts that plain decoding wrote, which it does for all."""
        return sum(sample.arm == PLAIN.name for sample in self.samples)

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """What is seen of each arm here alone; those that went on were chosen by what was seen before."""
        return cells_by_variant(self.samples, self.variants)


@dataclass
class SuccessiveHalving:
    """Arms that are tried within a time. `rungs` grows, so that one that is stopped leaves what it has."""

    backend: Backend
    variants: Sequence[Variant]
    prompts: Sequence[BenchPrompt]
    plan: Plan
    budget: float  # seconds
    clock: Callable[[], float]
    watch: Watch
    after: Callable[[], object] = lambda: None  # called when a rung is done
    rungs: list[Rung] = field(default_factory=list)
    _passes: int = 0
    _begun: int = 0  # texts that were taken up, so that the next are others

    def run(self) -> None:
        """To the end of the time."""
        end = self.clock() + self.budget
        arms, left = list(self.variants), num_rungs(len(self.variants))
        while left:
            self._climb(arms, self.clock() + (end - self.clock()) / left)
            self.after()
            left -= 1
            arms = self._better()[: max(FINALISTS, math.ceil(len(arms) / KEPT))]

    def _climb(self, arms: Sequence[Variant], until: float) -> None:
        """One rung: passes over more and more texts until its time is over; one text is always written."""
        began, number, samples = self.clock(), 0, list[Sample]()
        try:
            while number == 0 or self.clock() < until:
                self._pass(arms, min(len(self.prompts), FIRST_TEXTS << number), until, samples)
                number += 1
        except OutOfTime:
            pass
        finally:
            if samples:
                self.rungs.append(Rung(tuple(arms), tuple(samples), self.clock() - began))

    def _pass(self, arms: Sequence[Variant], texts: int, until: float, samples: list[Sample]) -> None:
        """Every arm writes the next texts, plain decoding among them, each time in another order."""
        new: list[Sample] = []
        everybody = [PLAIN, *arms]
        random.Random(self._passes).shuffle(everybody)
        items = [self.prompts[i % len(self.prompts)] for i in range(self._begun, self._begun + texts)]

        def look(done: int, total: int, what: str) -> None:
            if done and self.clock() >= until:
                raise OutOfTime
            self._begun += done < total
            self.watch(done, total, f"{len(arms)} arms, {what.partition(',')[0]}")

        try:
            measure(self.backend, everybody, items, replace(self.plan, rounds=1), new, look)
        finally:
            samples += [replace(sample, round=self._passes) for sample in new]
            self._passes += 1

    def _better(self) -> list[Variant]:
        """The arms of the last rung, the faster ones first by all that was seen of them in any."""
        seen = {name: cell.speedup for name, cell in self._all_cells().items()}
        last = self.rungs[-1].variants if self.rungs else ()
        timed = [(speedup, arm) for arm in last if (speedup := seen.get(arm.name)) is not None]
        return [arm for _, arm in sorted(timed, key=lambda pair: -pair[0])]

    def _all_cells(self) -> dict[str, Cell]:
        samples = [sample for rung in self.rungs for sample in rung.samples]
        return cells_by_variant(samples, self.variants)

    def ranking(self) -> list[tuple[Variant, Cell]]:
        """Every arm that was timed, as its last rung saw it: who came farther first, then who is faster.

        A rung of one text tells no interval; then what was seen before counts as well.
        """
        found: dict[str, tuple[Variant, Cell]] = {}
        whole = self._all_cells()
        for rung in reversed(self.rungs):
            timed = [
                (cell.speedup, arm) for arm in rung.variants if (cell := rung.cells.get(arm.name)) and cell.speedup
            ]
            for _, arm in sorted(timed, key=lambda pair: -pair[0]):
                cell = rung.cells[arm.name]
                found.setdefault(arm.name, (arm, cell if cell.speedup_interval else whole[arm.name]))
        return list(found.values())


def cells_by_variant(samples: Sequence[Sample], arms: Sequence[Variant]) -> dict[str, Cell]:
    """Each arm over all texts alike; by task, as a bench has it, a task of one text would leave no interval."""
    groups: dict[str, list[Group]] = {}
    for group in grouped(samples, [arm.name for arm in arms]):
        groups.setdefault(group.arm, []).append(group)
    return {
        name: cell_of(replace(some[0], task=ALL, pairs=[pair for group in some for pair in group.pairs]))
        for name, some in groups.items()
    }


def num_rungs(arms: int) -> int:
    """How often arms can be thinned out before the finalists have had their turn."""
    count = 1
    while arms > FINALISTS:
        arms = max(FINALISTS, math.ceil(arms / KEPT))
        count += 1
    return count


def evidence(standing: Sequence[tuple[Variant, Cell]]) -> list[dict[str, Any]]:
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


Standing = Sequence[tuple[Variant, Cell]]


@dataclass(frozen=True)
class TuneResult:
    """The arm to serve with, and why."""

    variant: Variant
    cell: Cell | None
    summary: str


def choose_variant(standing: Standing) -> TuneResult:
    """The first that is surely faster than plain decoding, of those that came farther and are faster first."""
    # A text that differs where it must not is a fault that a bench shows; such an arm is never served.
    able = [(arm, cell) for arm, cell in standing if cell.same_text is not False and cell.speedup is not None]
    for arm, cell in able:
        if cell.speedup_interval is not None and cell.speedup_interval[0] > 1:
            ratio = shown(cell.speedup, cell.speedup_interval)
            return TuneResult(arm, cell, f"{arm.name}: {ratio} times as fast as plain decoding")
    if not able:
        return TuneResult(PLAIN, None, "plain decoding: nothing else was timed to the end; raise --budget")
    best, cell = able[0]
    ratio = shown(cell.speedup, cell.speedup_interval)
    words = f"plain decoding: the best, {best.name}, is not surely faster, {ratio}; a larger --budget may tell"
    return TuneResult(PLAIN, cell, words)


def config_text(verdict: TuneResult, standing: Standing, engine: dict[str, Any], conditions: dict[str, Any]) -> str:
    """YAML for `foretell serve --config`, with what it rests on as comments."""
    import yaml

    machine = conditions.get("machine", {})
    lines = [
        f"# {verdict.summary}.",
        f"# Found by foretell tune {conditions.get('version', '')} on {machine.get('device', 'this machine')}, "
        f"workload {conditions.get('workload')}, {conditions.get('seconds', 0):.0f} s"
        + ("." if conditions.get("complete", True) else "; stopped before the end."),
        "# Ratio to plain decoding with a 95% interval, accepted per step, texts:",
    ]
    for arm, cell in standing:
        ratio = shown(cell.speedup, cell.speedup_interval)
        lines.append(f"#   {arm.name}: {ratio}, {cell.accepted_per_step:.2f}, {cell.texts}")
    found = serve_settings(verdict.variant, engine, conditions.get("rule", DEFAULT_RULE))
    if found.get("rule") == AUTO:
        lines.append("# The rule auto is block for requests without a seed; those with one get the same text as ever.")
    return "\n".join([*lines, yaml.safe_dump(found, sort_keys=False).strip(), ""])


def table(standing: Standing, most: int = 12) -> str:
    """The arms that came farthest, as Markdown."""
    head = "| drafter | ratio to plain | accepted per step | texts | same text |\n| --- | ---: | ---: | ---: | --- |"
    rows = [
        f"| {arm.name} | {shown(cell.speedup, cell.speedup_interval)} | {cell.accepted_per_step:.2f} | {cell.texts} | "
        f"{'NO' if cell.same_text is False else 'yes' if cell.same_text else 'not promised'} |"
        for arm, cell in standing[:most]
    ]
    return "\n".join([head, *rows])


def evidence_path(config: Path) -> Path:
    """Where the evidence of a config lies."""
    return config.with_suffix(".json") if config.suffix != ".json" else config.with_suffix(".evidence.json")


def evidence_text(found: dict[str, Any]) -> str:
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n"
