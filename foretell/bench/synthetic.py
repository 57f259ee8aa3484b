"""The engine alone, at a set acceptance: tokens a step against the law, and texts apart against texts in step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal, Protocol

from foretell.bench.intervals import (
    Estimate,
    Overall,
    Pairs,
    as_row,
    interval,
    mean_ratio,
    over_all,
    over_rounds,
    shown,
)
from foretell.bench.measure import PLAIN, Batch, BatchBackend, BatchResult, Variant, Watch, rotated
from foretell.bench.never_slower_grid import ORACLE
from foretell.bench.prompt import BenchPrompt
from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.utils.speculation_math import expected_tokens

TOLERANCE = 0.02
# Whether each text keeps what stands of its own draft, or all keep what stands of every draft, as engines do that
# advance a batch in step.
Mode = Literal["sequence", "batch"]
MODES: tuple[Mode, ...] = ("sequence", "batch")


@dataclass(frozen=True)
class Setting:
    """How often guesses stand, how many are made, and who keeps what stands."""

    rate: float
    length: int
    mode: Mode

    @property
    def arm(self) -> Variant:
        words = "each text by itself" if self.mode == "sequence" else "all in step"
        name = f"{self.length} guesses right at {self.rate:g}, {words}"
        return Variant(name, SpeculationConfig(drafter=ORACLE, num_speculative_tokens=self.length))

    def expected(self, batch: int) -> float:
        """In step, a guess stands where that of every text does."""
        return expected_tokens(self.rate if self.mode == "sequence" else self.rate**batch, self.length)


@dataclass(frozen=True)
class SyntheticPlan:
    """What is measured, and how much of it."""

    rates: tuple[float, ...] = (0.5, 0.8, 0.95)
    lengths: tuple[int, ...] = (4, 8)
    batches: tuple[int, ...] = (1, 8, 32)
    max_tokens: int = 96
    texts: int = 8  # at least; a larger batch has more
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
        for name in ("texts", "rounds"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")
        if self.max_tokens < 2 * max(self.lengths):
            raise RequestError("max_tokens", f"must be at least twice the longest draft, not {self.max_tokens}")

    @property
    def settings(self) -> list[Setting]:
        return [Setting(*each) for each in itertools.product(self.rates, self.lengths, MODES)]


QUICK = SyntheticPlan(rates=(0.8,), lengths=(4,), max_tokens=40, texts=4, rounds=2)


class SyntheticStage(BatchBackend, Protocol):
    """A stage that tells how far drafts stood."""

    def take_drafts(self, arm: Variant) -> Counter[int]:
        """Whole ones since it was last asked, by how many of their guesses stood."""


@dataclass(frozen=True)
class SyntheticCell:
    """One setting at one batch size.

    `accepted_per_step` is the mean over steps with a whole draft, `off` its distance from the law as a share; `speedup`
    plain decoding's time a token over this one's.
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
    ratios: Pairs = ()  # by batch and round, so that an interval can be computed again
    estimate: Estimate | None = field(default=None, repr=False)

    @property
    def holds(self) -> bool:
        """In step there are too few draws to tell: a batch makes one."""
        return self.mode == "batch" or self.off <= TOLERANCE


@dataclass(frozen=True)
class SyntheticFindings:
    """All that one run found, and what ended it before its time."""

    conditions: dict[str, Any]
    cells: tuple[SyntheticCell, ...]
    stopped: BaseException | None = None

    @property
    def same_text(self) -> bool:
        return all(cell.same_text for cell in self.cells)

    @property
    def overall(self) -> tuple[Overall, ...]:
        """Texts apart and texts in step, over all rates, lengths and batch sizes."""
        by_mode = {mode: [cell for cell in self.cells if cell.mode == mode] for mode in MODES}
        return tuple(over_all(mode, cells) for mode, cells in by_mode.items() if cells)

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
            "overall": [asdict(each) for each in self.overall],
            "cells": [as_row(cell) for cell in self.cells],
        }


@dataclass
class _Record:
    """What one arm wrote at one batch size: for each batch its rounds."""

    written: list[list[BatchResult]]
    drafts: Counter[int] = field(default_factory=Counter)


def run_synthetic(
    stage: SyntheticStage, items: Sequence[BenchPrompt], plan: SyntheticPlan, watch: Watch, conditions: dict[str, Any]
) -> SyntheticFindings:
    """Every batch size. Whatever stops it leaves those that were finished."""
    cells: list[SyntheticCell] = []
    stopped: BaseException | None = None
    rounds = plan.rounds + 1  # the first warms up and is dropped
    endless = [replace(item, sampling={"ignore_eos": True}, schema=None) for item in items]
    try:
        for place, batch in enumerate(plan.batches):
            batches = stage.prepare(endless, 0.0, batch, -(-plan.texts // batch))

            def tell(done: int, size: int = batch, before: int = place * rounds) -> None:
                watch(before + done, len(plan.batches) * rounds, f"{size} at once")

            cells += measure_batch(stage, batch, batches, plan, tell)
        watch(len(plan.batches) * rounds, len(plan.batches) * rounds, "done")
    except BaseException as error:
        if not cells:
            raise  # there is nothing to leave
        stopped = error
    return SyntheticFindings(conditions, tuple(cells), stopped)


def measure_batch(
    stage: SyntheticStage, batch: int, batches: Sequence[Batch], plan: SyntheticPlan, tell: Any
) -> list[SyntheticCell]:
    """All settings at one batch size, interleaved with plain decoding."""
    arms = {PLAIN.name: PLAIN} | {setting.arm.name: setting.arm for setting in plan.settings}
    records = {name: _Record([[] for _ in batches]) for name in arms}
    for number in range(plan.rounds + 1):
        tell(number)
        stage.refresh([arm for arm in arms.values() if arm != PLAIN])
        for place, texts in enumerate(batches):
            for arm in rotated(list(arms.values()), place + number):
                together = stage.write(arm, texts)
                drafts = stage.take_drafts(arm)
                if number:
                    records[arm.name].written[place].append(together)
                    records[arm.name].drafts += drafts
    return [cell_of(setting, batch, records[setting.arm.name], records[PLAIN.name]) for setting in plan.settings]


def cell_of(setting: Setting, batch: int, ours: _Record, plain: _Record) -> SyntheticCell:
    """What one setting's texts say beside plain ones."""
    drafts = ours.drafts.total()
    found = sum((stood + 1) * count for stood, count in ours.drafts.items()) / drafts if drafts else 0.0
    expected = setting.expected(batch)
    pairs = [list(zip(*each, strict=True)) for each in zip(plain.written, ours.written, strict=True)]
    ratios = [[one.a_token / other.a_token for one, other in rounds] for rounds in pairs]
    estimate = over_rounds(ratios)
    return SyntheticCell(
        **asdict(setting),
        batch=batch,
        drafts=drafts,
        accepted_per_step=found,
        expected_per_step=expected,
        off=abs(found / expected - 1),
        speedup=mean_ratio(estimate, ratios),
        speedup_interval=interval(estimate),
        tokens_per_second=1 / median(each.a_token for rounds in ours.written for each in rounds),
        plain_tokens_per_second=1 / median(each.a_token for rounds in plain.written for each in rounds),
        same_text=all(one.texts == other.texts for rounds in pairs for one, other in rounds),
        ratios=ratios,
        estimate=estimate,
    )


HEAD = ("right", "guesses", "at once", "kept", "accepted per step", "by the law", "off", "ratio to plain", "same text")
WORDS = {"sequence": "each text by itself", "batch": "all in step"}


def markdown(findings: SyntheticFindings) -> str:
    """A row for each setting and batch size."""
    lines = [HEAD, ["---:"] * 3 + ["---"] + ["---:"] * 4 + ["---"], *map(_row, findings.cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(findings: SyntheticFindings) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        "An oracle made the guesses: this is the engine's speed at a known acceptance, and no model's.",
        "The law: (1 - a^(k+1)) / (1 - a) tokens a step where each of k guesses is right with a chance of a; all in "
        "step, a guess counts where it stands for every text of the batch. Steps with fewer than k guesses are left "
        "out of accepted per step.",
    ]
    for batch in dict.fromkeys(cell.batch for cell in findings.cells):
        gains = [f"{a.speedup / b.speedup:.2f}" for a, b in _pairs(findings, batch)]
        if gains:
            lines.append(f"{batch} at once: each text by itself is {', '.join(gains)} times as fast as all in step.")
    for cell in findings.cells:
        where = f"{cell.length} guesses right at {cell.rate:g}, {cell.batch} at once, {WORDS[cell.mode]}"
        if not cell.holds:
            lines.append(f"OFF THE LAW by {cell.off:.1%} (at most {TOLERANCE:.0%} will do): {where}.")
        if not cell.same_text:
            lines.append(f"NOT THE SAME TEXT: {where}.")
    if findings.stopped is not None:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines


def _pairs(findings: SyntheticFindings, batch: int) -> list[tuple[SyntheticCell, SyntheticCell]]:
    """The same guesses, kept text by text and in step."""
    found = {(cell.rate, cell.length, cell.mode): cell for cell in findings.cells if cell.batch == batch}
    return [(cell, found[rate, length, "batch"]) for (rate, length, mode), cell in found.items() if mode == "sequence"]


def _row(cell: SyntheticCell) -> list[str]:
    return [
        f"{cell.rate:g}",
        str(cell.length),
        str(cell.batch),
        WORDS[cell.mode],
        f"{cell.accepted_per_step:.2f}",
        f"{cell.expected_per_step:.2f}",
        f"{cell.off:.1%}",
        shown(cell.speedup, cell.speedup_interval),
        "yes" if cell.same_text else "NO",
    ]
