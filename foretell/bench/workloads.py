"""Workloads by name, and the same sample of them every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from foretell.bench.jsonl import Record, find_file, read_records, whole_lines
from foretell.bench.prompt import DEFAULT_MAX_TOKENS, BenchPrompt
from foretell.errors import RequestError
from foretell.options import nearest

SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class Source:
    """A workload the user has as a file; `names` are looked for where a folder is given."""

    wanted: str
    names: tuple[str, ...]
    read: Callable[[Record, int], BenchPrompt]  # a line and its number

    def items(self, workload: str, data: Path | None) -> Iterator[BenchPrompt]:
        if data is None:
            raise RequestError("data", f"{workload} is not shipped; name its {self.wanted} with --data")
        for number, record in enumerate(read_records(find_file(data, self.names)), start=1):
            yield self.read(record, number)


def own_record(record: Record, number: int) -> BenchPrompt:
    """A line of the set that ships with the package."""
    return BenchPrompt(
        record.text("id"),
        record.text("kind"),
        record.messages(),
        max_tokens=record.whole("max_tokens"),
        prediction=record.value.get("prediction"),
        schema=record.value.get("schema"),
    )


def spec_bench(record: Record, number: int) -> BenchPrompt:
    """The eight categories that come from MT-Bench make one task of several turns."""
    item = mt_bench(record, number)
    task = item.task if item.task in SPEC_BENCH_TASKS else "multi-turn"
    return BenchPrompt(item.id, task, item.messages, turns=item.turns)


def mt_bench(record: Record, number: int) -> BenchPrompt:
    first, *turns = record.texts("turns")
    name = record.value.get("question_id", number)
    return BenchPrompt(str(name), record.text("category"), _user(first), turns=tuple(turns))


def humaneval(record: Record, number: int) -> BenchPrompt:
    ask = f"Complete this Python function and give it back whole.\n\n```python\n{record.text('prompt')}```"
    return BenchPrompt(str(record.value.get("task_id", number)), "humaneval", _user(ask))


def gsm8k(record: Record, number: int) -> BenchPrompt:
    return BenchPrompt(str(number), "gsm8k", _user(record.text("question")))


def trace(record: Record, number: int) -> BenchPrompt:
    """A request in OpenAI's form, bare or as a line of a batch file; `kind` names its task."""
    body = record.inner("body")
    name = record.value.get("custom_id") or record.value.get("id") or number
    chat = "messages" in body.value
    return BenchPrompt(
        str(name),
        str(record.value.get("kind") or "trace"),
        body.messages() if chat else (),
        text=None if chat else body.text("prompt"),
        max_tokens=body.max_tokens() or DEFAULT_MAX_TOKENS,
        prediction=body.prediction(),
        schema=body.schema(),
        sampling=body.sampling(),
        fields=body.fields(),
    )


def _user(text: str) -> tuple[Mapping[str, Any], ...]:
    return ({"role": "user", "content": text},)


SOURCES = {
    "spec-bench": Source("question.jsonl", ("question.jsonl", "spec_bench/question.jsonl"), spec_bench),
    "mt-bench": Source("question.jsonl", ("question.jsonl", "mt_bench/question.jsonl"), mt_bench),
    "humaneval": Source("HumanEval.jsonl", ("HumanEval.jsonl", "humaneval/HumanEval.jsonl"), humaneval),
    "gsm8k": Source("test.jsonl", ("test.jsonl", "gsm8k/test.jsonl"), gsm8k),
    "trace": Source("file of requests, one a line,", (), trace),
}


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
        yield own_record(record, number)


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
