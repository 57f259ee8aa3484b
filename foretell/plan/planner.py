"""Planner: step time, speedup, memory and price for each batch size and context length of a query."""

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
    """Deployment, batch sizes, context lengths and acceptance that a plan is for."""

    target: DeployedModel
    drafter: DrafterCost
    devices: int
    acceptance: float
    batch_sizes: Sequence[int]  # over all devices
    contexts: Sequence[int]
    max_length: int  # longest draft to consider
    length: int | None = None  # fixed draft length; None takes the best one

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise RequestError("acceptance", f"must be between 0 and 1, not {self.acceptance:g}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise RequestError("batch", "must be 1 or more, such as 8, 1,8,32 or 1..64")
        if not self.contexts or min(self.contexts) < 1:
            raise RequestError("context", "must be 1 or more, such as 512, 8k or 1k,8k")
        if max(self.contexts) > self.target.shape.context:
            most, name = self.target.shape.context, self.target.shape.name
            raise RequestError("context", f"{max(self.contexts)} exceeds the context length of {name}, {most}")
        if self.devices % self.target.tensor_parallel:
            raise RequestError(
                "tensor_parallel", f"{self.target.tensor_parallel} must divide the count, {self.devices}"
            )

    @property
    def replicas(self) -> int:
        """Return the number of copies of the model."""
        return self.devices // self.target.tensor_parallel

    @property
    def dollars_per_hour(self) -> float:
        return self.devices * self.target.device.price

    def plain_step(self, batch: int, context: int) -> StepEstimate:
        """Return the estimate of a step without drafts."""
        return self.step(batch, context, 0)

    def step(self, batch: int, context: int, length: int) -> StepEstimate:
        """Return the estimate of a step with drafts of `length` tokens."""
        return estimate_step(self.target, self.drafter, self.per_replica(batch), context, length, self.acceptance)

    def best_step(self, batch: int, context: int, acceptance: float) -> StepEstimate:
        """Return the estimate of a step with the best draft length at this acceptance."""
        return best_step(self.target, self.drafter, self.per_replica(batch), context, self.max_length, acceptance)

    def per_replica(self, batch: int) -> float:
        """Return the sequences on one replica."""
        return max(1.0, batch / self.replicas)


MILLION, HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class PlanRow:
    """The plan for one batch size at one context length."""

    batch: int
    context: int
    plain: StepEstimate
    speculative: StepEstimate
    break_even: float | None  # acceptance at which the chosen length pays, or a length of 1 if none pays
    memory: PlannedMemory
    replicas: int
    dollars_per_hour: float

    @property
    def speedup(self) -> float:
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    def tokens_per_second(self, step: StepEstimate) -> float:
        """Return the throughput of the whole batch."""
        return self.batch * step.tokens_per_second

    def dollars(self, step: StepEstimate) -> float:
        """Return the price of a million tokens at this batch size."""
        return self.dollars_per_hour / HOUR / self.tokens_per_second(step) * MILLION

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


def plan_row(query: PlanQuery, batch: int, context: int) -> PlanRow:
    """Return the plan for one batch, split evenly over the replicas."""
    plain = query.plain_step(batch, context)
    if query.length is None:
        speculative = query.best_step(batch, context, query.acceptance)
    else:
        speculative = query.step(batch, context, query.length)
    compared = speculative if speculative.length else query.step(batch, context, 1)
    memory = plan_memory(query.target, query.drafter, -(-batch // query.replicas), context, speculative.length)
    return PlanRow(
        batch=batch,
        context=context,
        plain=plain,
        speculative=speculative,
        break_even=break_even(plain, compared),
        memory=memory,
        replicas=query.replicas,
        dollars_per_hour=query.dollars_per_hour,
    )


PLOT_LENGTHS = (1, 2, 4, 8)
PLOT_RATES = tuple(rate / 20 for rate in range(6, 20))


@dataclass(frozen=True)
class PlanResult:
    """A plan: its rows, and the curves to plot."""

    query: PlanQuery
    rows: tuple[PlanRow, ...]
    splits: tuple[tuple[int, PlanRow], ...]  # tensor parallel size, and the row of the largest batch
    by_length: dict[int, dict[int, float]]  # speedup by batch and draft length at the first context
    by_acceptance: dict[int, dict[float, float]]  # speedup of the best length by batch and acceptance
    calibration: EfficiencyFit | None = None

    def as_json(self) -> dict[str, Any]:
        query, target = self.query, self.query.target
        return {
            "plan": "steps",
            "target": {"name": target.shape.name, "weights": target.shape.weights, "dtype": target.precision.name},
            "draft": query.drafter.name,
            "gpu": target.device.name,
            "count": query.devices,
            "tensor_parallel": target.tensor_parallel,
            "acceptance": query.acceptance,
            "dollars_per_hour": query.dollars_per_hour,
            "efficiency": target.efficiency.as_json(),
            "calibration": None if self.calibration is None else self.calibration.as_json(),
            "rows": [row.as_json() for row in self.rows],
            "tensor_parallel_rows": [{"tensor_parallel": n, **row.as_json()} for n, row in self.splits],
            "step_parts_ms": {
                name: 1e3 * value
                for name, value in asdict(target.step(self.rows[0].batch, 1, self.rows[0].context)).items()
            },
            "remarks": remarks(self),
        }


def make_plan(query: PlanQuery, calibration: EfficiencyFit | None = None) -> PlanResult:
    """Return the plan of a query. A `calibration` is quoted in the remarks."""
    rows = tuple(plan_row(query, batch, context) for context in query.contexts for batch in query.batch_sizes)
    context = query.contexts[0]
    by_length = {batch: _by_length(query, batch, context) for batch in query.batch_sizes}
    plotted = dict.fromkeys((query.batch_sizes[0], query.batch_sizes[-1]))
    by_acceptance = {batch: _by_acceptance(query, batch, context) for batch in plotted}
    return PlanResult(query, rows, tuple(_splits(query)), by_length, by_acceptance, calibration)


def _by_length(query: PlanQuery, batch: int, context: int) -> dict[int, float]:
    plain = query.plain_step(batch, context)
    lengths = [length for length in PLOT_LENGTHS if length <= max(query.max_length, 1)]
    return {
        length: query.step(batch, context, length).tokens_per_second / plain.tokens_per_second for length in lengths
    }


def _by_acceptance(query: PlanQuery, batch: int, context: int) -> dict[float, float]:
    plain = query.plain_step(batch, context)
    return {
        rate: query.best_step(batch, context, rate).tokens_per_second / plain.tokens_per_second for rate in PLOT_RATES
    }


def _splits(query: PlanQuery) -> list[tuple[int, PlanRow]]:
    """Return the row of the largest batch for every tensor parallel size that divides the devices."""
    found = []
    for split in range(1, query.devices + 1):
        if query.devices % split or query.target.shape.heads % split:
            continue
        target, drafter = replace(query.target, tensor_parallel=split), query.drafter.with_target_split(split)
        other = replace(query, target=target, drafter=drafter)
        found.append((split, plan_row(other, query.batch_sizes[-1], query.contexts[0])))
    return found if len(found) > 1 else []


def remarks(found: PlanResult) -> list[str]:
    """Return notes on memory, break-even and calibration."""
    lines = []
    tight = [row for row in found.rows if not row.memory.fits]
    if tight:
        lines.append(_memory_remark(found.query, tight[0]))
    never = [row for row in found.rows if row.speculative.length == 0]
    if never:
        least = never[0].break_even
        needed = "no acceptance is enough" if least is None else f"one token pays from an acceptance of {least:.2f} on"
        lines.append(f"At batch {never[0].batch} and {never[0].context} tokens speculation does not pay: {needed}.")
    if found.calibration is None:
        lines.append("Not calibrated: engine constants are those of one H200 or CPU; see --calibrate.")
    else:
        fit = found.calibration
        lines.append(
            f"Calibrated on {fit.steps} measured steps, reproduced within {fit.worst_error:.1%} "
            f"(mean {fit.mean_error:.1%})."
        )
        lines += fit.warnings
    return lines


def _memory_remark(query: PlanQuery, row: PlanRow) -> str:
    memory, usable = row.memory, row.memory.usable / GIB
    if memory.max_batch == 0:
        need = (memory.weights + memory.draft) / GIB
        return (
            f"Does not fit: weights take {need:.1f} GiB of {usable:.1f} usable on each device; "
            "take more devices (--count), fewer bits (--dtype) or a smaller model."
        )
    return (
        f"Batch {row.batch} of {row.context} tokens does not fit: there is room for "
        f"{memory.max_batch * query.replicas} sequences; take more devices (--count), a shorter context or fewer bits "
        "(--kv-dtype fp8)."
    )
