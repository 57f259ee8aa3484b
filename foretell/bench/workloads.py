"""Workloads by name, with a reproducible sample, and the readers of their files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from foretell.errors import RequestError
from foretell.options import nearest

from .jsonl import Record, find_file, parse_lines, read_records
from .prompt import DEFAULT_MAX_TOKENS, BenchPrompt

SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True)
class WorkloadSource:
    """A workload in a file of the user; `names` are the file names to look for in a folder."""

    description: str
    names: tuple[str, ...]
    read: Callable[[Record, int], BenchPrompt]  # of a line and its number

    def items(self, workload: str, data: Path | None) -> Iterator[BenchPrompt]:
        """Yield the prompts of the file."""
        if data is None:
            raise RequestError("data", f"{workload} is not shipped; name its {self.description} with --data")
        for number, record in enumerate(read_records(find_file(data, self.names)), start=1):
            yield self.read(record, number)


def own_record(record: Record, number: int) -> BenchPrompt:
    """Read a line of the workload that ships with the package."""
    return BenchPrompt(
        record.string("id"),
        record.string("kind"),
        record.messages(),
        max_tokens=record.integer("max_tokens"),
        prediction=record.value.get("prediction"),
        schema=record.value.get("schema"),
    )


def spec_bench(record: Record, number: int) -> BenchPrompt:
    """Read a line of Spec-Bench; the eight categories of MT-Bench become one multi-turn task."""
    item = mt_bench(record, number)
    task = item.task if item.task in SPEC_BENCH_TASKS else "multi-turn"
    return BenchPrompt(item.id, task, item.messages, turns=item.turns)


def mt_bench(record: Record, number: int) -> BenchPrompt:
    first, *turns = record.strings("turns")
    name = record.value.get("question_id", number)
    return BenchPrompt(str(name), record.string("category"), _user(first), turns=tuple(turns))


def humaneval(record: Record, number: int) -> BenchPrompt:
    ask = f"Complete this Python function and give it back whole.\n\n```python\n{record.string('prompt')}```"
    return BenchPrompt(str(record.value.get("task_id", number)), "humaneval", _user(ask))


def gsm8k(record: Record, number: int) -> BenchPrompt:
    return BenchPrompt(str(number), "gsm8k", _user(record.string("question")))


def trace(record: Record, number: int) -> BenchPrompt:
    """Read an OpenAI request, bare or as a line of a batch file; `kind` names its task."""
    body = record.inner("body")
    name = record.value.get("custom_id") or record.value.get("id") or number
    chat = "messages" in body.value
    return BenchPrompt(
        str(name),
        str(record.value.get("kind") or "trace"),
        body.messages() if chat else (),
        text=None if chat else body.string("prompt"),
        max_tokens=body.max_tokens() or DEFAULT_MAX_TOKENS,
        prediction=body.prediction(),
        schema=body.schema(),
        sampling=body.sampling(),
        fields=body.fields(),
    )


def _user(text: str) -> tuple[Mapping[str, Any], ...]:
    return ({"role": "user", "content": text},)


SOURCES = {
    "spec-bench": WorkloadSource("question.jsonl", ("question.jsonl", "spec_bench/question.jsonl"), spec_bench),
    "mt-bench": WorkloadSource("question.jsonl", ("question.jsonl", "mt_bench/question.jsonl"), mt_bench),
    "humaneval": WorkloadSource("HumanEval.jsonl", ("HumanEval.jsonl", "humaneval/HumanEval.jsonl"), humaneval),
    "gsm8k": WorkloadSource("test.jsonl", ("test.jsonl", "gsm8k/test.jsonl"), gsm8k),
    "trace": WorkloadSource("file with one request per line", (), trace),
}


OWN = "own"
WORKLOADS = (OWN, *SOURCES)
SEED = 0  # of the sample of a larger workload


def load(workload: str, data: Path | None = None, tasks: Sequence[str] = (), seed: int = SEED) -> list[BenchPrompt]:
    """Load the prompts of a workload by task, each task shuffled by the seed."""
    if workload not in WORKLOADS:
        raise RequestError("workload", f"{workload!r} is not known; {nearest(workload, WORKLOADS)}")
    items = _with_unique_ids(own(data) if workload == OWN else SOURCES[workload].items(workload, data))
    known = list(dict.fromkeys(item.task for item in items))
    for task in tasks:
        if task not in known:
            raise RequestError("tasks", f"{workload} has no {task!r}; {nearest(task, known)}")
    return [item for task in tasks or known for item in _shuffled(items, task, seed)]


def select(
    items: Sequence[BenchPrompt], per_task: int | None, fits: Callable[[BenchPrompt], bool]
) -> tuple[list[BenchPrompt], list[BenchPrompt]]:
    """Return the first `per_task` prompts of each task that fit, and those skipped before them."""
    selected: list[BenchPrompt] = []
    left_out: list[BenchPrompt] = []
    for item in items:
        if per_task is None or sum(other.task == item.task for other in selected) < per_task:
            (selected if fits(item) else left_out).append(item)
    return selected, left_out


def own(data: Path | None = None) -> Iterator[BenchPrompt]:
    """Yield the prompts of the workload that ships with the package."""
    if data is not None:
        raise RequestError("data", "is for other workloads; own comes with the package")
    text = (files("foretell.bench") / "data" / "own.jsonl").read_text(encoding="utf-8")
    for number, record in enumerate(parse_lines(text.splitlines(), "own.jsonl"), start=1):
        yield own_record(record, number)


def _shuffled(items: Sequence[BenchPrompt], task: str, seed: int) -> list[BenchPrompt]:
    group = [item for item in items if item.task == task]
    random.Random(f"{seed} {task}").shuffle(group)
    return group


def _with_unique_ids(items: Iterable[BenchPrompt]) -> list[BenchPrompt]:
    """Make ids unique, because results are stored by id."""
    found: dict[str, BenchPrompt] = {}
    for item in items:
        name, count = item.id, 1
        while name in found:
            count += 1
            name = f"{item.id} ({count})"
        found[name] = replace(item, id=name)
    return list(found.values())
