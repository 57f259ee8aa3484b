"""What a head works with on a GPU beside its weights and its pages, counted before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretell.kv.cache import LayerShape
from foretell.models.draft_heads import HeadConfig
from foretell.runner.heads.tables import MOST_PLACES, columns_for, power
from foretell.runner.memory_plan import LOGIT_ROWS, WORKSPACE

FLOAT = 4  # bytes
COPIES = 4  # of logits: as they come, as shares, divided by noise, sorted
TWICE = 2  # each size of work runs plainly once, and then in the graphs' own memory


@dataclass(frozen=True)
class MostAsked:
    """The most that is asked of heads."""

    texts: int  # at once
    context: int
    tokens: int  # of a step
    depth: int  # of a draft
    wide: int  # branches that are followed in a level of a tree
    page_size: int


@dataclass(frozen=True)
class HeadNeeds:
    """Bytes of some heads."""

    weights: int = 0
    token: int = 0  # of cache
    workspace: int = 0
    examining: int = 0  # held for a while after the target was loaded


def head_step_bytes(config: HeadConfig, shapes: tuple[LayerShape, ...], asked: MostAsked, dtype: torch.dtype) -> int:
    """Of one head, whose layers in the cache have these shapes: its drafts, what it reads, and their graphs."""
    texts, columns = power(asked.texts), columns_for(asked.context)
    rows = texts * max(asked.wide, asked.depth)
    places = max(columns, min(MOST_PLACES, texts * columns)) + rows * max(asked.wide, asked.depth)
    copied = sum(shape.bytes_per_token(dtype) for shape in shapes if shape.has_values)
    share = config.layer.heads // config.layer.kv_heads
    masks = asked.wide * (1 + (1 + share) * dtype.itemsize)
    drafts = places * (copied + masks) + rows * config.outputs * FLOAT * COPIES
    probs = asked.depth * texts * config.outputs * FLOAT
    # States wait until a page of each text is full; those of a prompt are there twice when they are put together.
    waiting = 2 * asked.tokens + (asked.page_size + 2) * LOGIT_ROWS
    states = waiting * config.input_width * dtype.itemsize
    return TWICE * (drafts + probs + WORKSPACE) + states
