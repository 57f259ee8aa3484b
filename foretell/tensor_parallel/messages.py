"""Messages of the leader to the workers, mostly a few integers per step, and the specs of what workers load."""

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
from foretell.runner.batch_layout import BatchLayout, flatten_spans
from foretell.runner.heads.ops import HEAD_OPS, HeadOp

STEP, MOVE, HEAD_OP, HEAD_CONFIG = range(4)
SPAN_FIELDS = 6  # of a span

Int64Array = npt.NDArray[np.int64]


def step_message(model: int, packed: BatchLayout) -> bytes:
    """Encode a step. Workers only contribute to collectives, so they need not know its purpose."""
    spans, pages, parents = flatten_spans(packed.spans)
    counts = [packed.rows, len(packed.spans), len(pages), len(parents), len(packed.logits_indices)]
    head, tail = [STEP, model, *counts], [*spans, *pages, *parents, *packed.logits_indices]
    return np.array(head, np.int64).tobytes() + packed.table.tobytes() + np.array(tail, np.int64).tobytes()


def move_message(model: int, source: Sequence[int], target: Sequence[int]) -> bytes:
    """Encode a move of KV slots, for an accepted branch."""
    return np.array([MOVE, model, *source, *target], np.int64).tobytes()


def head_op_message(head: int, op: HeadOp) -> bytes:
    """Encode an operation of a head, which is identified by its first KV cache layer."""
    lists = [np.array(getattr(op, field.name), np.int64).reshape(-1) for field in fields(op)]
    begin = np.array([HEAD_OP, head, HEAD_OPS.index(type(op)), *map(len, lists)], np.int64)
    return np.concatenate([begin, *lists]).tobytes()


def head_config_message(head: int, config: HeadConfig) -> bytes:
    """Encode the config of a head, if its file was wrong about it."""
    return np.array([HEAD_CONFIG, head], np.int64).tobytes() + json.dumps(config.to_json()).encode()


def parse_message(message: bytes) -> tuple[int, BatchLayout | tuple[list[int], list[int]] | HeadOp | HeadConfig]:
    """Return the model or head, and a step, source and target slots, an operation, or a head's config."""
    kind, model = np.frombuffer(message, np.int64, 2)
    if kind == HEAD_CONFIG:
        return int(model), read_head_config(json.loads(message[16:]))
    numbers = np.frombuffer(message, np.int64)
    if kind == HEAD_OP:
        return int(model), _parse_head_op(HEAD_OPS[numbers[2]], numbers[3:])
    if kind == MOVE:
        half = len(numbers) // 2 + 1
        return int(model), (numbers[2:half].tolist(), numbers[half:].tolist())
    rows, *counts = numbers[2:7].tolist()
    sizes = np.array([3 * rows, SPAN_FIELDS * counts[0], *counts[1:]])
    table, spans, pages, parents, logits_indices = np.split(numbers[7:], np.cumsum(sizes)[:-1])
    tokens, positions, slots = table.reshape(3, rows).tolist()
    parsed = _parse_spans(spans.tolist(), pages.tolist(), parents.tolist())
    return int(model), BatchLayout(tokens, positions, slots, parsed, logits_indices.tolist())


def _parse_head_op(kind: type[HeadOp], numbers: Int64Array) -> HeadOp:
    names = fields(kind)
    lists = np.split(numbers[len(names) :], np.cumsum(numbers[: len(names) - 1]))
    found = zip(names, lists, strict=True)
    return kind(*(int(each[0]) if name.type == "int" else each.tolist() for name, each in found))


def _parse_spans(fields: list[int], pages: list[int], parents: list[int]) -> list[Span]:
    rows = [fields[at : at + SPAN_FIELDS] for at in range(0, len(fields), SPAN_FIELDS)]
    ends = [row[3] for row in rows[1:]] + [len(pages)]
    return [
        Span(first, count, start, tuple(pages[page:end]), tuple(parents[parent : parent + nodes]))
        for (first, count, start, page, nodes, parent), end in zip(rows, ends, strict=True)
    ]


@dataclass(frozen=True)
class ModelShardSpec:
    """A sharded model: its checkpoint, dtype and quantization, and the size of its KV cache."""

    checkpoint: Path
    dtype: torch.dtype
    quantization: QuantFormat | None
    pages: int
    page_size: int
    context: int
    heads: tuple[Path | None, ...] = ()  # folders of its draft heads; None: in the model's own checkpoint
    kv_dtype: torch.dtype | None = None  # of keys and values; None: `dtype`

    def load(self, shard: Shard, device: torch.device) -> Decoder:
        """Load a rank's shard, in floats."""
        return load_model(open_checkpoint(self.checkpoint), self.dtype, device, shard)

    def quantize(self, model: Decoder) -> Decoder:
        """Return the loaded shard with its weights quantized as specified."""
        return model if self.quantization is None else quantize_weights(model, self.quantization)


@dataclass(frozen=True)
class LaunchSpec:
    """The work of a process: its rank, its device, and its models: the target and perhaps a sharded draft model."""

    shard: Shard
    device: str
    threads: int
    models: tuple[ModelShardSpec, ...]


def head_bytes(head: DraftHead[Any], target: Decoder) -> int:
    """Return the bytes of a head's weights, without those shared with the target."""
    packed = {id(each): each.native.bytes for each in head.modules() if isinstance(each, Linear) and each.native}
    packed.pop(id(target.head), None)
    shared = {id(tensor) for tensor in target.parameters()}
    return sum(packed.values()) + sum(tensor.nbytes for tensor in head.parameters() if id(tensor) not in shared)


def weight_bytes(model: Decoder) -> int:
    """Return the bytes of a model's weights, packed ones included."""
    packed = sum(each.native.bytes for each in model.modules() if isinstance(each, Linear) and each.native is not None)
    return packed + sum(tensor.nbytes for tensor in model.parameters())
