"""What the first rank tells the others: a few whole numbers a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foretell.hub import open_checkpoint
from foretell.kernels.attention import Span
from foretell.kernels.quant import QuantFormat
from foretell.models.decoder import Decoder
from foretell.models.draft_heads import DraftHead, HeadConfig, read_head_config
from foretell.models.layers import Linear
from foretell.models.load import load_model
from foretell.models.quantize import quantize_weights
from foretell.models.sharding import Shard
from foretell.runner.batch_layout import BatchLayout, span_lists
from foretell.runner.heads.ops import JOBS, HeadOp

STEP, MOVE, JOB, WIRE = range(4)
FIELDS = 6  # of a span

Numbers = npt.NDArray[np.int64]


def step_message(model: int, packed: BatchLayout) -> bytes:
    """Rows to run; who reads this answers with sums alone, so it need not know what becomes of them."""
    spans, pages, parents = span_lists(packed.spans)
    counts = [packed.rows, len(packed.spans), len(pages), len(parents), len(packed.wanted)]
    head, tail = [STEP, model, *counts], [*spans, *pages, *parents, *packed.wanted]
    return np.array(head, np.int64).tobytes() + packed.table.tobytes() + np.array(tail, np.int64).tobytes()


def move_message(model: int, source: Sequence[int], target: Sequence[int]) -> bytes:
    """Slots whose keys and values move, for an accepted branch."""
    return np.array([MOVE, model, *source, *target], np.int64).tobytes()


def job_message(head: int, job: HeadOp) -> bytes:
    """What a head is to do; it is known by where its layers begin in the cache."""
    lists = [np.array(getattr(job, field.name), np.int64).reshape(-1) for field in fields(job)]
    begin = np.array([JOB, head, JOBS.index(type(job)), *map(len, lists)], np.int64)
    return np.concatenate([begin, *lists]).tobytes()


def wire_message(head: int, config: HeadConfig) -> bytes:
    """How a head is connected, where its file did not say it right."""
    return np.array([WIRE, head], np.int64).tobytes() + json.dumps(config.to_json()).encode()


def read_message(message: bytes) -> tuple[int, BatchLayout | tuple[list[int], list[int]] | HeadOp | HeadConfig]:
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
    return int(model), BatchLayout(tokens, positions, slots, shares, wanted.tolist())


def _job(kind: type[HeadOp], numbers: Numbers) -> HeadOp:
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


@dataclass(frozen=True)
class ModelShardSpec:
    """A model that is split: how its weights run, and the room each rank gives its cache."""

    checkpoint: Path
    dtype: torch.dtype
    quantization: QuantFormat | None
    pages: int
    page_size: int
    context: int
    heads: tuple[Path | None, ...] = ()  # folders of those that are split with it; None: in its own checkpoint

    def load(self, shard: Shard, device: torch.device) -> Decoder:
        """A rank's part of it, in floats."""
        return load_model(open_checkpoint(self.checkpoint), self.dtype, device, shard)

    def ready(self, model: Decoder) -> Decoder:
        """The loaded part with its weights as they will run."""
        return model if self.quantization is None else quantize_weights(model, self.quantization)


@dataclass(frozen=True)
class LaunchSpec:
    """Which rank it is, where it runs, and what of: the target, and a draft model where that is split, too."""

    shard: Shard
    device: str
    threads: int
    parts: tuple[ModelShardSpec, ...]


def head_bytes(head: DraftHead[Any], target: Decoder) -> int:
    """What a head's weights take in memory now, without those that are the target's."""
    packed = {id(each): each.native.bytes for each in head.modules() if isinstance(each, Linear) and each.native}
    packed.pop(id(target.head), None)
    shared = {id(tensor) for tensor in target.parameters()}
    return sum(packed.values()) + sum(tensor.nbytes for tensor in head.parameters() if id(tensor) not in shared)


def held_bytes(model: Decoder) -> int:
    """What a model's weights take in memory now, packed ones included."""
    packed = sum(each.native.bytes for each in model.modules() if isinstance(each, Linear) and each.native is not None)
    return packed + sum(tensor.nbytes for tensor in model.parameters())
