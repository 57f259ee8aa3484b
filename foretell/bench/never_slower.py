"""`bench never-slower`: measure every cell with interleaved variants, with more rounds until a cell is decided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from foretell.utils.report_table import ReportTable

from .intervals import interval, mean_of, shown
from .measure import PLAIN, Batch, BatchBackend, BatchResult, ProgressCallback, rotated
from .metrics import as_row, json_name
from .never_slower_grid import CellSettings, GridCell, adaptive_variant, fixed_variants
from .never_slower_stats import (
    ERROR_RATE,
    MIN_OF_BEST_FIXED,
    MIN_OF_PLAIN,
    CellTimes,
    NeverSlowerVerdict,
    worst_verdict,
)
from .prompt import BenchPrompt

ALL = "all"


@dataclass(frozen=True)
class NeverSlowerCell:
    """The result of one cell of the grid.

    `speedup` is the time per token of plain decoding over that of the adaptive variant: the median of pairs over
    rounds, the geometric mean over batches. `speedup_interval` is the 95% t interval over rounds, for these batches.
    `noise` is half the relative width of the interval of the smallest margin. `fixed` has the speedup of each fixed
    draft length, and `bar` is the speedup that the adaptive variant must reach.
    """

    task: str
    temperature: float
    batch: int
    drafter: str
    sequences: int = field(metadata=json_name("texts"))
    rounds: int
    tokens: int
    accepted_per_step: float
    speedup: float
    speedup_interval: tuple[float, float] | None
    noise: float | None
    fixed: dict[int, float]
    best_fixed: int
    best_fixed_speedup: float
    bar: float
    verdict: NeverSlowerVerdict
    tokens_per_second: float
    plain_tokens_per_second: float
    same_text: bool
    differing: tuple[str, ...]
    drafter_failures: int
    times: dict[str, list[list[float]]] = field(
        default_factory=dict
    )  # seconds per token of each variant by batch and round


@dataclass(frozen=True)
class NeverSlowerOverall:
    """The mean of the cells of a drafter, or of all; the verdict is the worst of them."""

    drafter: str
    cells: int
    accepted_per_step: float
    speedup: float
    speedup_interval: tuple[float, float] | None
    verdict: NeverSlowerVerdict
    same_text: bool


@dataclass(frozen=True)
class NeverSlowerResult:
    """The result of one run, and the exception that stopped it early."""

    conditions: dict[str, Any]
    cells: tuple[NeverSlowerCell, ...]
    overall: tuple[NeverSlowerOverall, ...]
    stopped: BaseException | None = None

    @property
    def verdict(self) -> NeverSlowerVerdict:
        return worst_verdict([cell.verdict for cell in self.cells])

    @property
    def same_text(self) -> bool:
        return all(cell.same_text for cell in self.cells)

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "never-slower",
            **self.conditions,
            "complete": self.stopped is None,
            "verdict": self.verdict,
            "same_text": self.same_text,
            "overall": [as_row(each) for each in self.overall],
            "cells": [as_row(cell) for cell in self.cells],
        }


@dataclass
class _CellRecord:
    """Batch results of one grid cell, by variant, batch and round. It holds complete rounds only."""

    grid_cell: GridCell
    settings: CellSettings
    batches: Sequence[Batch]
    results: dict[str, list[list[BatchResult]]] = field(default_factory=dict)

    def add(self, results: Mapping[str, Sequence[BatchResult]]) -> None:
        """Append a complete round: the results of each variant by batch."""
        before = self.results or {variant: [[] for _ in self.batches] for variant in results}
        self.results = {  # one assignment, so that an interrupt leaves complete rounds
            variant: [[*rounds, result] for rounds, result in zip(before[variant], batches, strict=True)]
            for variant, batches in results.items()
        }

    def fill(self, backend: BatchBackend) -> None:
        """Measure until an interim look decides or the last one is reached. The first round is warm-up and dropped."""
        settings = self.settings
        variants = [
            PLAIN,
            adaptive_variant(self.grid_cell.drafter),
            *fixed_variants(self.grid_cell.drafter, settings.lengths).values(),
        ]
        for number in range(settings.max_rounds + 1):
            backend.reset(variants)
            results: dict[str, list[BatchResult]] = {variant.name: [] for variant in variants}
            for index, batch in enumerate(self.batches):
                for variant in rotated(variants, index + number):
                    results[variant.name].append(backend.generate(variant, batch))
            if number:
                self.add(results)
            if number in settings.looks and self.cell_times.verdict != "inconclusive":
                break

    @property
    def cell_times(self) -> CellTimes:
        drafter = self.grid_cell.drafter
        return CellTimes(
            plain=self._times(PLAIN.name),
            adaptive=self._times(adaptive_variant(drafter).name),
            fixed={
                k: self._times(variant.name) for k, variant in fixed_variants(drafter, self.settings.lengths).items()
            },
            looks=len(self.settings.looks),
        )

    def _times(self, variant: str) -> list[list[float]]:
        return [[each.seconds_per_token for each in rounds] for rounds in self.results[variant]]

    @property
    def is_usable(self) -> bool:
        """Return whether there are rounds to compare, or an output differs from that of plain decoding."""
        return self.cell_times.rounds >= min(2, self.settings.rounds) or bool(self._differing())

    def found(self) -> tuple[NeverSlowerCell, CellTimes]:
        """Return the cell's result and the times it was computed from."""
        times = self.cell_times
        return self._cell(times), times

    def _cell(self, times: CellTimes) -> NeverSlowerCell:
        adaptive = [each for rounds in self.results[adaptive_variant(self.grid_cell.drafter).name] for each in rounds]
        plain = [each for rounds in self.results[PLAIN.name] for each in rounds]
        differing = self._differing()
        return NeverSlowerCell(
            **asdict(self.grid_cell),
            sequences=sum(map(len, self.batches)),
            rounds=times.rounds,
            tokens=sum(each.tokens for each in adaptive),
            accepted_per_step=sum(each.tokens for each in adaptive) / sum(each.steps for each in adaptive),
            speedup=times.speedup,
            speedup_interval=times.speedup_interval,
            noise=times.noise,
            fixed=times.fixed_speedups,
            best_fixed=times.best_fixed,
            best_fixed_speedup=times.fixed_speedups[times.best_fixed],
            bar=times.bar,
            verdict=times.verdict,
            tokens_per_second=1 / median(each.seconds_per_token for each in adaptive),
            plain_tokens_per_second=1 / median(each.seconds_per_token for each in plain),
            same_text=not differing,
            differing=differing,
            drafter_failures=sum(each.drafter_failures for each in adaptive),
            times={variant: self._times(variant) for variant in self.results},
        )

    def _differing(self) -> tuple[str, ...]:
        """Return the prompts and variants whose output differs from plain decoding in the same round."""
        found = [
            f"{job.prompt_id} by {variant}"
            for variant, batches in self.results.items()
            for index, rounds in enumerate(batches)
            for plain, other in zip(self.results[PLAIN.name][index], rounds, strict=True)
            for job, ours, theirs in zip(self.batches[index], plain.outputs, other.outputs, strict=True)
            if ours != theirs
        ]
        return tuple(dict.fromkeys(found))


def measure_cell(
    backend: BatchBackend, grid_cell: GridCell, items: Sequence[BenchPrompt], settings: CellSettings
) -> tuple[NeverSlowerCell, CellTimes]:
    """Measure one cell round by round, until an interim look decides or the last one is reached."""
    record = _begin(backend, grid_cell, items, settings)
    record.fill(backend)
    return record.found()


def _begin(
    backend: BatchBackend, grid_cell: GridCell, items: Sequence[BenchPrompt], settings: CellSettings
) -> _CellRecord:
    return _CellRecord(
        grid_cell,
        settings,
        backend.prepare(items, grid_cell.temperature, grid_cell.batch, settings.batches(grid_cell.batch)),
    )


def run(
    backend: BatchBackend,
    grid_cells: Sequence[GridCell],
    items: Mapping[str, Sequence[BenchPrompt]],
    settings: CellSettings,
    progress: ProgressCallback,
    conditions: dict[str, Any],
) -> NeverSlowerResult:
    """Measure every cell with the prompts of its task.

    A stopped run keeps the complete rounds, except a single round of the last cell: it would be inconclusive and make
    the result of the run inconclusive.
    """
    records: list[_CellRecord] = []
    stopped: BaseException | None = None
    try:
        for number, grid_cell in enumerate(grid_cells):
            progress(number, len(grid_cells), str(grid_cell))
            records.append(_begin(backend, grid_cell, items[grid_cell.task], settings))
            records[-1].fill(backend)
        progress(len(grid_cells), len(grid_cells), "done")
    except BaseException as error:
        stopped = error
    measured = [record for record in records if record.results]
    if stopped is not None and len(measured) > 1 and not measured[-1].is_usable:
        measured.pop()
    found = [record.found() for record in measured]
    if stopped is not None and not found:
        raise stopped  # nothing was finished
    return NeverSlowerResult(conditions, tuple(cell for cell, _ in found), tuple(summaries(found)), stopped)


def summaries(found: Sequence[tuple[NeverSlowerCell, CellTimes]]) -> list[NeverSlowerOverall]:
    """Return the mean of each drafter and of all."""
    drafters = dict.fromkeys(cell.drafter for cell, _ in found)
    groups = {name: [pair for pair in found if pair[0].drafter == name] for name in drafters} | {ALL: list(found)}
    return [_overall(name, group) for name, group in groups.items()]


def _overall(drafter: str, found: Sequence[tuple[NeverSlowerCell, CellTimes]]) -> NeverSlowerOverall:
    cells = [cell for cell, _ in found]
    looks = max(times.looks for _, times in found)
    return NeverSlowerOverall(
        drafter=drafter,
        cells=len(cells),
        accepted_per_step=fmean(cell.accepted_per_step for cell in cells),
        speedup=math.exp(fmean(math.log(cell.speedup) for cell in cells)),
        speedup_interval=interval(mean_of([times.estimate for _, times in found]), 1 - ERROR_RATE / looks),
        verdict=worst_verdict([cell.verdict for cell in cells]),
        same_text=all(cell.same_text for cell in cells),
    )


HEAD = ("task", "T", "batch", "drafter", "accepted per step", "fixed", "bar", "speedup", "verdict", "same text")


def report_table(result: NeverSlowerResult) -> ReportTable:
    """Return a table with a row for each cell and for the mean of each drafter."""
    return ReportTable(HEAD, [*map(_cell_row, result.cells), *map(_overall_row, result.overall)], words=4)


def remarks(result: NeverSlowerResult) -> list[str]:
    """Return the notes below the table."""
    count = {verdict: sum(cell.verdict == verdict for cell in result.cells) for verdict in ("slower", "inconclusive")}
    lines = [
        f"The bar is {MIN_OF_PLAIN:g} of the speed of plain decoding and {MIN_OF_BEST_FIXED:g} of that of the best "
        f"fixed length. A cell is held or slower if a one-sided {1 - ERROR_RATE:.0%} bound is on that side of its bar.",
        "Speedup: time per token of plain decoding over that of the adaptive variant, with a 95% t interval over "
        "rounds. Timed from when all sequences of a batch have their first token; prompts are in the prefix cache.",
        f"{result.verdict.upper()}: {len(result.cells)} cells, {count['slower']} below the bar, "
        f"{count['inconclusive']} inconclusive.",
    ]
    for cell in result.cells:
        where = f"{cell.drafter}, {cell.task}, T={cell.temperature:g}, batch {cell.batch}"
        if not cell.same_text:
            lines.append(f"NOT THE SAME TEXT: {where}: {'; '.join(cell.differing)}.")
        if cell.drafter_failures:
            lines.append(f"{where}: the drafter FAILED in {cell.drafter_failures} steps; see the log.")
    if result.stopped is not None:
        last = result.cells[-1].rounds
        lines.append(f"Stopped early: the table has the finished part, {last} rounds of its last cell.")
    return lines


def _cell_row(cell: NeverSlowerCell) -> list[str]:
    fixed = ", ".join(f"{length}: {speedup:.2f}" for length, speedup in cell.fixed.items() if length)
    return [
        cell.task,
        f"{cell.temperature:g}",
        str(cell.batch),
        cell.drafter,
        f"{cell.accepted_per_step:.2f}",
        fixed,
        f"{cell.bar:.2f}",
        shown(cell.speedup, cell.speedup_interval),
        cell.verdict,
        "yes" if cell.same_text else "NO",
    ]


def _overall_row(each: NeverSlowerOverall) -> list[str]:
    accepted, same = f"{each.accepted_per_step:.2f}", "yes" if each.same_text else "NO"
    ratio = shown(each.speedup, each.speedup_interval)
    return [f"mean of {each.cells}", "", "", each.drafter, accepted, "", "", ratio, each.verdict, same]
