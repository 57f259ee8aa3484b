"""A whole plan: every batch and context that was asked for, what guessing gains there, what it takes and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foretell.errors import RequestError
from foretell.plan.calibrate import Calibration
from foretell.plan.drafter_cost import DrafterCost, Round, best_round, break_even, round_of
from foretell.plan.memory import GIB, Memory, memory_of
from foretell.plan.steps import Placed


@dataclass(frozen=True)
class PlanQuery:
    """What a plan is asked: how much is written at once, how long texts are, and how often guesses stand."""

    target: Placed
    guesser: DrafterCost
    devices: int
    acceptance: float
    texts: Sequence[int]  # at once, on all devices
    contexts: Sequence[int]
    most: int  # the longest draft that is tried
    length: int | None = None  # the one to take, where it is not to be the best

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise RequestError("acceptance", f"must be between 0 and 1, not {self.acceptance:g}")
        if not self.texts or min(self.texts) < 1:
            raise RequestError("batch", "must be 1 or more, such as 8, 1,8,32 or 1..64")
        if not self.contexts or min(self.contexts) < 1:
            raise RequestError("context", "must be 1 or more, such as 512, 8k or 1k,8k")
        if max(self.contexts) > self.target.shape.context:
            most, name = self.target.shape.context, self.target.shape.name
            raise RequestError("context", f"{max(self.contexts)} is more than the {most} of {name}")
        if self.devices % self.target.split:
            raise RequestError("tensor_parallel", f"{self.target.split} must divide the count, {self.devices}")

    @property
    def copies(self) -> int:
        """How often the whole model is there."""
        return self.devices // self.target.split

    @property
    def dollars_per_hour(self) -> float:
        return self.devices * self.target.device.price

    def plain(self, texts: int, context: int) -> Round:
        """A step without guesses, where texts are shared out over the copies."""
        return self.round(texts, context, 0)

    def round(self, texts: int, context: int, length: int) -> Round:
        """A step with drafts of so many tokens."""
        return round_of(self.target, self.guesser, self.each(texts), context, length, self.acceptance)

    def best(self, texts: int, context: int, acceptance: float) -> Round:
        """A step with drafts of the best length at this acceptance."""
        return best_round(self.target, self.guesser, self.each(texts), context, self.most, acceptance)

    def each(self, texts: int) -> float:
        """Texts on one copy."""
        return max(1.0, texts / self.copies)


MILLION, HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class Row:
    """One batch at one context."""

    texts: int
    context: int
    plain: Round
    guessed: Round
    break_even: float | None  # of the length taken; of the shortest where none pays
    memory: Memory
    copies: int
    dollars_per_hour: float

    @property
    def ratio(self) -> float:
        return self.guessed.rate / self.plain.rate

    def tokens_per_second(self, one: Round) -> float:
        """Of all texts."""
        return self.texts * one.rate

    def dollars(self, one: Round) -> float:
        """For a million tokens, while so many texts are always being written."""
        return self.dollars_per_hour / HOUR / self.tokens_per_second(one) * MILLION

    def as_json(self) -> dict[str, Any]:
        return {
            "batch": self.texts,
            "context": self.context,
            "plain_step_ms": 1e3 * self.plain.seconds,
            "length": self.guessed.length,
            "step_ms": 1e3 * self.guessed.seconds,
            "drafting_ms": 1e3 * self.guessed.drafting,
            "verifying_ms": 1e3 * self.guessed.verifying,
            "host_ms": 1e3 * self.guessed.host,
            "accepted_per_step": self.guessed.tokens,
            "speedup": self.ratio,
            "break_even_acceptance": self.break_even,
            "tokens_per_second": self.tokens_per_second(self.guessed),
            "plain_tokens_per_second": self.tokens_per_second(self.plain),
            "tokens_per_second_a_text": self.guessed.rate,
            "fits": self.memory.fits,
            "memory_gib": self.memory.total / GIB,
            "most_texts": self.memory.most_texts * self.copies,
            "dollars_per_million_tokens": self.dollars(self.guessed),
            "plain_dollars_per_million_tokens": self.dollars(self.plain),
        }


def row_of(question: PlanQuery, texts: int, context: int) -> Row:
    """One batch, shared out over the copies of the model."""
    plain = question.plain(texts, context)
    if question.length is None:
        guessed = question.best(texts, context, question.acceptance)
    else:
        guessed = question.round(texts, context, question.length)
    even = break_even(plain, guessed if guessed.length else question.round(texts, context, 1))
    memory = memory_of(question.target, question.guesser, -(-texts // question.copies), context, guessed.length)
    return Row(texts, context, plain, guessed, even, memory, question.copies, question.dollars_per_hour)


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
