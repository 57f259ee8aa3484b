"""A whole plan: every batch and context that was asked for, what guessing gains there, what it takes and costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from .calibrate import Calibration
from .memory import GIB
from .query import PlanQuery
from .result import Row, row_of

DRAWN_LENGTHS = (1, 2, 4, 8)
DRAWN_RATES = tuple(rate / 20 for rate in range(6, 20))


@dataclass(frozen=True)
class Forecast:
    """All that a plan says."""

    question: PlanQuery
    rows: tuple[Row, ...]
    splits: tuple[tuple[int, Row], ...]  # devices a copy is split over, and the largest batch that way
    by_length: dict[int, dict[int, float]]  # batch, then length: the ratio at the first context
    by_acceptance: dict[int, dict[float, float]]  # batch, then acceptance: the ratio of the best length there
    calibration: Calibration | None = None

    def as_json(self) -> dict[str, Any]:
        asked, target = self.question, self.question.target
        return {
            "plan": "steps",
            "target": {"name": target.shape.name, "weights": target.shape.weights, "dtype": target.precision.name},
            "draft": asked.guesser.name,
            "gpu": target.device.name,
            "count": asked.devices,
            "tensor_parallel": target.split,
            "acceptance": asked.acceptance,
            "dollars_per_hour": asked.dollars_per_hour,
            "efficiency": asdict(target.efficiency),
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "rows": [row.as_json() for row in self.rows],
            "tensor_parallel_rows": [{"tensor_parallel": n, **row.as_json()} for n, row in self.splits],
            "step_parts_ms": {
                name: 1e3 * value
                for name, value in asdict(target.step(self.rows[0].texts, 1, self.rows[0].context)).items()
            },
            "remarks": remarks(self),
        }


def forecast(question: PlanQuery, calibration: Calibration | None = None) -> Forecast:
    """Everything that was asked, and the curves that go with it."""
    rows = tuple(row_of(question, texts, context) for context in question.contexts for texts in question.texts)
    context = question.contexts[0]
    by_length = {texts: _by_length(question, texts, context) for texts in question.texts}
    drawn = dict.fromkeys((question.texts[0], question.texts[-1]))
    by_acceptance = {texts: _by_acceptance(question, texts, context) for texts in drawn}
    return Forecast(question, rows, tuple(_splits(question)), by_length, by_acceptance, calibration)


def _by_length(question: PlanQuery, texts: int, context: int) -> dict[int, float]:
    plain = question.plain(texts, context)
    lengths = [length for length in DRAWN_LENGTHS if length <= max(question.most, 1)]
    return {length: question.round(texts, context, length).rate / plain.rate for length in lengths}


def _by_acceptance(question: PlanQuery, texts: int, context: int) -> dict[float, float]:
    plain = question.plain(texts, context)
    return {rate: question.best(texts, context, rate).rate / plain.rate for rate in DRAWN_RATES}


def _splits(question: PlanQuery) -> list[tuple[int, Row]]:
    """The largest batch with a copy of the model on each device, on every two, and so on."""
    found = []
    for split in range(1, question.devices + 1):
        if question.devices % split or question.target.shape.heads % split:
            continue
        target, guesser = replace(question.target, split=split), question.guesser.beside(split)
        there = replace(question, target=target, guesser=guesser)
        found.append((split, row_of(there, question.texts[-1], question.contexts[0])))
    return found if len(found) > 1 else []


def remarks(found: Forecast) -> list[str]:
    """What a reader of the table must know."""
    lines, asked = [], found.question
    tight = [row for row in found.rows if not row.memory.fits]
    if tight:
        lines.append(_memory_words(asked, tight[0]))
    never = [row for row in found.rows if row.guessed.length == 0]
    if never:
        least = never[0].break_even
        needed = "no acceptance is enough" if least is None else f"one token pays from an acceptance of {least:.2f} on"
        lines.append(f"At batch {never[0].texts} and {never[0].context} tokens guessing does not pay: {needed}.")
    if found.calibration is None:
        lines.append("Not calibrated: engine constants are those of one H200 or CPU; see --calibrate.")
    else:
        fit = found.calibration
        lines.append(
            f"Calibrated on {fit.steps} measured steps, which it gives back within {fit.worst_error:.1%} "
            f"(mean {fit.mean_error:.1%})."
        )
        lines += fit.doubts
    return lines


def _memory_words(asked: PlanQuery, row: Row) -> str:
    memory, usable = row.memory, row.memory.usable / GIB
    if memory.most_texts == 0:
        need = (memory.weights + memory.draft) / GIB
        return (
            f"Does not fit: weights take {need:.1f} GiB of {usable:.1f} usable on each device; "
            "take more devices (--count), fewer bits (--dtype) or a smaller model."
        )
    return (
        f"Batch {row.texts} of {row.context} tokens does not fit: there is room for {memory.most_texts * asked.copies} "
        "texts; take more devices (--count), a shorter context or fewer bits (--kv-dtype fp8)."
    )
