"""Every cell in turn: arms interleaved, with more rounds where the first ones do not decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from foretell.bench.intervals import interval, mean_of, shown
from foretell.bench.measure import PLAIN, Batch, BatchBackend, BatchResult, Watch, rotated
from foretell.bench.never_slower_grid import Extent, GridCell, adaptive_arm, fixed_arms
from foretell.bench.never_slower_stats import BEST_SHARE, ERROR, PLAIN_SHARE, Contest, Verdict, worst
from foretell.bench.prompt import BenchPrompt

ALL = "all"


@dataclass(frozen=True)
class Cell:
    """What was found for one scene.

    `speedup` is plain decoding's time a token over that of the adaptive arm: over rounds the median of pairs, over
    batches the geometric mean. `speedup_interval` is the 95% t interval over rounds, for these batches. `noise` is
    half the width of the one for the margin that is hardest to keep, as a share. `fixed` has the speedup of each fixed
    length.
    """

    task: str
    temperature: float
    batch: int
    drafter: str
    texts: int
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
    verdict: Verdict
    tokens_per_second: float
    plain_tokens_per_second: float
    same_text: bool
    differing: tuple[str, ...]
    drafter_failures: int
    times: dict[str, list[list[float]]] = field(default_factory=dict)  # of each arm: seconds a token by batch and round


@dataclass(frozen=True)
class Overall:
    """The mean of a drafter's cells, or of all; the verdict is the worst of them."""

    drafter: str
    cells: int
    accepted_per_step: float
    speedup: float
    speedup_interval: tuple[float, float] | None
    verdict: Verdict
    same_text: bool


@dataclass(frozen=True)
class Findings:
    """All that one run found, and what ended it before its time."""

    conditions: dict[str, Any]
    cells: tuple[Cell, ...]
    overall: tuple[Overall, ...]
    stopped: BaseException | None = None

    @property
    def verdict(self) -> Verdict:
        return worst([cell.verdict for cell in self.cells])

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
            "overall": [asdict(each) for each in self.overall],
            "cells": [asdict(cell) for cell in self.cells],
        }


@dataclass
class _Record:
    """What the arms of one scene wrote, round by round: for each arm a list for each batch. A round that was broken off
    is none."""

    scene: GridCell
    extent: Extent
    batches: Sequence[Batch]
    written: dict[str, list[list[BatchResult]]] = field(default_factory=dict)

    def add(self, written: Mapping[str, Sequence[BatchResult]]) -> None:
        """One more round: of each arm what it wrote for each batch."""
        before = self.written or {arm: [[] for _ in self.batches] for arm in written}
        self.written = {  # all at once: whoever stops a run may do so here
            arm: [[*rounds, together] for rounds, together in zip(before[arm], batches, strict=True)]
            for arm, batches in written.items()
        }

    def fill(self, stage: BatchBackend) -> None:
        """Measure until a look decides or the last one is reached. The first round warms up and is dropped."""
        extent = self.extent
        arms = [PLAIN, adaptive_arm(self.scene.drafter), *fixed_arms(self.scene.drafter, extent.lengths).values()]
        for number in range(extent.most_rounds + 1):
            stage.refresh(arms)
            written: dict[str, list[BatchResult]] = {arm.name: [] for arm in arms}
            for place, batch in enumerate(self.batches):
                for arm in rotated(arms, place + number):
                    written[arm.name].append(stage.write(arm, batch))
            if number:
                self.add(written)
            if number in extent.looks and self.contest.verdict != "inconclusive":
                break

    @property
    def contest(self) -> Contest:
        drafter = self.scene.drafter
        return Contest(
            plain=self._times(PLAIN.name),
            adaptive=self._times(adaptive_arm(drafter).name),
            fixed={k: self._times(arm.name) for k, arm in fixed_arms(drafter, self.extent.lengths).items()},
            looks=len(self.extent.looks),
        )

    def _times(self, arm: str) -> list[list[float]]:
        return [[each.a_token for each in rounds] for rounds in self.written[arm]]

    @property
    def says_something(self) -> bool:
        """Whether there are rounds to compare, or a text was not plain's."""
        return self.contest.rounds >= min(2, self.extent.rounds) or bool(self._differing())

    def found(self) -> tuple[Cell, Contest]:
        contest = self.contest
        return self._cell(contest), contest

    def _cell(self, contest: Contest) -> Cell:
        mine = [each for rounds in self.written[adaptive_arm(self.scene.drafter).name] for each in rounds]
        plain = [each for rounds in self.written[PLAIN.name] for each in rounds]
        differing = self._differing()
        return Cell(
            **asdict(self.scene),
            texts=sum(map(len, self.batches)),
            rounds=contest.rounds,
            tokens=sum(each.tokens for each in mine),
            accepted_per_step=sum(each.tokens for each in mine) / sum(each.steps for each in mine),
            speedup=contest.speedup,
            speedup_interval=contest.speedup_interval,
            noise=contest.noise,
            fixed=contest.fixed_speedups,
            best_fixed=contest.best_fixed,
            best_fixed_speedup=contest.fixed_speedups[contest.best_fixed],
            bar=contest.bar,
            verdict=contest.verdict,
            tokens_per_second=1 / median(each.a_token for each in mine),
            plain_tokens_per_second=1 / median(each.a_token for each in plain),
            same_text=not differing,
            differing=differing,
            drafter_failures=sum(each.failures for each in mine),
            times={arm: self._times(arm) for arm in self.written},
        )

    def _differing(self) -> tuple[str, ...]:
        """Texts that an arm, whichever, wrote otherwise than plain decoding did in the same round."""
        found = [
            f"{job.item} by {arm}"
            for arm, batches in self.written.items()
            for place, rounds in enumerate(batches)
            for plain, other in zip(self.written[PLAIN.name][place], rounds, strict=True)
            for job, ours, theirs in zip(self.batches[place], plain.texts, other.texts, strict=True)
            if ours != theirs
        ]
        return tuple(dict.fromkeys(found))


def contend(stage: BatchBackend, scene: GridCell, items: Sequence[BenchPrompt], extent: Extent) -> tuple[Cell, Contest]:
    """One cell."""
    record = _begin(stage, scene, items, extent)
    record.fill(stage)
    return record.found()


def _begin(stage: BatchBackend, scene: GridCell, items: Sequence[BenchPrompt], extent: Extent) -> _Record:
    return _Record(scene, extent, stage.prepare(items, scene.temperature, scene.batch, extent.batches(scene.batch)))


def run(
    stage: BatchBackend,
    scenes: Sequence[GridCell],
    items: Mapping[str, Sequence[BenchPrompt]],
    extent: Extent,
    watch: Watch,
    conditions: dict[str, Any],
) -> Findings:
    """Every scene, with the items of its task. Whatever stops it leaves the rounds that were finished, but for a single
    one of the last cell, which would say nothing and take the others' verdict with it."""
    records: list[_Record] = []
    stopped: BaseException | None = None
    try:
        for number, scene in enumerate(scenes):
            watch(number, len(scenes), str(scene))
            records.append(_begin(stage, scene, items[scene.task], extent))
            records[-1].fill(stage)
        watch(len(scenes), len(scenes), "done")
    except BaseException as error:
        stopped = error
    told = [record for record in records if record.written]
    if stopped is not None and len(told) > 1 and not told[-1].says_something:
        told.pop()
    found = [record.found() for record in told]
    if stopped is not None and not found:
        raise stopped  # there is nothing to leave
    return Findings(conditions, tuple(cell for cell, _ in found), tuple(summaries(found)), stopped)


def summaries(found: Sequence[tuple[Cell, Contest]]) -> list[Overall]:
    """For each drafter, and for all of them."""
    drafters = dict.fromkeys(cell.drafter for cell, _ in found)
    groups = {name: [pair for pair in found if pair[0].drafter == name] for name in drafters} | {ALL: list(found)}
    return [_overall(name, group) for name, group in groups.items()]


def _overall(drafter: str, found: Sequence[tuple[Cell, Contest]]) -> Overall:
    cells = [cell for cell, _ in found]
    looks = max(contest.looks for _, contest in found)
    return Overall(
        drafter=drafter,
        cells=len(cells),
        accepted_per_step=fmean(cell.accepted_per_step for cell in cells),
        speedup=math.exp(fmean(math.log(cell.speedup) for cell in cells)),
        speedup_interval=interval(mean_of([contest.estimate for _, contest in found]), 1 - ERROR / looks),
        verdict=worst([cell.verdict for cell in cells]),
        same_text=all(cell.same_text for cell in cells),
    )


HEAD = ("task", "T", "batch", "drafter", "accepted per step", "fixed", "bar", "ratio to plain", "verdict", "same text")


def markdown(findings: Findings) -> str:
    """A row for each cell, and one for the mean of each drafter."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(_cell_row(cell)) for cell in findings.cells]
    return "\n".join([*lines, *(_line(_overall_row(each)) for each in findings.overall)])


def remarks(findings: Findings) -> list[str]:
    """What a reader of the table must know."""
    count = {verdict: sum(cell.verdict == verdict for cell in findings.cells) for verdict in ("slower", "inconclusive")}
    lines = [
        f"The bar is {PLAIN_SHARE:g} of plain decoding's speed, and {BEST_SHARE:g} of the best fixed length's. "
        f"A cell is held or slower where a one-sided {1 - ERROR:.0%} bound is on that side of its bar.",
        "Ratio: plain decoding's time a token over the adaptive arm's, with a 95% t interval over rounds; timed from "
        "when all texts of a batch have their first token, prompts being cached.",
        f"{findings.verdict.upper()}: {len(findings.cells)} cells, {count['slower']} below the bar, "
        f"{count['inconclusive']} too noisy to tell.",
    ]
    for cell in findings.cells:
        where = f"{cell.drafter}, {cell.task}, T={cell.temperature:g}, {cell.batch} at once"
        if not cell.same_text:
            lines.append(f"NOT THE SAME TEXT: {where}: {'; '.join(cell.differing)}.")
        if cell.drafter_failures:
            lines.append(f"{where}: the drafter FAILED in {cell.drafter_failures} steps; see the log.")
    if findings.stopped is not None:
        last = findings.cells[-1].rounds
        lines.append(f"Stopped before the end: the table has what was finished, its last cell {last} rounds of it.")
    return lines


def _line(columns: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _cell_row(cell: Cell) -> list[str]:
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


def _overall_row(each: Overall) -> list[str]:
    accepted, same = f"{each.accepted_per_step:.2f}", "yes" if each.same_text else "NO"
    ratio = shown(each.speedup, each.speedup_interval)
    return [f"mean of {each.cells}", "", "", each.drafter, accepted, "", "", ratio, each.verdict, same]
