"""A full run of `bench offline` or `bench drafters`, which keeps its results if it ends early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import RequestError

from .measure import PLAIN, BenchBackend, ProgressCallback, Sample, Variant, measure
from .prompt import BenchPrompt
from .results import BenchResult, summarize
from .settings import BenchSettings
from .transcripts import transcripts_of
from .workloads import select


@dataclass(frozen=True)
class BenchJob:
    """Variants, prompts and settings of a run; `conditions` are copied into the result."""

    bench: str
    variants: Sequence[Variant]  # without plain decoding, which is added
    prompts: Sequence[BenchPrompt]
    settings: BenchSettings
    conditions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FinishedRun:
    """A result, and the exception that stopped the run early."""

    result: BenchResult
    stopped: BaseException | None = None


def run(job: BenchJob, backend: BenchBackend, progress: ProgressCallback) -> FinishedRun:
    """Measure and summarize; a run stopped by Ctrl-C or an error keeps what was finished."""
    items, left_out = select(job.prompts, job.settings.per_task, lambda item: backend.fits(item, job.settings))
    if not items:
        raise RequestError("workload", "has no prompt that fits into this model's context; lower max_tokens")
    samples: list[Sample] = []
    stopped: BaseException | None = None
    try:
        measure(backend, [PLAIN, *job.variants], items, job.settings, samples, progress)
    except BaseException as error:
        stopped = error
    cells, overall = summarize(samples, [variant.name for variant in job.variants])
    if stopped is not None and not cells:
        raise stopped  # nothing was finished
    result = BenchResult(
        bench=job.bench,
        conditions=job.conditions,
        cells=cells,
        overall=overall,
        complete=stopped is None,
        prompts=tuple(item.id for item in items),
        left_out=tuple(item.id for item in left_out),
        transcripts=transcripts_of(samples, backend.decode),
    )
    return FinishedRun(result, stopped)
