"""`bench compare`: the same prompts through several peers in turn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from foretell.utils.report_table import ReportTable

from .intervals import INTERVAL, Pairs, compared, interval, over_prompts, over_tasks, ratio_of
from .measure import ProgressCallback, rotated
from .metrics import Latency, as_row, json_name
from .peers import Peer, PeerReply
from .prompt import BenchPrompt
from .settings import CompareSettings

ALL = "all"


@dataclass(frozen=True)
class CompareSample:
    """The reply of one peer to one prompt in one round."""

    prompt: BenchPrompt
    round: int
    peer: str
    reply: PeerReply


@dataclass(frozen=True)
class CompareCell:
    """The result of one peer on one task, or its mean over all tasks.

    `speedup` is the time per token of the baseline over that of this peer, by pairs of the same prompt and round.
    `same_text` compares the output with that of the baseline; other weights or another quantization may well differ.
    """

    task: str
    peer: str = field(metadata=json_name("arm"))
    prompts: int = field(metadata=json_name("texts"))
    errors: int
    reasons: dict[str, int]
    tokens: int
    tokens_per_second: float | None
    first_token: Latency | None
    accepted_per_step: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    same_text: bool | None
    num_same: int = field(metadata=json_name("same_texts"))
    ratios: Pairs = ()  # by prompt and round, to recompute intervals from


@dataclass(frozen=True)
class CompareResult:
    """The result of one run, and the exception that stopped it early."""

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
        """Return whether all peers gave the output of the baseline; None without other peers."""
        same = [cell.same_text for cell in self.overall if cell.peer != self.baseline and cell.same_text is not None]
        return all(same) if same else None

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": "compare",
            **self.conditions,
            "baseline": self.baseline,
            "complete": self.stopped is None,
            "errors": self.errors,
            "same_text": self.same_text,
            "overall": [as_row(cell) for cell in self.overall],
            "cells": [as_row(cell) for cell in self.cells],
        }


def run_compare(
    peers: Sequence[Peer],
    items: Sequence[BenchPrompt],
    settings: CompareSettings,
    baseline: str,
    progress: ProgressCallback,
    conditions: dict[str, Any],
) -> CompareResult:
    """Send every prompt to every peer in every round; a stopped run keeps what was finished."""
    samples: list[CompareSample] = []
    stopped: BaseException | None = None
    total = (settings.rounds + 1) * len(items)
    try:
        for done in range(total):
            number, index = divmod(done, len(items))
            progress(done, total, f"{items[index].task}, {f'round {number}' if number else 'warm-up'}")
            for peer in rotated(peers, index + number):
                reply = peer.generate(items[index], settings.request_params(items[index]))
                if number:
                    samples.append(CompareSample(items[index], number, peer.name, reply))
        progress(total, total, "done")
    except BaseException as error:
        if not samples:
            raise  # nothing was finished
        stopped = error
    names = [peer.name for peer in peers]
    cells, overall = summarize(samples, names, baseline)
    return CompareResult(conditions, baseline, cells, overall, tuple(samples), stopped)


def summarize(
    samples: Sequence[CompareSample], peers: Sequence[str], baseline: str
) -> tuple[tuple[CompareCell, ...], tuple[CompareCell, ...]]:
    """Return the cells of each task, and the mean of each peer over all tasks."""
    base = {(each.prompt.id, each.round): each.reply for each in samples if each.peer == baseline}
    tasks = list(dict.fromkeys(each.prompt.task for each in samples))
    groups = [
        _Group(task, peer, [each for each in samples if each.prompt.task == task and each.peer == peer], base)
        for task in tasks
        for peer in peers
    ]
    groups = [group for group in groups if group.samples]
    by_peer = {peer: [group for group in groups if group.peer == peer] for peer in peers}
    overall = [mean_over_tasks(mine) for mine in by_peer.values() if mine]
    return tuple(group.cell() for group in groups), tuple(overall)


@dataclass(frozen=True)
class _Group:
    """Replies of one peer to the prompts of one task, and those of the baseline."""

    task: str
    peer: str
    samples: Sequence[CompareSample]
    base: dict[tuple[str, int], PeerReply]

    @property
    def good(self) -> list[CompareSample]:
        return [each for each in self.samples if each.reply.error is None]

    @property
    def ratios(self) -> list[list[float]]:
        """Return the ratios of each prompt, one per round; a reply without a baseline is left out."""
        found: dict[str, list[float]] = {}
        for each in self.good:
            base = self.base.get((each.prompt.id, each.round))
            ours = each.reply.seconds_per_token
            theirs = None if base is None else base.seconds_per_token
            if ours is not None and theirs is not None:
                found.setdefault(each.prompt.id, []).append(theirs / ours)
        return list(found.values())

    @property
    def same(self) -> list[bool]:
        """Return for each prompt whether the reply equals that of the baseline."""
        first = {each.prompt.id: each for each in reversed(self.good)}
        pairs = [(each, self.base.get((name, each.round))) for name, each in first.items()]
        return [each.reply.text == base.text for each, base in pairs if base is not None and base.error is None]

    def cell(self) -> CompareCell:
        ratios, same = self.ratios, self.same
        return CompareCell(
            task=self.task,
            peer=self.peer,
            speedup=ratio_of(ratios) if ratios else None,
            speedup_interval=interval(over_prompts(ratios)),
            same_text=all(same) if same else None,
            num_same=sum(same),
            ratios=ratios,
            **counts([self]),
        )


def mean_over_tasks(groups: Sequence[_Group]) -> CompareCell:
    """Average the tasks of one peer."""
    cells = [group.cell() for group in groups]
    ratios = [cell.speedup for cell in cells if cell.speedup is not None]
    same = [cell.same_text for cell in cells if cell.same_text is not None]
    return CompareCell(
        task=ALL,
        peer=groups[0].peer,
        speedup=math.exp(fmean(map(math.log, ratios))) if ratios else None,
        speedup_interval=interval(over_tasks([group.ratios for group in groups if group.ratios])),
        same_text=all(same) if same else None,
        num_same=sum(cell.num_same for cell in cells),
        **counts(groups)
        | {
            "tokens_per_second": _mean(cell.tokens_per_second for cell in cells),
            "accepted_per_step": _mean(cell.accepted_per_step for cell in cells),
        },
    )


def counts(groups: Sequence[_Group]) -> dict[str, Any]:
    """Return the fields of a cell that are counts and medians over replies."""
    samples = [each for group in groups for each in group.samples]
    good = [each.reply for group in groups for each in group.good]
    times = [reply.seconds_per_token for reply in good if reply.seconds_per_token is not None]
    with_steps = [reply for reply in good if reply.steps]
    return {
        "prompts": len({each.prompt.id for each in samples}),
        "errors": len(samples) - len(good),
        "reasons": dict(Counter(each.reply.error for each in samples if each.reply.error is not None)),
        "tokens": sum(reply.tokens for reply in good),
        "tokens_per_second": 1 / median(times) if times else None,
        "first_token": Latency.of(reply.first for reply in good if reply.first is not None),
        "accepted_per_step": _ratio(with_steps, lambda reply: reply.tokens, lambda reply: reply.steps or 0.0),
    }


def _ratio(
    replies: Sequence[PeerReply], over: Callable[[PeerReply], float], under: Callable[[PeerReply], float]
) -> float | None:
    return sum(map(over, replies)) / sum(map(under, replies)) if replies else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


HEAD = (
    "task",
    "peer",
    "tokens/s",
    "first token p50 / p90 ms",
    "accepted per step",
    "speedup",
    INTERVAL,
    "same text",
)


def report_table(result: CompareResult) -> ReportTable:
    """Return a table with a row for each task and peer."""
    return ReportTable(HEAD, [_row(cell) for cell in (*result.cells, *result.overall)], words=2)


def remarks(result: CompareResult) -> list[str]:
    """Return the notes below the table."""
    lines = [
        f"Median tokens per second after the first token. Speedup: time per token of {result.baseline} over that of "
        "the peer, by pairs of the same prompt and round, with a 95% t interval over prompts and rounds. "
        f"Same text: as {result.baseline}.",
        "Accepted per step counts the target's own token; - if a peer does not report it. Peers with another "
        "quantization may well give another output.",
    ]
    for cell in result.cells:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in cell.reasons.items())
        if reasons:
            lines.append(f"ERRORS, {cell.peer}, {cell.task}: {reasons}.")
    if result.stopped is not None:
        lines.append("Stopped early: the table has the finished part. Run the command again for all of it.")
    return lines


def _row(cell: CompareCell) -> list[str]:
    first = cell.first_token
    return [
        "all" if cell.task == ALL else cell.task,
        cell.peer,
        number(cell.tokens_per_second, 1),
        "-" if first is None else f"{1000 * first.p50:.0f} / {1000 * first.p90:.0f}",
        number(cell.accepted_per_step, 2),
        *compared(cell.speedup, cell.speedup_interval),
        "-" if cell.same_text is None else f"{cell.num_same} of {cell.prompts}",
    ]


def number(value: float | None, digits: int) -> str:
    """Format a figure, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"
