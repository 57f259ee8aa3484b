"""What samples say: for each task and arm, and over all tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from foretell.bench.intervals import (
    Estimate,
    half_width,
    interval,
    over_prompts,
    over_rounds,
    over_tasks,
    ratio_of,
    rounds_over_tasks,
)
from foretell.bench.latency import AcceptanceByDepth, Latency, token_times
from foretell.bench.measure import PLAIN, Sample, TimedOutput
from foretell.bench.transcripts import TextRecord
from foretell.errors import RequestError

Text = tuple[str, int]  # an item and its turn


@dataclass(frozen=True)
class Pair:
    """One text in one round."""

    text: Text
    plain: TimedOutput
    other: TimedOutput

    @property
    def ratio(self) -> float | None:
        """How many times faster than plain decoding; None for a text too short to be timed."""
        plain, other = self.plain.a_token, self.other.a_token
        return None if plain is None or other is None else plain / other

    @property
    def same(self) -> bool | None:
        """None where the rule promises the distribution and not the tokens."""
        return self.plain.tokens == self.other.tokens if self.other.promised else None


@dataclass
class Group:
    """The pairs of one task, temperature, batch size and arm."""

    task: str
    temperature: float | None
    batch: int
    arm: str
    pairs: list[Pair] = field(default_factory=list)

    @cached_property
    def ratios(self) -> list[list[float]]:
        """For each text its ratios, one a round."""
        found: dict[Text, list[float]] = {}
        for pair in self.pairs:
            if pair.ratio is not None:
                found.setdefault(pair.text, []).append(pair.ratio)
        return list(found.values())

    @cached_property
    def estimate(self) -> Estimate | None:
        """The ratio with prompts as random draws of the task; None with fewer than two prompts."""
        return over_prompts(self.ratios)

    @cached_property
    def round_estimate(self) -> Estimate | None:
        """The ratio for these prompts alone, with rounds as random; None with fewer than two rounds."""
        return over_rounds(self.ratios)

    @property
    def plain(self) -> list[TimedOutput]:
        return [pair.plain for pair in self.pairs]

    @property
    def others(self) -> list[TimedOutput]:
        return [pair.other for pair in self.pairs]


def grouped(samples: Sequence[Sample], arms: Sequence[str]) -> list[Group]:
    """Pairs by task, arm, temperature and batch size, arms in the order given.

    What has no plain partner, as in a run that was stopped, is left out.
    """
    plain = {_occasion(each): each.written for each in samples if each.arm == PLAIN.name}
    groups: dict[tuple[str, float | None, int, str], Group] = {}
    for each in samples:
        if each.arm == PLAIN.name or _occasion(each) not in plain:
            continue
        key = (each.job.task, each.temperature, each.job.batch, each.arm)
        pair = Pair((each.job.item, each.job.turn), plain[_occasion(each)], each.written)
        groups.setdefault(key, Group(*key)).pairs.append(pair)
    tasks = list(dict.fromkeys(group.task for group in groups.values()))
    return sorted(groups.values(), key=lambda group: (tasks.index(group.task), group.batch, arms.index(group.arm)))


def _occasion(sample: Sample) -> tuple[str, int, int, float | None, int]:
    return sample.job.item, sample.job.turn, sample.job.batch, sample.temperature, sample.round


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


NOT_CONDITIONS = ("bench", "complete", "prompts", "left_out", "same_text", "overall", "cells")
WAITS = ("token_seconds", "plain_token_seconds", "text_seconds", "plain_text_seconds")


def read_result(path: Path) -> Result:
    """The result of `bench offline` or `bench drafters` in a file that --out wrote."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError("run", f"there is no {path}; write one with foretell bench offline --out {path}") from None
    except ValueError as error:
        raise RequestError("run", f"{path} is not JSON: {error}") from None
    try:
        return result_from_json(value)
    except (KeyError, TypeError, AttributeError):
        raise RequestError("run", f"{path} is no run of bench offline or bench drafters of this version") from None


def result_from_json(value: Mapping[str, Any]) -> Result:
    """What `Result.as_json` gave."""
    return Result(
        value["bench"],
        {name: each for name, each in value.items() if name not in NOT_CONDITIONS},
        tuple(map(cell_from_json, value["cells"])),
        tuple(map(cell_from_json, value["overall"])),
        value["complete"],
        tuple(value["prompts"]),
        tuple(value["left_out"]),
    )


def cell_from_json(value: Mapping[str, Any]) -> Cell:
    """One row of it."""
    bounds = value["speedup_interval"]
    changed = {
        "speedup_interval": None if bounds is None else (bounds[0], bounds[1]),
        "differing": tuple(value["differing"]),
        "places": AcceptanceByDepth(*(tuple(value["places"][name]) for name in ("reached", "stood"))),
    }
    return Cell(**{**value, **changed, **{name: _latency(value[name]) for name in WAITS}})


def _latency(value: Mapping[str, Any] | None) -> Latency | None:
    return None if value is None else Latency(**{**value, "curve": tuple(value["curve"])})
