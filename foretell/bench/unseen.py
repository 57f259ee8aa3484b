"""`bench never-slower --unseen`: short requests never seen before, each with what speculation costs or saves it.

A mean hides what this asks: whether any single short request pays for looking. The adaptive variant starts without
learned acceptance and meets every prompt once, as a server after its start does. Plain decoding runs three times after
it. Two runs are compared with the adaptive one and, by the same formula, with the third (A/A): what that comparison
finds is the noise of the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean, median, quantiles
from typing import Any

from foretell.config import SpeculationConfig
from foretell.errors import RequestError
from foretell.llm import LLM
from foretell.types import SpeculationChoice
from foretell.utils.report_table import ReportTable

from .drafter_slots import DrafterSlot, DrafterSlots
from .engine_backend import NO_SPECULATION, EngineBackend, timed_generate
from .measure import PLAIN, MeasureJob, ProgressCallback, Variant, variations, with_min_tokens
from .never_slower_stats import NeverSlowerVerdict, worst_verdict
from .prompt import BenchPrompt
from .settings import BenchSettings

SLOW = 0.95  # share of plain decoding's speed below which a text counts as slower
MAX_SLOW = 0.02  # share of the requests that may be
MIN_FIFTH = 0.97  # least 5th percentile of the requests
DRAFTERS = ("auto", "suffix,recycle")
TEMPERATURES = (0.0, 1.0)
SKIPPED_TASKS = ("edit", "logs")  # they copy their prompt, so every drafter is fast on them


@dataclass(frozen=True)
class UnseenCell:
    """The requests of one drafter and temperature: speeds over plain decoding, each the median over rounds."""

    drafter: str
    temperature: float
    requests: int
    rounds: int
    speedup: float  # geometric mean
    fifth_percentile: float
    slow_share: float  # of requests under SLOW
    noise_speedup: float  # the same three of plain decoding over itself
    noise_fifth_percentile: float
    noise_slow_share: float
    same_text: bool
    speedups: tuple[float, ...]

    @property
    def verdict(self) -> NeverSlowerVerdict:
        """Return held if both bars hold, inconclusive if plain decoding itself would miss one, else slower."""
        if self.fifth_percentile >= MIN_FIFTH and self.slow_share <= MAX_SLOW:
            return "held"
        noisy = self.noise_fifth_percentile < MIN_FIFTH or self.noise_slow_share > MAX_SLOW
        return "inconclusive" if noisy else "slower"


@dataclass(frozen=True)
class UnseenResult:
    """The result of one run."""

    conditions: dict[str, Any]
    cells: tuple[UnseenCell, ...]

    @property
    def verdict(self) -> NeverSlowerVerdict:
        return worst_verdict([cell.verdict for cell in self.cells])

    def as_json(self) -> dict[str, Any]:
        cells = [{**asdict(cell), "verdict": cell.verdict} for cell in self.cells]
        return {"bench": "never-slower", "unseen": True, **self.conditions, "verdict": self.verdict, "cells": cells}


def prompts(items: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """Return `count` distinct prompts, tasks in turn."""
    by_task: dict[str, list[BenchPrompt]] = {}
    for item in items:
        if item.task not in SKIPPED_TASKS:
            by_task.setdefault(item.task, []).append(item)
    mixed = [item for row in itertools.zip_longest(*by_task.values()) for item in row if item is not None]
    return variations(mixed, count)


class UnseenBench:
    """Measures short requests on a loaded model."""

    def __init__(self, llm: LLM, slots: DrafterSlots, settings: BenchSettings) -> None:
        self.llm, self._make, self._settings = llm, slots, settings
        self._backend, self._plain = EngineBackend(llm, slots), slots.make(PLAIN.speculation)
        self._names = itertools.count()

    def run(
        self, cells: Sequence[tuple[str, float]], items: Sequence[BenchPrompt], progress: ProgressCallback
    ) -> tuple[UnseenCell, ...]:
        """Measure each drafter and temperature."""
        found = []
        for number, (drafter, temperature) in enumerate(cells):
            progress(number, len(cells), f"{drafter}, T={temperature:g}")
            found.append(self.cell(drafter, temperature, items))
        progress(len(cells), len(cells), "done")
        return tuple(found)

    def cell(self, drafter: str, temperature: float, items: Sequence[BenchPrompt]) -> UnseenCell:
        """Measure one drafter at one temperature. In each round its controller and drafters start fresh."""
        variant = Variant(drafter, SpeculationConfig(drafter=drafter))
        kept = [with_min_tokens(item, self._settings) for item in items if self._backend.fits(item, self._settings)]
        if not kept:
            raise RequestError("max_tokens", "leaves no prompt that fits into this model's context")
        jobs = [self._backend.prepare(item, temperature, self._settings)[0] for item in kept]
        speedups: list[list[float]] = [[] for _ in jobs]
        noise: list[list[float]] = [[] for _ in jobs]
        same_text = True
        for _ in range(self._settings.rounds):
            slot = self._make.make(variant.speculation)
            for index, job in enumerate(jobs):
                # It comes first: a head has no KV for a prompt that plain decoding has put into the prefix cache.
                seconds, text = self._generate(slot, job, SpeculationChoice())
                runs = [self._generate(self._plain, job, NO_SPECULATION) for _ in range(3)]
                same_text &= text == runs[0][1]
                plain = (runs[0][0] + runs[2][0]) / 2
                speedups[index].append(plain / seconds)
                noise[index].append(plain / runs[1][0])
        return _cell(drafter, temperature, [*map(median, speedups)], [*map(median, noise)], len(speedups[0]), same_text)

    def _generate(self, slot: DrafterSlot, job: MeasureJob, choice: SpeculationChoice) -> tuple[float, tuple[int, ...]]:
        """Return the seconds per token after the first one, and the output."""
        slot.activate()
        name = f"unseen-{next(self._names)}"
        (request,) = self.llm.assembly.requests.make(name, list(job.prompt), job.params, choice)
        times = timed_generate(self.llm, [request])
        return times.decode_seconds / max(1, times.timed_tokens), times.outputs[0]


def _cell(
    drafter: str, temperature: float, speedups: list[float], noise: list[float], rounds: int, same_text: bool
) -> UnseenCell:
    return UnseenCell(
        drafter=drafter,
        temperature=temperature,
        requests=len(speedups),
        rounds=rounds,
        speedup=geometric_mean(speedups),
        fifth_percentile=fifth_percentile(speedups),
        slow_share=fmean(value < SLOW for value in speedups),
        noise_speedup=geometric_mean(noise),
        noise_fifth_percentile=fifth_percentile(noise),
        noise_slow_share=fmean(value < SLOW for value in noise),
        same_text=same_text,
        speedups=tuple(speedups),
    )


def fifth_percentile(values: Sequence[float]) -> float:
    """Return the 5th percentile; of a single value that value."""
    return quantiles(values, n=20, method="inclusive")[0] if len(values) > 1 else values[0]


HEAD = ("drafter", "T", "requests", "speedup", "5th percentile", f"under {SLOW:g}", "noise", "verdict", "same text")


def report_table(result: UnseenResult) -> ReportTable:
    """Return a table with a row for each drafter and temperature."""
    rows = [
        [
            cell.drafter,
            f"{cell.temperature:g}",
            str(cell.requests),
            f"{cell.speedup:.2f}",
            f"{cell.fifth_percentile:.2f}",
            f"{cell.slow_share:.0%}",
            f"{cell.noise_speedup:.2f}, {cell.noise_fifth_percentile:.2f}, {cell.noise_slow_share:.0%}",
            cell.verdict,
            "yes" if cell.same_text else "NO",
        ]
        for cell in result.cells
    ]
    return ReportTable(HEAD, rows, words=1)


def remarks(result: UnseenResult) -> list[str]:
    """Return the notes below the table."""
    return [
        f"Bars: a 5th percentile of {MIN_FIFTH:g} and at most {MAX_SLOW:.0%} of the requests under {SLOW:g} of the "
        "speed of plain decoding. Noise: speedup, 5th percentile and share of plain decoding over itself (A/A).",
        f"{result.verdict.upper()}: {len(result.cells)} cells.",
    ]
