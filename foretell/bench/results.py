"""Results of `bench offline` and `bench drafters`: speedup and metrics by task and variant, and over all tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from foretell.errors import RequestError

from .intervals import (
    Estimate,
    half_width,
    interval,
    over_prompts,
    over_rounds,
    over_tasks,
    ratio_of,
    rounds_over_tasks,
)
from .measure import PLAIN, Sample, TimedOutput
from .metrics import JSON_NAME, AcceptanceByDepth, Latency, as_row, json_name, token_times
from .transcripts import Transcript

OutputKey = tuple[str, int]  # prompt id and turn


@dataclass(frozen=True)
class OutputPair:
    """The plain and the speculative output of one prompt in one round."""

    key: OutputKey
    plain: TimedOutput
    speculative: TimedOutput

    @property
    def ratio(self) -> float | None:
        """Return the speedup over plain decoding; None for an output too short to be timed."""
        plain, other = self.plain.seconds_per_token, self.speculative.seconds_per_token
        return None if plain is None or other is None else plain / other

    @property
    def same(self) -> bool | None:
        """Return whether tokens are equal; None where the rule promises the distribution and not the tokens."""
        return self.plain.tokens == self.speculative.tokens if self.speculative.must_match else None


@dataclass
class PairGroup:
    """The pairs of one task, temperature, batch size and variant."""

    task: str
    temperature: float | None
    batch: int
    variant: str
    pairs: list[OutputPair] = field(default_factory=list)

    @cached_property
    def ratios(self) -> list[list[float]]:
        """Return the ratios of each prompt, one per round."""
        found: dict[OutputKey, list[float]] = {}
        for pair in self.pairs:
            if pair.ratio is not None:
                found.setdefault(pair.key, []).append(pair.ratio)
        return list(found.values())

    @cached_property
    def estimate(self) -> Estimate | None:
        """Estimate the ratio with prompts as random samples of the task; None with fewer than two prompts."""
        return over_prompts(self.ratios)

    @cached_property
    def round_estimate(self) -> Estimate | None:
        """Estimate the ratio for these prompts alone, with random rounds; None with fewer than two rounds."""
        return over_rounds(self.ratios)

    @property
    def plain(self) -> list[TimedOutput]:
        return [pair.plain for pair in self.pairs]

    @property
    def speculative(self) -> list[TimedOutput]:
        return [pair.speculative for pair in self.pairs]


def group_pairs(samples: Sequence[Sample], variants: Sequence[str]) -> list[PairGroup]:
    """Pair the outputs of each variant with plain ones, grouped by task, temperature, batch size and variant.

    An output without a plain counterpart, as in a stopped run, is left out.
    """
    plain = {_pair_key(each): each.output for each in samples if each.variant == PLAIN.name}
    groups: dict[tuple[str, float | None, int, str], PairGroup] = {}
    for each in samples:
        if each.variant == PLAIN.name or _pair_key(each) not in plain:
            continue
        key = (each.job.task, each.temperature, each.job.batch_size, each.variant)
        pair = OutputPair((each.job.prompt_id, each.job.turn), plain[_pair_key(each)], each.output)
        groups.setdefault(key, PairGroup(*key)).pairs.append(pair)
    tasks = list(dict.fromkeys(group.task for group in groups.values()))
    return sorted(
        groups.values(), key=lambda group: (tasks.index(group.task), group.batch, variants.index(group.variant))
    )


def _pair_key(sample: Sample) -> tuple[str, int, int, float | None, int]:
    return sample.job.prompt_id, sample.job.turn, sample.job.batch_size, sample.temperature, sample.round


ALL = "all"


@dataclass(frozen=True)
class TaskCell:
    """Metrics of one variant on one task, or the mean over all tasks with equal weights.

    `speedup` is the time per token of plain decoding over that of the variant: the median of pairs over rounds, the
    geometric mean over prompts. `speedup_interval` is the 95% t interval for other prompts of the same tasks and other
    rounds; None with fewer than two prompts per task. `noise` is half the relative width of the 95% t interval over
    rounds alone, the noise of the machine. Tasks are fixed: the interval of their mean does not cover other tasks.
    """

    task: str
    temperature: float | None
    variant: str = field(metadata=json_name("arm"))
    tasks: int
    sequences: int = field(metadata=json_name("texts"))
    tokens: int
    steps: int
    accepted_per_step: float
    steps_over_plain: float
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    noise: float | None
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    time: dict[str, float]  # fractions of the time from submission to the end
    same_text: bool | None  # None where the rule promises the distribution and not the tokens
    differing: tuple[str, ...]
    drafter_failures: int  # steps whose draft was lost
    batch: int = 1  # batch size
    acceptance: AcceptanceByDepth = field(default=AcceptanceByDepth(), metadata=json_name("places"))
    token_seconds: Latency | None = None  # time per token after the first
    plain_token_seconds: Latency | None = None
    # From submission to the end of the batch.
    request_seconds: Latency | None = field(default=None, metadata=json_name("text_seconds"))
    plain_request_seconds: Latency | None = field(default=None, metadata=json_name("plain_text_seconds"))
    decode_seconds: Latency | None = None  # from the first token to the end of the batch
    plain_decode_seconds: Latency | None = None
    ratios: list[list[float]] = field(default_factory=list)  # by prompt and round, to recompute intervals from


@dataclass(frozen=True)
class BenchResult:
    """The result of one run."""

    bench: str
    conditions: dict[str, Any]
    cells: tuple[TaskCell, ...]
    overall: tuple[TaskCell, ...]
    complete: bool = True
    prompts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # prompts that do not fit the model's context
    transcripts: tuple[Transcript, ...] = ()  # prompts and outputs; not part of the JSON

    @property
    def same_text(self) -> bool:
        return all(cell.same_text is not False for cell in self.cells)

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            **self.conditions,
            "complete": self.complete,
            "prompts": list(self.prompts),
            "left_out": list(self.left_out),
            "same_text": self.same_text,
            "overall": [as_row(cell) for cell in self.overall],
            "cells": [as_row(cell) for cell in self.cells],
        }


def summarize(samples: Sequence[Sample], variants: Sequence[str]) -> tuple[tuple[TaskCell, ...], tuple[TaskCell, ...]]:
    """Return the cells of each task, and their means by variant, temperature and batch size."""
    groups = group_pairs(samples, variants)
    cells = [task_cell(group) for group in groups]
    by_setting: dict[tuple[str, float | None, int], list[int]] = {}
    for index, cell in enumerate(cells):
        by_setting.setdefault((cell.variant, cell.temperature, cell.batch), []).append(index)
    overall = [
        mean_over_tasks([groups[i] for i in indices], [cells[i] for i in indices]) for indices in by_setting.values()
    ]
    return tuple(cells), tuple(overall)


def task_cell(group: PairGroup) -> TaskCell:
    """Summarize the pairs of one task."""
    outputs = group.speculative
    tokens = sum(len(output.tokens) for output in outputs)
    steps = sum(output.steps for output in outputs)
    same = [pair.same for pair in group.pairs if pair.same is not None]
    differing = [f"{item}, turn {turn + 1}" for item, turn in (p.key for p in group.pairs if p.same is False)]
    return TaskCell(
        task=group.task,
        temperature=group.temperature,
        variant=group.variant,
        tasks=1,
        sequences=group.batch * len({pair.key for pair in group.pairs}),
        tokens=tokens,
        steps=steps,
        accepted_per_step=tokens / steps,
        steps_over_plain=steps / sum(output.steps for output in group.plain),
        speedup=ratio_of(group.ratios) if group.ratios else None,
        speedup_interval=interval(group.estimate),
        noise=half_width(group.round_estimate),
        tokens_per_second=_rate(outputs),
        plain_tokens_per_second=_rate(group.plain),
        time=_shares(outputs),
        same_text=all(same) if same else None,
        differing=tuple(dict.fromkeys(differing)),
        drafter_failures=sum(output.drafter_failures for output in outputs),
        batch=group.batch,
        ratios=group.ratios,
        **_distributions([group]),
    )


def mean_over_tasks(groups: Sequence[PairGroup], cells: Sequence[TaskCell]) -> TaskCell:
    """Average the tasks of one variant."""
    ratios = [cell.speedup for cell in cells if cell.speedup is not None]
    timed = [group for group in groups if group.ratios]
    same = [cell.same_text for cell in cells if cell.same_text is not None]
    return TaskCell(
        task=ALL,
        temperature=cells[0].temperature,
        variant=cells[0].variant,
        tasks=len(cells),
        sequences=sum(cell.sequences for cell in cells),
        tokens=sum(cell.tokens for cell in cells),
        steps=sum(cell.steps for cell in cells),
        accepted_per_step=fmean(cell.accepted_per_step for cell in cells),
        steps_over_plain=fmean(cell.steps_over_plain for cell in cells),
        speedup=math.exp(fmean(map(math.log, ratios))) if ratios else None,
        speedup_interval=interval(over_tasks([group.ratios for group in timed])),
        noise=half_width(rounds_over_tasks([group.ratios for group in timed])),
        tokens_per_second=_mean(cell.tokens_per_second for cell in cells),
        plain_tokens_per_second=_mean(cell.plain_tokens_per_second for cell in cells),
        time={name: fmean(cell.time[name] for cell in cells) for name in cells[0].time},
        same_text=all(same) if same else None,
        differing=tuple(name for cell in cells for name in cell.differing),
        drafter_failures=sum(cell.drafter_failures for cell in cells),
        batch=cells[0].batch,
        **_distributions(groups),
    )


def _distributions(groups: Sequence[PairGroup]) -> dict[str, Any]:
    """Return acceptance by depth and latencies over all outputs, as fields of a cell."""
    speculative = [output for group in groups for output in group.speculative]
    plain = [output for group in groups for output in group.plain]
    return {
        "acceptance": AcceptanceByDepth.total(output.acceptance for output in speculative),
        "token_seconds": Latency.of(second for output in speculative for second in token_times(output.step_times)),
        "plain_token_seconds": Latency.of(second for output in plain for second in token_times(output.step_times)),
        "request_seconds": Latency.of(output.total_seconds for output in speculative),
        "plain_request_seconds": Latency.of(output.total_seconds for output in plain),
        "decode_seconds": Latency.of(_decode_times(speculative)),
        "plain_decode_seconds": Latency.of(_decode_times(plain)),
    }


def _decode_times(outputs: Sequence[TimedOutput]) -> list[float]:
    """Return the decode times of outputs with more than one token."""
    return [output.decode_seconds for output in outputs if output.seconds_per_token is not None]


def _rate(outputs: Sequence[TimedOutput]) -> float | None:
    """Return the median of tokens per second."""
    seconds = [output.seconds_per_token for output in outputs if output.seconds_per_token is not None]
    return 1 / median(seconds) if seconds else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _shares(outputs: Sequence[TimedOutput]) -> dict[str, float]:
    total = sum(output.total_seconds for output in outputs)
    drafting = sum(output.draft_seconds for output in outputs) / total if total else 0.0
    running = sum(output.target_seconds for output in outputs) / total if total else 0.0
    return {"drafting": drafting, "running": running, "rest": max(0.0, 1 - drafting - running)}


NOT_CONDITIONS = ("bench", "complete", "prompts", "left_out", "same_text", "overall", "cells")
LATENCIES = (  # JSON names
    "token_seconds",
    "plain_token_seconds",
    "text_seconds",
    "plain_text_seconds",
    "decode_seconds",
    "plain_decode_seconds",
)


def read_result(path: Path) -> BenchResult:
    """Read the result of `bench offline` or `bench drafters` from a file written by --out."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError("run", f"there is no {path}; write one with foretell bench offline --out {path}") from None
    except ValueError as error:
        raise RequestError("run", f"{path} is not JSON: {error}") from None
    try:
        return result_from_json(value)
    except (KeyError, TypeError, AttributeError):
        raise RequestError(
            "run", f"{path} is not a result of bench offline or bench drafters of this version"
        ) from None


def result_from_json(value: Mapping[str, Any]) -> BenchResult:
    """Read back a result that `BenchResult.as_json` returned."""
    return BenchResult(
        bench=value["bench"],
        conditions={name: each for name, each in value.items() if name not in NOT_CONDITIONS},
        cells=tuple(map(cell_from_json, value["cells"])),
        overall=tuple(map(cell_from_json, value["overall"])),
        complete=value["complete"],
        prompts=tuple(value["prompts"]),
        left_out=tuple(value["left_out"]),
    )


def cell_from_json(value: Mapping[str, Any]) -> TaskCell:
    """Invert `as_row` for a cell."""
    bounds = value["speedup_interval"]
    changed = {
        "speedup_interval": None if bounds is None else (bounds[0], bounds[1]),
        "differing": tuple(value["differing"]),
        "places": AcceptanceByDepth(*(tuple(value["places"][name]) for name in ("reached", "stood"))),
    }
    row = {**value, **changed, **{name: _latency(value.get(name)) for name in LATENCIES}}
    names = {each.metadata.get(JSON_NAME, each.name): each.name for each in fields(TaskCell)}
    return TaskCell(**{names[name]: each for name, each in row.items()})


def _latency(value: Mapping[str, Any] | None) -> Latency | None:
    return None if value is None else Latency(**{**value, "curve": tuple(value["curve"])})
