"""From the lines of known files to what is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import RequestError

from .prompt import DEFAULT_MAX_TOKENS, BenchPrompt
from .records import Record, find_file, read_records

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


def own(record: Record, number: int) -> BenchPrompt:
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
