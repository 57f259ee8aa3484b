"""`bench synthetic`: the engine at a given acceptance rate, with per-sequence and with batch-wide acceptance."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal, Protocol

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.utils.report_table import ReportTable
from foretell.utils.speculation_math import expected_tokens

from .intervals import INTERVAL, Estimate, Pairs, compared, interval, mean_ratio, over_rounds
from .measure import PLAIN, Batch, BatchBackend, BatchResult, ProgressCallback, Variant, rotated
from .metrics import OverallRow, as_row, json_name, mean_over_cells
from .never_slower_grid import ORACLE
from .prompt import BenchPrompt

TOLERANCE = 0.02  # relative error of tokens per step
# `sequence`: each sequence keeps its own accepted tokens. `batch`: all keep the fewest accepted tokens of the batch, as
# in engines that advance a batch in lockstep.
Mode = Literal["sequence", "batch"]
MODES: tuple[Mode, ...] = ("sequence", "batch")
MODE_LABELS = {"sequence": "per sequence", "batch": "lockstep"}


@dataclass(frozen=True)
class SyntheticCase:
    """Acceptance rate, draft length, and whether sequences accept on their own."""

    rate: float
    length: int
    mode: Mode

    @property
    def variant(self) -> Variant:
        name = f"{self.length} draft tokens accepted at {self.rate:g}, {MODE_LABELS[self.mode]}"
        return Variant(name, SpeculationConfig(drafter=ORACLE, num_speculative_tokens=self.length))

    def expected(self, batch: int) -> float:
        """Return the expected tokens per step; in `batch` mode every sequence must accept a position."""
        return expected_tokens(self.rate if self.mode == "sequence" else self.rate**batch, self.length)


@dataclass(frozen=True)
class SyntheticSettings:
    """Settings of a run and its extent."""

    rates: tuple[float, ...] = (0.5, 0.8, 0.95)
    lengths: tuple[int, ...] = (4, 8)
    batches: tuple[int, ...] = (1, 8, 32)
    max_tokens: int = 96
    min_sequences: int = 8  # a larger batch has more
    rounds: int = 3

    def __post_init__(self) -> None:
        for name, given in (("acceptance", self.rates), ("lengths", self.lengths), ("batches", self.batches)):
            if not given:
                raise RequestError(name, "is empty; give one number or several between commas")
        for rate in self.rates:
            if not 0 <= rate <= 1:
                raise RequestError("acceptance", f"must be between 0 and 1, not {rate:g}")
        for name in ("lengths", "batches"):
            if any(value < 1 for value in getattr(self, name)):
                raise RequestError(name, "must be 1 or more each")
        for name, value in (("texts", self.min_sequences), ("rounds", self.rounds)):
            if value < 1:
                raise RequestError(name, f"must be 1 or more, not {value}")
        if self.max_tokens < 2 * max(self.lengths):
            raise RequestError("max_tokens", f"must be at least twice the longest draft, not {self.max_tokens}")

    @property
    def cases(self) -> list[SyntheticCase]:
        return [SyntheticCase(*each) for each in itertools.product(self.rates, self.lengths, MODES)]


QUICK = SyntheticSettings(rates=(0.8,), lengths=(4,), max_tokens=40, min_sequences=4, rounds=2)


class SyntheticBatchBackend(BatchBackend, Protocol):
    """A batch backend that counts accepted tokens of drafts."""

    def take_drafts(self, variant: Variant) -> Counter[int]:
        """Return and reset the counts of full-length drafts by accepted tokens."""


@dataclass(frozen=True)
class SyntheticCell:
    """The result of one case at one batch size.

    `accepted_per_step` is the mean over steps with a full-length draft, `off` its relative error against the expected
    value. `speedup` is the time per token of plain decoding over that of this case.
    """

    rate: float
    length: int
    mode: Mode
    batch: int
    drafts: int
    accepted_per_step: float
    expected_per_step: float
    off: float
    speedup: float
    speedup_interval: tuple[float, float] | None
    tokens_per_second: float
    plain_tokens_per_second: float
    same_text: bool
    ratios: Pairs = ()  # by batch and round, to recompute intervals from
    estimate: Estimate | None = field(default=None, repr=False, metadata=json_name(None))

    @property
    def holds(self) -> bool:
        """Return whether the error is within tolerance; in `batch` mode there are too few samples, one per batch."""
        return self.mode == "batch" or self.off <= TOLERANCE


@dataclass(frozen=True)
class SyntheticResult:
    """The result of one run, and the exception that stopped it early."""

    conditions: dict[str, Any]
    cells: tuple[SyntheticCell, ...]
    stopped: BaseException | None = None

    @property
    def same_text(self) -> bool:
        return all(cell.same_text for cell in self.cells)

    @property
    def overall(self) -> tuple[OverallRow, ...]:
        """Return the mean of each mode over all rates, lengths and batch sizes."""
        by_mode = {mode: [cell for cell in self.cells if cell.mode == mode] for mode in MODES}
        return tuple(mean_over_cells(mode, cells) for mode, cells in by_mode.items() if cells)

    @property
    def holds(self) -> bool:
        return all(cell.holds for cell in self.cells)

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "synthetic",
            **self.conditions,
            "complete": self.stopped is None,
            "same_text": self.same_text,
            "within_tolerance": self.holds,
            "tolerance": TOLERANCE,
            "overall": [as_row(each) for each in self.overall],
            "cells": [as_row(cell) for cell in self.cells],
        }


@dataclass
class _VariantRecord:
    """Results of one variant at one batch size, by batch and round."""

    results: list[list[BatchResult]]
    drafts: Counter[int] = field(default_factory=Counter)


def run_synthetic(
    backend: SyntheticBatchBackend,
    items: Sequence[BenchPrompt],
    settings: SyntheticSettings,
    progress: ProgressCallback,
    conditions: dict[str, Any],
) -> SyntheticResult:
    """Measure every batch size; a stopped run keeps the finished ones."""
    cells: list[SyntheticCell] = []
    stopped: BaseException | None = None
    rounds = settings.rounds + 1  # the first is warm-up and dropped
    endless = [replace(item, sampling={"ignore_eos": True}, schema=None) for item in items]
    try:
        for index, batch in enumerate(settings.batches):
            batches = backend.prepare(endless, 0.0, batch, -(-settings.min_sequences // batch))

            def report_round(done: int, size: int = batch, before: int = index * rounds) -> None:
                progress(before + done, len(settings.batches) * rounds, f"batch {size}")

            cells += measure_batch(backend, batch, batches, settings, report_round)
        progress(len(settings.batches) * rounds, len(settings.batches) * rounds, "done")
    except BaseException as error:
        if not cells:
            raise  # nothing was finished
        stopped = error
    return SyntheticResult(conditions, tuple(cells), stopped)


def measure_batch(
    backend: SyntheticBatchBackend,
    batch: int,
    batches: Sequence[Batch],
    settings: SyntheticSettings,
    report_round: Callable[[int], None],
) -> list[SyntheticCell]:
    """Measure all settings at one batch size, interleaved with plain decoding."""
    variants = {PLAIN.name: PLAIN} | {case.variant.name: case.variant for case in settings.cases}
    records = {name: _VariantRecord([[] for _ in batches]) for name in variants}
    for number in range(settings.rounds + 1):
        report_round(number)
        backend.reset([variant for variant in variants.values() if variant != PLAIN])
        for index, jobs in enumerate(batches):
            for variant in rotated(list(variants.values()), index + number):
                result = backend.generate(variant, jobs)
                drafts = backend.take_drafts(variant)
                if number:
                    records[variant.name].results[index].append(result)
                    records[variant.name].drafts += drafts
    return [cell_of(case, batch, records[case.variant.name], records[PLAIN.name]) for case in settings.cases]


def cell_of(case: SyntheticCase, batch: int, ours: _VariantRecord, plain: _VariantRecord) -> SyntheticCell:
    """Compare the results of one case with plain ones."""
    drafts = ours.drafts.total()
    found = sum((accepted + 1) * count for accepted, count in ours.drafts.items()) / drafts if drafts else 0.0
    expected = case.expected(batch)
    pairs = [list(zip(*each, strict=True)) for each in zip(plain.results, ours.results, strict=True)]
    ratios = [[one.seconds_per_token / other.seconds_per_token for one, other in rounds] for rounds in pairs]
    estimate = over_rounds(ratios)
    return SyntheticCell(
        **asdict(case),
        batch=batch,
        drafts=drafts,
        accepted_per_step=found,
        expected_per_step=expected,
        off=abs(found / expected - 1),
        speedup=mean_ratio(estimate, ratios),
        speedup_interval=interval(estimate),
        tokens_per_second=1 / median(each.seconds_per_token for rounds in ours.results for each in rounds),
        plain_tokens_per_second=1 / median(each.seconds_per_token for rounds in plain.results for each in rounds),
        same_text=all(one.outputs == other.outputs for rounds in pairs for one, other in rounds),
        ratios=ratios,
        estimate=estimate,
    )


HEAD = (
    "rate",
    "draft length",
    "batch",
    "acceptance",
    "accepted per step",
    "expected",
    "error",
    "speedup",
    INTERVAL,
    "same text",
)


def report_table(result: SyntheticResult) -> ReportTable:
    """Return a table with a row for each case and batch size."""
    return ReportTable(HEAD, [_row(cell) for cell in result.cells], words=0)


def remarks(result: SyntheticResult) -> list[str]:
    """Return the notes below the table."""
    lines = [
        "An oracle drafted: this is the speed of the engine at a known acceptance rate, not that of a drafter.",
        "Expected: (1 - a^(k+1)) / (1 - a) tokens per step if each of k draft tokens is accepted with probability a; "
        "in lockstep, a draft token counts if every sequence of the batch accepts its position. Steps with fewer "
        "than k draft tokens are left out of accepted per step.",
    ]
    for batch in dict.fromkeys(cell.batch for cell in result.cells):
        gains = [f"{a.speedup / b.speedup:.2f}" for a, b in _pairs(result, batch)]
        if gains:
            lines.append(f"Batch {batch}: acceptance per sequence is {', '.join(gains)} times as fast as lockstep.")
    for cell in result.cells:
        where = f"{cell.length} draft tokens accepted at {cell.rate:g}, batch {cell.batch}, {MODE_LABELS[cell.mode]}"
        if not cell.holds:
            lines.append(f"OFF THE EXPECTED VALUE by {cell.off:.1%} (at most {TOLERANCE:.0%} is allowed): {where}.")
        if not cell.same_text:
            lines.append(f"NOT THE SAME TEXT: {where}.")
    if result.stopped is not None:
        lines.append("Stopped early: the table has the finished part. Run the command again for all of it.")
    return lines


def _pairs(result: SyntheticResult, batch: int) -> list[tuple[SyntheticCell, SyntheticCell]]:
    """Return the cells of equal settings as pairs (per sequence, lockstep)."""
    found = {(cell.rate, cell.length, cell.mode): cell for cell in result.cells if cell.batch == batch}
    return [(cell, found[rate, length, "batch"]) for (rate, length, mode), cell in found.items() if mode == "sequence"]


def _row(cell: SyntheticCell) -> list[str]:
    return [
        f"{cell.rate:g}",
        str(cell.length),
        str(cell.batch),
        MODE_LABELS[cell.mode],
        f"{cell.accepted_per_step:.2f}",
        f"{cell.expected_per_step:.2f}",
        f"{cell.off:.1%}",
        *compared(cell.speedup, cell.speedup_interval),
        "yes" if cell.same_text else "NO",
    ]
