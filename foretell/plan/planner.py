"""A whole plan: every batch and context that was asked for, what guessing gains there, what it takes and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foretell.errors import RequestError
from foretell.plan.calibrate import EfficiencyFit
from foretell.plan.drafter_cost import DrafterCost, StepEstimate, best_step, break_even, estimate_step
from foretell.plan.memory import GIB, PlannedMemory, plan_memory
from foretell.plan.steps import DeployedModel


@dataclass(frozen=True)
class PlanQuery:
    """What a plan is asked: how much is written at once, how long texts are, and how often guesses stand."""

    target: DeployedModel
    drafter: DrafterCost
    devices: int
    acceptance: float
    batch_sizes: Sequence[int]  # at once, on all devices
    contexts: Sequence[int]
    max_length: int  # the longest draft that is tried
    length: int | None = None  # the one to take, where it is not to be the best

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise RequestError("acceptance", f"must be between 0 and 1, not {self.acceptance:g}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise RequestError("batch", "must be 1 or more, such as 8, 1,8,32 or 1..64")
        if not self.contexts or min(self.contexts) < 1:
            raise RequestError("context", "must be 1 or more, such as 512, 8k or 1k,8k")
        if max(self.contexts) > self.target.shape.context:
            most, name = self.target.shape.context, self.target.shape.name
            raise RequestError("context", f"{max(self.contexts)} is more than the {most} of {name}")
        if self.devices % self.target.tensor_parallel:
            raise RequestError(
                "tensor_parallel", f"{self.target.tensor_parallel} must divide the count, {self.devices}"
            )

    @property
    def replicas(self) -> int:
        """How often the whole model is there."""
        return self.devices // self.target.tensor_parallel

    @property
    def dollars_per_hour(self) -> float:
        return self.devices * self.target.device.price

    def plain_step(self, texts: int, context: int) -> StepEstimate:
        """A step without guesses, where texts are shared out over the copies."""
        return self.step(texts, context, 0)

    def step(self, texts: int, context: int, length: int) -> StepEstimate:
        """A step with drafts of so many tokens."""
        return estimate_step(self.target, self.drafter, self.per_replica(texts), context, length, self.acceptance)

    def best_step(self, texts: int, context: int, acceptance: float) -> StepEstimate:
        """A step with drafts of the best length at this acceptance."""
        return best_step(self.target, self.drafter, self.per_replica(texts), context, self.max_length, acceptance)

    def per_replica(self, texts: int) -> float:
        """Texts on one copy."""
        return max(1.0, texts / self.replicas)


MILLION, HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class PlanRow:
    """One batch at one context."""

    batch: int
    context: int
    plain: StepEstimate
    speculative: StepEstimate
    break_even: float | None  # of the length taken; of the shortest where none pays
    memory: PlannedMemory
    replicas: int
    dollars_per_hour: float

    @property
    def speedup(self) -> float:
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    def tokens_per_second(self, one: StepEstimate) -> float:
        """Of all texts."""
        return self.batch * one.tokens_per_second

    def dollars(self, one: StepEstimate) -> float:
        """For a million tokens, while so many texts are always being written."""
        return self.dollars_per_hour / HOUR / self.tokens_per_second(one) * MILLION

    def as_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "context": self.context,
            "plain_step_ms": 1e3 * self.plain.seconds,
            "length": self.speculative.length,
            "step_ms": 1e3 * self.speculative.seconds,
            "drafting_ms": 1e3 * self.speculative.draft_seconds,
            "verifying_ms": 1e3 * self.speculative.verify_seconds,
            "host_ms": 1e3 * self.speculative.host_seconds,
            "accepted_per_step": self.speculative.tokens,
            "speedup": self.speedup,
            "break_even_acceptance": self.break_even,
            "tokens_per_second": self.tokens_per_second(self.speculative),
            "plain_tokens_per_second": self.tokens_per_second(self.plain),
            "tokens_per_second_a_text": self.speculative.tokens_per_second,
            "fits": self.memory.fits,
            "memory_gib": self.memory.total / GIB,
            "most_texts": self.memory.max_batch * self.replicas,
            "dollars_per_million_tokens": self.dollars(self.speculative),
            "plain_dollars_per_million_tokens": self.dollars(self.plain),
        }


def plan_row(question: PlanQuery, texts: int, context: int) -> PlanRow:
    """One batch, shared out over the copies of the model."""
    plain = question.plain_step(texts, context)
    if question.length is None:
        guessed = question.best_step(texts, context, question.acceptance)
    else:
        guessed = question.step(texts, context, question.length)
    even = break_even(plain, guessed if guessed.length else question.step(texts, context, 1))
    memory = plan_memory(question.target, question.drafter, -(-texts // question.replicas), context, guessed.length)
    return PlanRow(texts, context, plain, guessed, even, memory, question.replicas, question.dollars_per_hour)


DRAWN_LENGTHS = (1, 2, 4, 8)
DRAWN_RATES = tuple(rate / 20 for rate in range(6, 20))


@dataclass(frozen=True)
class PlanResult:
    """All that a plan says."""

    query: PlanQuery
    rows: tuple[PlanRow, ...]
    splits: tuple[tuple[int, PlanRow], ...]  # devices a copy is split over, and the largest batch that way
    by_length: dict[int, dict[int, float]]  # batch, then length: the ratio at the first context
    by_acceptance: dict[int, dict[float, float]]  # batch, then acceptance: the ratio of the best length there
    calibration: EfficiencyFit | None = None

    def as_json(self) -> dict[str, Any]:
        asked, target = self.query, self.query.target
        return {
            "plan": "steps",
            "target": {"name": target.shape.name, "weights": target.shape.weights, "dtype": target.precision.name},
            "draft": asked.drafter.name,
            "gpu": target.device.name,
            "count": asked.devices,
            "tensor_parallel": target.tensor_parallel,
            "acceptance": asked.acceptance,
            "dollars_per_hour": asked.dollars_per_hour,
            "efficiency": asdict(target.efficiency),
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "rows": [row.as_json() for row in self.rows],
            "tensor_parallel_rows": [{"tensor_parallel": n, **row.as_json()} for n, row in self.splits],
            "step_parts_ms": {
                name: 1e3 * value
                for name, value in asdict(target.step(self.rows[0].batch, 1, self.rows[0].context)).items()
            },
            "remarks": remarks(self),
        }


def make_plan(question: PlanQuery, calibration: EfficiencyFit | None = None) -> PlanResult:
    """Everything that was asked, and the curves that go with it."""
    rows = tuple(plan_row(question, texts, context) for context in question.contexts for texts in question.batch_sizes)
    context = question.contexts[0]
    by_length = {texts: _by_length(question, texts, context) for texts in question.batch_sizes}
    drawn = dict.fromkeys((question.batch_sizes[0], question.batch_sizes[-1]))
    by_acceptance = {texts: _by_acceptance(question, texts, context) for texts in drawn}
    return PlanResult(question, rows, tuple(_splits(question)), by_length, by_acceptance, calibration)


def _by_length(question: PlanQuery, texts: int, context: int) -> dict[int, float]:
    plain = question.plain_step(texts, context)
    lengths = [length for length in DRAWN_LENGTHS if length <= max(question.max_length, 1)]
    return {
        length: question.step(texts, context, length).tokens_per_second / plain.tokens_per_second for length in lengths
    }


def _by_acceptance(question: PlanQuery, texts: int, context: int) -> dict[float, float]:
    plain = question.plain_step(texts, context)
    return {
        rate: question.best_step(texts, context, rate).tokens_per_second / plain.tokens_per_second
        for rate in DRAWN_RATES
    }


def _splits(question: PlanQuery) -> list[tuple[int, PlanRow]]:
    """The largest batch with a copy of the model on each device, on every two, and so on."""
    found = []
    for split in range(1, question.devices + 1):
        if question.devices % split or question.target.shape.heads % split:
            continue
        target, guesser = replace(question.target, tensor_parallel=split), question.drafter.with_target_split(split)
        there = replace(question, target=target, drafter=guesser)
        found.append((split, plan_row(there, question.batch_sizes[-1], question.contexts[0])))
    return found if len(found) > 1 else []


def remarks(found: PlanResult) -> list[str]:
    """What a reader of the table must know."""
    lines, asked = [], found.query
    tight = [row for row in found.rows if not row.memory.fits]
    if tight:
        lines.append(_memory_words(asked, tight[0]))
    never = [row for row in found.rows if row.speculative.length == 0]
    if never:
        least = never[0].break_even
        needed = "no acceptance is enough" if least is None else f"one token pays from an acceptance of {least:.2f} on"
        lines.append(f"At batch {never[0].batch} and {never[0].context} tokens guessing does not pay: {needed}.")
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


def _memory_words(asked: PlanQuery, row: PlanRow) -> str:
    memory, usable = row.memory, row.memory.usable / GIB
    if memory.max_batch == 0:
        need = (memory.weights + memory.draft) / GIB
        return (
            f"Does not fit: weights take {need:.1f} GiB of {usable:.1f} usable on each device; "
            "take more devices (--count), fewer bits (--dtype) or a smaller model."
        )
    return (
        f"Batch {row.batch} of {row.context} tokens does not fit: there is room for "
        f"{memory.max_batch * asked.replicas} texts; take more devices (--count), a shorter context or fewer bits "
        "(--kv-dtype fp8)."
    )
