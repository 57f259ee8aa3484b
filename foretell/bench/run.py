"""A whole run, and what there is of it if it ends early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import RequestError

from .measure import PLAIN, Backend, Sample, Variant, Watch, measure
from .plan import Plan
from .prompt import BenchPrompt
from .results import Result, summarise
from .transcripts import records
from .workloads import take


@dataclass(frozen=True)
class BenchJob:
    """What is to be measured; `conditions` go into the result as they are."""

    bench: str
    arms: Sequence[Variant]  # plain decoding is added
    items: Sequence[BenchPrompt]
    plan: Plan
    conditions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """A result, and what ended the run before its time."""

    result: Result
    stopped: BaseException | None = None


def run(order: BenchJob, stage: Backend, watch: Watch) -> Finished:
    """Measure. Whatever stops it, Ctrl-C or a fault, leaves what was found until then."""
    items, left_out = take(order.items, order.plan.per_task, lambda item: stage.fits(item, order.plan))
    if not items:
        raise RequestError("workload", "has no prompt that fits into this model's context; lower max_tokens")
    samples: list[Sample] = []
    stopped: BaseException | None = None
    try:
        measure(stage, [PLAIN, *order.arms], items, order.plan, samples, watch)
    except BaseException as error:
        stopped = error
    cells, overall = summarise(samples, [arm.name for arm in order.arms])
    if stopped is not None and not cells:
        raise stopped  # there is nothing to leave
    result = Result(
        order.bench,
        order.conditions,
        cells,
        overall,
        complete=stopped is None,
        prompts=tuple(item.id for item in items),
        left_out=tuple(item.id for item in left_out),
        texts=records(samples, stage.spell),
    )
    return Finished(result, stopped)
