"""What samples say: for each task and arm, and over all tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from .acceptance_by_depth import AcceptanceByDepth
from .intervals import half_width, interval, over_tasks, ratio_of, rounds_over_tasks
from .latency import Latency, token_times
from .measure import Sample, TimedOutput
from .pairs import Group, grouped
from .transcripts import TextRecord

ALL = "all"


@dataclass(frozen=True)
class Cell:
    """One arm on one task, or on all: there it is the mean of the tasks, so that each counts the same.

    `speedup` is plain decoding's time a token over the arm's: over rounds the median of pairs, over texts the
    geometric mean. `speedup_interval` is the 95% t interval for other prompts of the same tasks and other rounds; None
    with fewer than two prompts per task. `noise` is half the width of the 95% t interval over rounds alone, as a share:
    what the machine does to the ratio. Tasks are fixed: the interval of their mean says nothing about other tasks.
    """

    task: str
    temperature: float | None
    arm: str
    tasks: int
    texts: int
    tokens: int
    steps: int
    accepted_per_step: float
    steps_over_plain: float
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    noise: float | None
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    time: dict[str, float]  # shares of the time from asking to the end
    same_text: bool | None  # None where the rule promises the distribution and not the tokens
    differing: tuple[str, ...]
    drafter_failures: int  # steps whose guesses were lost
    batch: int = 1  # texts at once
    places: AcceptanceByDepth = AcceptanceByDepth()
    token_seconds: Latency | None = None  # of each token behind the first
    plain_token_seconds: Latency | None = None
    text_seconds: Latency | None = None  # from asking to the end, all texts that were asked for at once
    plain_text_seconds: Latency | None = None
    ratios: list[list[float]] = field(
        default_factory=list
    )  # by prompt and round, so that an interval can be computed again


@dataclass(frozen=True)
class Result:
    """All that one run found."""

    bench: str
    conditions: dict[str, Any]
    cells: tuple[Cell, ...]
    overall: tuple[Cell, ...]
    complete: bool = True
    prompts: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # items that do not fit into the model's context
    texts: tuple[TextRecord, ...] = ()  # what was asked and written; not part of the JSON

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
            "overall": [asdict(cell) for cell in self.overall],
            "cells": [asdict(cell) for cell in self.cells],
        }


def summarise(samples: Sequence[Sample], arms: Sequence[str]) -> tuple[tuple[Cell, ...], tuple[Cell, ...]]:
    """The cells of each task, and for each arm, temperature and batch size the one over all tasks."""
    groups = grouped(samples, arms)
    cells = [cell_of(group) for group in groups]
    together: dict[tuple[str, float | None, int], list[int]] = {}
    for place, cell in enumerate(cells):
        together.setdefault((cell.arm, cell.temperature, cell.batch), []).append(place)
    overall = [over_all([groups[i] for i in places], [cells[i] for i in places]) for places in together.values()]
    return tuple(cells), tuple(overall)


def cell_of(group: Group) -> Cell:
    """One task."""
    texts, tokens = group.others, sum(len(text.tokens) for text in group.others)
    steps = sum(text.steps for text in texts)
    same = [pair.same for pair in group.pairs if pair.same is not None]
    differing = [f"{item}, turn {turn + 1}" for item, turn in (p.text for p in group.pairs if p.same is False)]
    return Cell(
        task=group.task,
        temperature=group.temperature,
        arm=group.arm,
        tasks=1,
        texts=group.batch * len({pair.text for pair in group.pairs}),
        tokens=tokens,
        steps=steps,
        accepted_per_step=tokens / steps,
        steps_over_plain=steps / sum(text.steps for text in group.plain),
        speedup=ratio_of(group.ratios) if group.ratios else None,
        speedup_interval=interval(group.estimate),
        noise=half_width(group.round_estimate),
        tokens_per_second=_rate(texts),
        plain_tokens_per_second=_rate(group.plain),
        time=_shares(texts),
        same_text=all(same) if same else None,
        differing=tuple(dict.fromkeys(differing)),
        drafter_failures=sum(text.failures for text in texts),
        batch=group.batch,
        ratios=group.ratios,
        **_waits([group]),
    )


def over_all(groups: Sequence[Group], cells: Sequence[Cell]) -> Cell:
    """The mean of one arm's tasks."""
    ratios = [cell.speedup for cell in cells if cell.speedup is not None]
    timed = [group for group in groups if group.ratios]
    same = [cell.same_text for cell in cells if cell.same_text is not None]
    return Cell(
        task=ALL,
        temperature=cells[0].temperature,
        arm=cells[0].arm,
        tasks=len(cells),
        texts=sum(cell.texts for cell in cells),
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
        **_waits(groups),
    )


def _waits(groups: Sequence[Group]) -> dict[str, Any]:
    """How far guesses stood and how long readers waited, all texts in one."""
    ours = [text for group in groups for text in group.others]
    plain = [text for group in groups for text in group.plain]
    return {
        "places": AcceptanceByDepth.total(text.places for text in ours),
        "token_seconds": Latency.of(second for text in ours for second in token_times(text.pace)),
        "plain_token_seconds": Latency.of(second for text in plain for second in token_times(text.pace)),
        "text_seconds": Latency.of(text.whole for text in ours),
        "plain_text_seconds": Latency.of(text.whole for text in plain),
    }


def _rate(texts: Sequence[TimedOutput]) -> float | None:
    """The median of tokens a second."""
    seconds = [text.a_token for text in texts if text.a_token is not None]
    return 1 / median(seconds) if seconds else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _shares(texts: Sequence[TimedOutput]) -> dict[str, float]:
    whole = sum(text.whole for text in texts)
    drafting = sum(text.drafting for text in texts) / whole if whole else 0.0
    running = sum(text.running for text in texts) / whole if whole else 0.0
    return {"drafting": drafting, "running": running, "rest": max(0.0, 1 - drafting - running)}
