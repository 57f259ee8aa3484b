"""Which texts are written at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from .plan import Plan
from .prompt import BenchPrompt

if TYPE_CHECKING:
    from .measure import MeasureJob

SHORTEST = 16  # tokens; among several, what ends sooner leaves the others alone


def packs(items: Sequence[BenchPrompt], batch: int, plan: Plan) -> list[list[BenchPrompt]]:
    """Items of one task side by side, so many at once; where there are too few they are asked again in other words."""
    if batch == 1:
        return [[item] for item in items]
    found: list[list[BenchPrompt]] = []
    for task in dict.fromkeys(item.task for item in items):
        group = [item for item in items if item.task == task]
        count = -(-len(group) // batch) * batch
        asked = [long_enough(item, plan) for item in variations(group, count)]
        found += [asked[i : i + batch] for i in range(0, count, batch)]
    return found


def side_by_side(prepared: Sequence[Sequence[MeasureJob]]) -> list[MeasureJob]:
    """Turn by turn one job that has the others of the pack beside it."""
    turns = [[job for job in turn if job is not None] for turn in zip_longest(*prepared)]
    return [replace(first, beside=tuple(others)) if others else first for first, *others in turns]


def variations(items: Sequence[BenchPrompt], count: int) -> list[BenchPrompt]:
    """So many of them; where there are fewer they are asked again, in other words, so that no two texts are one."""
    return [again(items[i % len(items)], i // len(items)) for i in range(count)]


def again(item: BenchPrompt, time: int) -> BenchPrompt:
    """An item in other words; the first time in its own."""
    if not time:
        return item
    name = f"{item.id}, again {time}"
    if item.text is not None:
        return replace(item, id=name, text=f"({time + 1})\n\n{item.text}")
    *before, last = item.messages
    last = {**last, "content": f"{last['content']}\n\n(Answer number {time + 1}.)"}
    return replace(item, id=name, messages=(*before, last))


def long_enough(item: BenchPrompt, plan: Plan) -> BenchPrompt:
    """One whose text does not end before it can be timed."""
    shortest = min(SHORTEST, item.max_tokens, plan.max_tokens or SHORTEST)
    return replace(item, sampling={"min_tokens": shortest, **item.sampling})
