"""Workloads by name, and the same sample of them every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from foretell.errors import RequestError
from foretell.options import nearest

from .prompt import BenchPrompt
from .records import whole_lines
from .sources import SOURCES
from .sources import own as read_own

OWN = "own"
WORKLOADS = (OWN, *SOURCES)
SEED = 0  # decides what is sampled from a larger workload


def load(workload: str, data: Path | None = None, tasks: Sequence[str] = (), seed: int = SEED) -> list[BenchPrompt]:
    """The items of a workload, task by task, each in an order that the seed decides."""
    if workload not in WORKLOADS:
        raise RequestError("workload", f"{workload!r} is not known; {nearest(workload, WORKLOADS)}")
    items = _with_own_names(own(data) if workload == OWN else SOURCES[workload].items(workload, data))
    known = list(dict.fromkeys(item.task for item in items))
    for task in tasks:
        if task not in known:
            raise RequestError("tasks", f"{workload} has no {task!r}; {nearest(task, known)}")
    return [item for task in tasks or known for item in _shuffled(items, task, seed)]


def take(
    items: Sequence[BenchPrompt], per_task: int | None, fits: Callable[[BenchPrompt], bool]
) -> tuple[list[BenchPrompt], list[BenchPrompt]]:
    """The first `per_task` items of each task that fit, and those left out on the way."""
    taken: list[BenchPrompt] = []
    left_out: list[BenchPrompt] = []
    for item in items:
        if per_task is None or sum(other.task == item.task for other in taken) < per_task:
            (taken if fits(item) else left_out).append(item)
    return taken, left_out


def own(data: Path | None = None) -> Iterator[BenchPrompt]:
    """The set that ships with the package, written for it."""
    if data is not None:
        raise RequestError("data", "is for other workloads; own comes with the package")
    text = (files("foretell.bench") / "data" / "own.jsonl").read_text(encoding="utf-8")
    for number, record in enumerate(whole_lines(text.splitlines(), "own.jsonl"), start=1):
        yield read_own(record, number)


def _shuffled(items: Sequence[BenchPrompt], task: str, seed: int) -> list[BenchPrompt]:
    group = [item for item in items if item.task == task]
    random.Random(f"{seed} {task}").shuffle(group)
    return group


def _with_own_names(items: Iterable[BenchPrompt]) -> list[BenchPrompt]:
    """Results are kept by id, so no two items may share one."""
    found: dict[str, BenchPrompt] = {}
    for item in items:
        name, count = item.id, 1
        while name in found:
            count += 1
            name = f"{item.id} ({count})"
        found[name] = replace(item, id=name)
    return list(found.values())
