"""What the first rank tells the others: a few whole numbers a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from foretell.kernels.attention import Span
from foretell.models.heads import HeadConfig, read_head_config
from foretell.runner.head_jobs import JOBS, Job
from foretell.runner.pack import Packed, span_lists

STEP, MOVE, JOB, WIRE = range(4)
FIELDS = 6  # of a span

Numbers = npt.NDArray[np.int64]


def step_message(model: int, packed: Packed) -> bytes:
    """Rows to run; who reads this answers with sums alone, so it need not know what becomes of them."""
    spans, pages, parents = span_lists(packed.spans)
    counts = [packed.rows, len(packed.spans), len(pages), len(parents), len(packed.wanted)]
    head, tail = [STEP, model, *counts], [*spans, *pages, *parents, *packed.wanted]
    return np.array(head, np.int64).tobytes() + packed.table.tobytes() + np.array(tail, np.int64).tobytes()


def move_message(model: int, source: Sequence[int], target: Sequence[int]) -> bytes:
    """Slots whose keys and values move, for an accepted branch."""
    return np.array([MOVE, model, *source, *target], np.int64).tobytes()


def job_message(head: int, job: Job) -> bytes:
    """What a head is to do; it is known by where its layers begin in the cache."""
    lists = [np.array(getattr(job, field.name), np.int64).reshape(-1) for field in fields(job)]
    begin = np.array([JOB, head, JOBS.index(type(job)), *map(len, lists)], np.int64)
    return np.concatenate([begin, *lists]).tobytes()


def wire_message(head: int, config: HeadConfig) -> bytes:
    """How a head is connected, where its file did not say it right."""
    return np.array([WIRE, head], np.int64).tobytes() + json.dumps(config.said()).encode()


def read_message(message: bytes) -> tuple[int, Packed | tuple[list[int], list[int]] | Job | HeadConfig]:
    """Which model or head, and a step's rows, where slots move from and to, what to do, or how it is connected."""
    kind, model = np.frombuffer(message, np.int64, 2)
    if kind == WIRE:
        return int(model), read_head_config(json.loads(message[16:]))
    numbers = np.frombuffer(message, np.int64)
    if kind == JOB:
        return int(model), _job(JOBS[numbers[2]], numbers[3:])
    if kind == MOVE:
        half = len(numbers) // 2 + 1
        return int(model), (numbers[2:half].tolist(), numbers[half:].tolist())
    rows, *counts = numbers[2:7].tolist()
    sizes = np.array([3 * rows, FIELDS * counts[0], *counts[1:]])
    table, spans, pages, parents, wanted = np.split(numbers[7:], np.cumsum(sizes)[:-1])
    tokens, positions, slots = table.reshape(3, rows).tolist()
    shares = _spans(spans.tolist(), pages.tolist(), parents.tolist())
    return int(model), Packed(tokens, positions, slots, shares, wanted.tolist())


def _job(kind: type[Job], numbers: Numbers) -> Job:
    names = fields(kind)
    lists = np.split(numbers[len(names) :], np.cumsum(numbers[: len(names) - 1]))
    found = zip(names, lists, strict=True)
    return kind(*(int(each[0]) if name.type == "int" else each.tolist() for name, each in found))


def _spans(fields: list[int], pages: list[int], parents: list[int]) -> list[Span]:
    rows = [fields[at : at + FIELDS] for at in range(0, len(fields), FIELDS)]
    ends = [row[3] for row in rows[1:]] + [len(pages)]
    return [
        Span(first, count, start, tuple(pages[page:end]), tuple(parents[parent : parent + nodes]))
        for (first, count, start, page, nodes, parent), end in zip(rows, ends, strict=True)
    ]
