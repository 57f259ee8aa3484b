"""The same prompts through several peers, who take turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from foretell.bench.intervals import Pairs, interval, over_prompts, over_tasks, ratio_of, shown
from foretell.bench.latency import Latency
from foretell.bench.measure import Watch, rotated
from foretell.bench.peers import Asked, Peer, Reply
from foretell.bench.prompt import BenchPrompt
from foretell.errors import RequestError

ALL = "all"


@dataclass(frozen=True)
class ComparePlan:
    """How much is asked of each peer. The first round warms up and is dropped."""

    max_tokens: int = 128
    temperature: float | None = None  # None: as each request says, else 0
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("max_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"must be 1 or more, not {getattr(self, name)}")

    def asked(self, item: BenchPrompt) -> Asked:
        own = float(item.sampling.get("temperature", 0.0))
        return Asked(min(item.max_tokens, self.max_tokens), own if self.temperature is None else self.temperature)


QUICK = ComparePlan(max_tokens=32, rounds=1)


@dataclass(frozen=True)
class CompareSample:
    """An item as one peer wrote it in one round."""

    item: BenchPrompt
    round: int
    peer: str
    reply: Reply


@dataclass(frozen=True)
class CompareCell:
    """One peer on one task, or on all: there it is the mean of the tasks.

    `speedup` is the baseline's time a token over this peer's, by pairs of the same prompt and round. `same_text` tells
    whether it wrote what the baseline did: other weights or another rounding may well write something else.
    """

    task: str
    arm: str
    texts: int
    errors: int
    reasons: dict[str, int]
    tokens: int
    tokens_per_second: float | None
    first_token: Latency | None
    accepted_per_step: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    same_text: bool | None
    same_texts: int
    ratios: Pairs = ()  # by prompt and round, so that an interval can be computed again


@dataclass(frozen=True)
class CompareFindings:
    """All that one run found, and what ended it before its time."""

    conditions: dict[str, Any]
    baseline: str
    cells: tuple[CompareCell, ...]
    overall: tuple[CompareCell, ...]
    samples: tuple[CompareSample, ...] = field(default=(), repr=False)
    stopped: BaseException | None = None

    @property
    def errors(self) -> int:
        return sum(cell.errors for cell in self.cells)

    @property
    def same_text(self) -> bool | None:
        """Whether everybody wrote what the baseline did; None where there is nobody else to tell."""
        same = [cell.same_text for cell in self.overall if cell.arm != self.baseline and cell.same_text is not None]
        return all(same) if same else None

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "compare",
            **self.conditions,
            "baseline": self.baseline,
            "complete": self.stopped is None,
            "errors": self.errors,
            "same_text": self.same_text,
            "overall": [asdict(cell) for cell in self.overall],
            "cells": [asdict(cell) for cell in self.cells],
        }


def run_compare(
    peers: Sequence[Peer],
    items: Sequence[BenchPrompt],
    plan: ComparePlan,
    baseline: str,
    watch: Watch,
    conditions: dict[str, Any],
) -> CompareFindings:
    """Every round, every prompt, every peer. Whatever stops it leaves what was found until then."""
    samples: list[CompareSample] = []
    stopped: BaseException | None = None
    total = (plan.rounds + 1) * len(items)
    try:
        for done in range(total):
            number, place = divmod(done, len(items))
            watch(done, total, f"{items[place].task}, {f'round {number}' if number else 'warming up'}")
            for peer in rotated(peers, place + number):
                reply = peer.write(items[place], plan.asked(items[place]))
                if number:
                    samples.append(CompareSample(items[place], number, peer.name, reply))
        watch(total, total, "done")
    except BaseException as error:
        if not samples:
            raise  # there is nothing to leave
        stopped = error
    names = [peer.name for peer in peers]
    cells, overall = summarise(samples, names, baseline)
    return CompareFindings(conditions, baseline, cells, overall, tuple(samples), stopped)


def summarise(
    samples: Sequence[CompareSample], peers: Sequence[str], baseline: str
) -> tuple[tuple[CompareCell, ...], tuple[CompareCell, ...]]:
    """The cells of each task, and for each peer the one over all tasks."""
    base = {(each.item.id, each.round): each.reply for each in samples if each.peer == baseline}
    tasks = list(dict.fromkeys(each.item.task for each in samples))
    groups = [
        _Group(task, peer, [each for each in samples if each.item.task == task and each.peer == peer], base)
        for task in tasks
        for peer in peers
    ]
    groups = [group for group in groups if group.samples]
    by_peer = {peer: [group for group in groups if group.peer == peer] for peer in peers}
    overall = [over_all(mine) for mine in by_peer.values() if mine]
    return tuple(group.cell() for group in groups), tuple(overall)


@dataclass(frozen=True)
class _Group:
    """One peer's answers to the prompts of one task, and the baseline's to the same."""

    task: str
    peer: str
    samples: Sequence[CompareSample]
    base: dict[tuple[str, int], Reply]

    @property
    def good(self) -> list[CompareSample]:
        return [each for each in self.samples if each.reply.error is None]

    @property
    def ratios(self) -> list[list[float]]:
        """For each prompt its ratios, one a round; what has no partner is left out."""
        found: dict[str, list[float]] = {}
        for each in self.good:
            base = self.base.get((each.item.id, each.round))
            ours, theirs = each.reply.a_token, None if base is None else base.a_token
            if ours is not None and theirs is not None:
                found.setdefault(each.item.id, []).append(theirs / ours)
        return list(found.values())

    @property
    def same(self) -> list[bool]:
        """For each prompt whether it was answered as the baseline did."""
        first = {each.item.id: each for each in reversed(self.good)}
        pairs = [(each, self.base.get((name, each.round))) for name, each in first.items()]
        return [each.reply.text == base.text for each, base in pairs if base is not None and base.error is None]

    def cell(self) -> CompareCell:
        ratios, same = self.ratios, self.same
        return CompareCell(
            task=self.task,
            arm=self.peer,
            speedup=ratio_of(ratios) if ratios else None,
            speedup_interval=interval(over_prompts(ratios)),
            same_text=all(same) if same else None,
            same_texts=sum(same),
            ratios=ratios,
            **counts([self]),
        )


def over_all(groups: Sequence[_Group]) -> CompareCell:
    """The mean of one peer's tasks."""
    cells = [group.cell() for group in groups]
    ratios = [cell.speedup for cell in cells if cell.speedup is not None]
    same = [cell.same_text for cell in cells if cell.same_text is not None]
    return CompareCell(
        task=ALL,
        arm=groups[0].peer,
        speedup=math.exp(fmean(map(math.log, ratios))) if ratios else None,
        speedup_interval=interval(over_tasks([group.ratios for group in groups if group.ratios])),
        same_text=all(same) if same else None,
        same_texts=sum(cell.same_texts for cell in cells),
        **counts(groups)
        | {
            "tokens_per_second": _mean(cell.tokens_per_second for cell in cells),
            "accepted_per_step": _mean(cell.accepted_per_step for cell in cells),
        },
    )


def counts(groups: Sequence[_Group]) -> dict[str, Any]:
    """What is simply counted over answers."""
    samples = [each for group in groups for each in group.samples]
    good = [each.reply for group in groups for each in group.good]
    times = [reply.a_token for reply in good if reply.a_token is not None]
    told = [reply for reply in good if reply.steps]
    return {
        "texts": len({each.item.id for each in samples}),
        "errors": len(samples) - len(good),
        "reasons": dict(Counter(each.reply.error for each in samples if each.reply.error is not None)),
        "tokens": sum(reply.tokens for reply in good),
        "tokens_per_second": 1 / median(times) if times else None,
        "first_token": Latency.of(reply.first for reply in good if reply.first is not None),
        "accepted_per_step": _ratio(told, lambda reply: reply.tokens, lambda reply: reply.steps or 0.0),
    }


def _ratio(replies: Sequence[Reply], over: Callable[[Reply], float], under: Callable[[Reply], float]) -> float | None:
    return sum(map(over, replies)) / sum(map(under, replies)) if replies else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


HEAD = ("task", "who", "tokens/s", "first token p50 / p90, ms", "accepted per step", "ratio to {}", "same text as {}")


def markdown(findings: CompareFindings) -> str:
    """A row for each task and peer."""
    head = [word.format(findings.baseline) for word in HEAD]
    lines = [head, ["---"] * 2 + ["---:"] * 5, *map(_row, (*findings.cells, *findings.overall))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remarks(findings: CompareFindings) -> list[str]:
    """What a reader of the table must know."""
    lines = [
        f"Tokens a second behind the first words, medians; the ratio is {findings.baseline}'s time a token over the "
        "peer's, by pairs of the same prompt and round, with a 95% t interval over prompts and rounds.",
        "Accepted per step counts the target's own token; - where a peer does not tell. Peers that round their weights "
        "otherwise may well write another text.",
    ]
    for cell in findings.cells:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in cell.reasons.items())
        if reasons:
            lines.append(f"ERRORS, {cell.arm}, {cell.task}: {reasons}.")
    if findings.stopped is not None:
        lines.append("Stopped before the end: the table has what was finished.")
    return lines


def _row(cell: CompareCell) -> list[str]:
    first = cell.first_token
    return [
        "all" if cell.task == ALL else cell.task,
        cell.arm,
        number(cell.tokens_per_second, 1),
        "-" if first is None else f"{1000 * first.p50:.0f} / {1000 * first.p90:.0f}",
        number(cell.accepted_per_step, 2),
        shown(cell.speedup, cell.speedup_interval),
        "-" if cell.same_text is None else f"{cell.same_texts} of {cell.texts}",
    ]


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
