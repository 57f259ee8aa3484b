"""Successive halving (Jamieson and Talwalkar 2016): all variants briefly, then the best third for longer.

The time budget is split evenly over the rungs. The result is a config file with its evidence.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foretell.bench.intervals import INTERVAL, compared, shown
from foretell.bench.measure import PLAIN, BenchBackend, ProgressCallback, Sample, Variant, measure
from foretell.bench.prompt import BenchPrompt
from foretell.bench.results import ALL, PairGroup, TaskCell, group_pairs, task_cell
from foretell.bench.settings import BenchSettings
from foretell.tune.search_space import AUTO, DEFAULT_RULE, serve_settings
from foretell.utils.report_table import ReportTable

KEEP_ONE_IN = 3  # variants of a rung that go on to the next: 1 in 3
FINALISTS = 2  # variants of the last rung
FIRST_PROMPTS = 2  # of the first pass of a rung; each further pass has twice as many


class OutOfTime(Exception):
    """Raised when the time of a rung is over."""


@dataclass(frozen=True)
class Rung:
    """One round of successive halving: its variants and their samples."""

    variants: tuple[Variant, ...]
    samples: tuple[Sample, ...]
    seconds: float

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts, each of which plain decoding has run."""
        return sum(sample.variant == PLAIN.name for sample in self.samples)

    @cached_property
    def cells(self) -> dict[str, TaskCell]:
        """Return the results of this rung alone, since earlier ones are biased by the selection."""
        return cells_by_variant(self.samples, self.variants)


@dataclass
class SuccessiveHalving:
    """A search within a time budget. `rungs` grows, so that an interrupted search keeps its results."""

    backend: BenchBackend
    variants: Sequence[Variant]
    prompts: Sequence[BenchPrompt]
    settings: BenchSettings
    budget: float  # seconds
    clock: Callable[[], float]
    watch: ProgressCallback
    after: Callable[[], object] = lambda: None  # called after each rung
    rungs: list[Rung] = field(default_factory=list)
    _passes: int = 0
    _num_prompts: int = 0  # prompts used so far, so that the next pass uses others

    def run(self) -> None:
        """Run all rungs within the budget."""
        end = self.clock() + self.budget
        variants, left = list(self.variants), num_rungs(len(self.variants))
        while left:
            self._run_rung(variants, self.clock() + (end - self.clock()) / left)
            self.after()
            left -= 1
            variants = self._best_variants()[: max(FINALISTS, math.ceil(len(variants) / KEEP_ONE_IN))]

    def _run_rung(self, variants: Sequence[Variant], until: float) -> None:
        """Run passes over more and more prompts until the time is over; at least one prompt."""
        began, number, samples = self.clock(), 0, list[Sample]()
        try:
            while number == 0 or self.clock() < until:
                self._run_pass(variants, min(len(self.prompts), FIRST_PROMPTS << number), until, samples)
                number += 1
        except OutOfTime:
            pass
        finally:
            if samples:
                self.rungs.append(Rung(tuple(variants), tuple(samples), self.clock() - began))

    def _run_pass(self, variants: Sequence[Variant], num_prompts: int, until: float, samples: list[Sample]) -> None:
        """Run the next prompts with plain decoding and every variant, in a new order."""
        new: list[Sample] = []
        in_order = [PLAIN, *variants]
        random.Random(self._passes).shuffle(in_order)
        items = [self.prompts[i % len(self.prompts)] for i in range(self._num_prompts, self._num_prompts + num_prompts)]

        def check_time(done: int, total: int, what: str) -> None:
            if done and self.clock() >= until:
                raise OutOfTime
            self._num_prompts += done < total
            self.watch(done, total, f"{len(variants)} variants, {what.partition(',')[0]}")

        try:
            measure(self.backend, in_order, items, replace(self.settings, rounds=1), new, check_time)
        finally:
            samples += [replace(sample, round=self._passes) for sample in new]
            self._passes += 1

    def _best_variants(self) -> list[Variant]:
        """Return the variants of the last rung, fastest first by their samples in all rungs."""
        seen = {name: cell.speedup for name, cell in self._all_cells().items()}
        last = self.rungs[-1].variants if self.rungs else ()
        timed = [(speedup, variant) for variant in last if (speedup := seen.get(variant.name)) is not None]
        return [variant for _, variant in sorted(timed, key=lambda pair: -pair[0])]

    def _all_cells(self) -> dict[str, TaskCell]:
        samples = [sample for rung in self.rungs for sample in rung.samples]
        return cells_by_variant(samples, self.variants)

    def ranking(self) -> list[tuple[Variant, TaskCell]]:
        """Return every measured variant with the results of its last rung, later rungs first, then fastest first.

        A rung with a single prompt has no confidence interval; then all rungs count.
        """
        found: dict[str, tuple[Variant, TaskCell]] = {}
        overall = self._all_cells()
        for rung in reversed(self.rungs):
            timed = [
                (cell.speedup, variant)
                for variant in rung.variants
                if (cell := rung.cells.get(variant.name)) and cell.speedup
            ]
            for _, variant in sorted(timed, key=lambda pair: -pair[0]):
                cell = rung.cells[variant.name]
                found.setdefault(variant.name, (variant, cell if cell.speedup_interval else overall[variant.name]))
        return list(found.values())


def cells_by_variant(samples: Sequence[Sample], variants: Sequence[Variant]) -> dict[str, TaskCell]:
    """Return the results of each variant over all prompts.

    A bench groups them by task, where a task with one prompt has no confidence interval.
    """
    groups: dict[str, list[PairGroup]] = {}
    for group in group_pairs(samples, [variant.name for variant in variants]):
        groups.setdefault(group.variant, []).append(group)
    return {
        name: task_cell(replace(own[0], task=ALL, pairs=[pair for group in own for pair in group.pairs]))
        for name, own in groups.items()
    }


def num_rungs(num_variants: int) -> int:
    """Return the number of rungs until the finalists have run."""
    count = 1
    while num_variants > FINALISTS:
        num_variants = max(FINALISTS, math.ceil(num_variants / KEEP_ONE_IN))
        count += 1
    return count


def evidence(ranking: Sequence[tuple[Variant, TaskCell]]) -> list[dict[str, Any]]:
    """Return the results of each variant as JSON."""
    return [
        {
            "arm": variant.name,
            "drafter": variant.speculation.drafter,
            "num_speculative_tokens": variant.speculation.num_speculative_tokens,
            "rule": variant.speculation.rule,
            "speedup": cell.speedup,
            "speedup_interval": cell.speedup_interval,
            "accepted_per_step": cell.accepted_per_step,
            "same_text": cell.same_text,
            "texts": cell.sequences,
            "tokens": cell.tokens,
        }
        for variant, cell in ranking
    ]


Ranking = Sequence[tuple[Variant, TaskCell]]


@dataclass(frozen=True)
class TuneResult:
    """The variant to serve with, and why."""

    variant: Variant
    cell: TaskCell | None
    summary: str


def choose_variant(ranking: Ranking) -> TuneResult:
    """Return the first ranked variant whose 95% interval is faster than plain decoding, or else plain decoding."""
    # A variant whose output differs from plain decoding where it must not is faulty and never chosen.
    valid = [(variant, cell) for variant, cell in ranking if cell.same_text is not False and cell.speedup is not None]
    for variant, cell in valid:
        if cell.speedup_interval is not None and cell.speedup_interval[0] > 1:
            ratio = shown(cell.speedup, cell.speedup_interval)
            return TuneResult(variant, cell, f"{variant.name}: {ratio} times the speed of plain decoding")
    if not valid:
        return TuneResult(PLAIN, None, "plain decoding: no variant was measured completely; raise --budget")
    best, cell = valid[0]
    ratio = shown(cell.speedup, cell.speedup_interval)
    summary = f"plain decoding: the best variant, {best.name}, is not significantly faster, {ratio}; raise --budget"
    return TuneResult(PLAIN, cell, summary)


def config_text(result: TuneResult, ranking: Ranking, engine: dict[str, Any], conditions: dict[str, Any]) -> str:
    """Return YAML for `foretell serve --config`, with the evidence as comments."""
    import yaml

    machine = conditions.get("machine", {})
    lines = [
        f"# {result.summary}.",
        f"# Found by foretell tune {conditions.get('version', '')} on {machine.get('device', 'this machine')}, "
        f"workload {conditions.get('workload')}, {conditions.get('seconds', 0):.0f} s"
        + ("." if conditions.get("complete", True) else "; interrupted."),
        "# Speedup over plain decoding with its 95% interval, accepted tokens per step, prompts:",
    ]
    for variant, cell in ranking:
        ratio = shown(cell.speedup, cell.speedup_interval)
        lines.append(f"#   {variant.name}: {ratio}, {cell.accepted_per_step:.2f}, {cell.sequences}")
    found = serve_settings(result.variant, engine, conditions.get("rule", DEFAULT_RULE))
    if found.get("rule") == AUTO:
        lines.append("# The rule auto is block for requests without a seed; those with one keep their output.")
    return "\n".join([*lines, yaml.safe_dump(found, sort_keys=False).strip(), ""])


SAME_OUTPUT = {True: "yes", False: "NO", None: "not guaranteed"}


def report_table(ranking: Ranking, most: int = 12) -> ReportTable:
    """Return the top of the ranking."""
    rows = [
        [
            variant.name,
            *compared(cell.speedup, cell.speedup_interval),
            f"{cell.accepted_per_step:.2f}",
            str(cell.sequences),
            SAME_OUTPUT[cell.same_text],
        ]
        for variant, cell in ranking[:most]
    ]
    return ReportTable(("drafter", "speedup", INTERVAL, "accepted per step", "prompts", "same output"), rows)


def evidence_path(config: Path) -> Path:
    """Return the path of the evidence of a config file."""
    return config.with_suffix(".json") if config.suffix != ".json" else config.with_suffix(".evidence.json")


def evidence_text(found: dict[str, Any]) -> str:
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n"
