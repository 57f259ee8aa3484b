"""Operations of draft heads as messages of integers. The leader sends them to the other ranks and runs them itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from foretell.kv.cache import slots_of
from foretell.models.draft_heads import BlockHead, DistilledHead, DraftHead, EagleHead, MedusaHead, MtpHead
from foretell.runner.heads.kv import DraftAttention, DraftKV, HeadPages, PrefillAttention, PrefillSpan
from foretell.runner.heads.sampler import gather_logits

Ints = list[int]


@dataclass(frozen=True)
class HeadOp:
    """An operation. Its fields are integers and lists of integers only, so that it can be sent to other ranks."""


@dataclass(frozen=True)
class PrefillOp(HeadOp):
    """Compute and store keys and values of positions whose hidden states are stored already."""

    starts: Ints
    stops: Ints
    tokens: Ints  # of these positions but a sequence's first; or per position those that a head looks back at
    pages: Ints  # of all sequences, concatenated
    page_counts: Ints  # per sequence


@dataclass(frozen=True)
class StepOp(HeadOp):
    """One step of an autoregressive head; the same number of rows for each sequence."""

    tokens: Ints
    positions: Ints
    previous: Ints  # hidden states before each row: a slot in the first step, later a used row of the last one
    used_rows: Ints  # the others are padding
    lengths: Ints  # context positions of each sequence, which all its rows see
    draft_mask: Ints  # [sequences, rows, drafted]: which draft tokens each row sees
    depths: Ints  # of the rows of a sequence, counted from the end of its context
    top_k: int  # logits needed per row; 0: all
    columns: int = 0  # positions of a sequence, draft included; set in the first step only, as the next two
    pages: Ints = field(default_factory=list)
    page_counts: Ints = field(default_factory=list)


@dataclass(frozen=True)
class BlockForwardOp(HeadOp):
    """Run a block of `depth` draft tokens after each sequence; `BlockLevelOp` then returns it level by level."""

    anchors: Ints
    lengths: Ints  # positions before each anchor
    depth: int
    pages: Ints
    page_counts: Ints


@dataclass(frozen=True)
class BlockLevelOp(HeadOp):
    """Return the logits at one depth of the last block, for some sequences and previous tokens."""

    depth: int
    sequences: Ints
    previous_tokens: Ints
    top_k: int
    wants_confidence: int  # 1: also return the confidence


@dataclass(frozen=True)
class MedusaForwardOp(HeadOp):
    """Run the Medusa heads on the hidden states stored in some slots."""

    slots: Ints
    depth: int
    top_k: int


HEAD_OPS: tuple[type[HeadOp], ...] = (PrefillOp, StepOp, BlockForwardOp, BlockLevelOp, MedusaForwardOp)


def flatten_pages(page_lists: Several[Several[int]]) -> tuple[Ints, Ints]:
    """Return the pages of all sequences, concatenated, and the number of pages of each."""
    return [page for pages in page_lists for page in pages], [len(pages) for pages in page_lists]


def split_pages(pages: Ints, counts: Ints) -> list[Ints]:
    """Split flat pages into lists of the given lengths: the inverse of `flatten_pages`."""
    return [pages[stop - count : stop] for count, stop in zip(counts, accumulate(counts), strict=True)]


@dataclass(frozen=True)
class HeadLogits:
    """Logits over the head's output vocabulary, a row per requested row; with several ranks only on the leader."""

    logits: Tensor
    confidence: Tensor | None = None  # logits of the confidence head


NO_LOGITS = HeadLogits(torch.empty(0))


class HeadOps(Protocol):
    """The operations of a head, local or sharded over ranks."""

    def store_hidden_states(self, slots: Tensor, states: Tensor) -> None: ...
    def run(self, op: HeadOp) -> HeadLogits: ...


class TorchHeadOps(ABC):
    """Runs the operations of a head, or of its shard, in torch."""

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        self.head: Any = head
        self.pages, self.device = pages, pages.device

    def store_hidden_states(self, slots: Tensor, states: Tensor) -> None:
        """Store the head's part of the target's hidden states [positions, width], if it needs any."""
        if self.pages.hidden_state_cache is not None:
            self.pages.store_hidden_states(slots, self.head.local_hidden(states))

    @abstractmethod
    def run(self, op: HeadOp) -> HeadLogits:
        """Run an operation on all ranks at once."""

    def tensor(self, numbers: Ints) -> Tensor:
        """Return integers as a tensor on the head's device."""
        return torch.tensor(numbers, device=self.device)

    def hidden_states(self, slots: Tensor) -> Tensor:
        """Return the stored hidden states of all ranks [positions, width]; zeros if none are stored."""
        if self.pages.hidden_state_cache is None:
            zeros: Tensor = self.head.like.new_zeros(len(slots), self.head.config.layer.width)
            return zeros
        states: Tensor = self.head.gather_columns(self.pages.hidden_states(slots))
        return states

    def spans(self, op: PrefillOp, first: int) -> list[PrefillSpan]:
        """Return pages, start and stop of each sequence; positions before `first` are left out."""
        found = zip(split_pages(op.pages, op.page_counts), op.starts, op.stops, strict=True)
        return [(pages, max(start, first), stop) for pages, start, stop in found if stop > first]

    def slots(self, spans: list[PrefillSpan], back: int = 0) -> Tensor:
        """Return the slots of all positions, or of those `back` before them."""
        runs = (slots_of(pages, self.pages.page_size, start - back, stop - back) for pages, start, stop in spans)
        return self.tensor([slot for run in runs for slot in run])


class EagleOps(TorchHeadOps):
    """Operations of an autoregressive head."""

    head: EagleHead | MtpHead | DistilledHead

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        super().__init__(head, pages)
        self._kv, self._carried = DraftKV([], [], torch.float32), torch.empty(0)

    def run(self, op: HeadOp) -> HeadLogits:
        if isinstance(op, PrefillOp):
            self._prefill(op)
            return NO_LOGITS
        assert isinstance(op, StepOp), "this head has no other operations"
        return HeadLogits(self._step(op))

    def _prefill(self, op: PrefillOp) -> None:
        """Store KV of the pair of token p and hidden states p - 1 at position p; it depends on nothing after p."""
        spans = self.spans(op, 1)  # the first position of a sequence has no hidden states before it
        tokens, own = self.tensor(op.tokens), self.slots(spans)
        states = self.hidden_states(self.slots(spans, back=1))
        positions = [position for _, start, stop in spans for position in range(start, stop)]
        rope = self.head.rope_rows(self.tensor(positions))
        attend = PrefillAttention(self.pages, self.head.config.layer, spans, own)
        self.pages.store_kv(-1, own, *self.head.keys_values(tokens, states, rope, attend))

    def _step(self, op: StepOp) -> Tensor:
        previous = self.tensor(op.previous)
        if op.page_counts:
            self._kv = self.pages.gather(split_pages(op.pages, op.page_counts), op.columns)
            hidden = self.hidden_states(previous)
        else:
            hidden = self._carried[previous]
        mask = torch.tensor(op.draft_mask, dtype=torch.bool, device=self.device).view(
            len(op.lengths), len(op.depths), -1
        )
        attention = DraftAttention(
            self._kv, self.head.config.layer, op.lengths, mask, first_position=1, depths=tuple(op.depths)
        )
        rope = self.head.rope_rows_clamped(self.tensor(op.positions))
        states = self.head.step(self.tensor(op.tokens), hidden, rope, attention)[self.tensor(op.used_rows)]
        self._carried = self.head.carry(states)
        return gather_logits(self.head, self.head.logits(states), op.top_k)


class BlockForwardOutput:
    """Result of a block forward: states [sequences, depth, width], and logits without the bias of the Markov head."""

    def __init__(self, head: BlockHead, states: Tensor, logits: Tensor) -> None:
        self.head, self.states, self.logits = head, states, logits

    def level(self, op: BlockLevelOp) -> HeadLogits:
        sequences, previous = torch.tensor([op.sequences, op.previous_tokens], device=self.logits.device)
        logits = self.logits[sequences, op.depth]
        if self.head.config.markov_rank:
            logits = logits + self.head.markov_logits(previous)
        confidence = None
        if op.wants_confidence:
            confidence = self.head.confidence_logits(self.states[sequences, op.depth], previous)
        return HeadLogits(gather_logits(self.head, logits, op.top_k), confidence)


class BlockOps(TorchHeadOps):
    """Operations of a block head."""

    head: BlockHead

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        super().__init__(head, pages)
        self._output: BlockForwardOutput | None = None

    def run(self, op: HeadOp) -> HeadLogits:
        if isinstance(op, PrefillOp):
            spans = self.spans(op, 0)
            slots = self.slots(spans)
            fused = self.head.normalize_projected(self._hidden_states(slots, op.tokens))
            self.store_kv(slots, [position for _, start, stop in spans for position in range(start, stop)], fused)
        elif isinstance(op, BlockForwardOp):
            self._output = BlockForwardOutput(self.head, *self._forward(op))
        else:
            assert isinstance(op, BlockLevelOp) and self._output is not None, "this head has no other operations"
            return self._output.level(op)
        return NO_LOGITS

    def _hidden_states(self, slots: Tensor, tokens: Ints) -> Tensor:
        """Return the local hidden states, plus the embedding of previous tokens if the head uses them."""
        kept, back = self.pages.hidden_states(slots), self.head.config.look_back
        return kept + self.head.project_hints(self.tensor(tokens).view(-1, back)) if back else kept

    def store_kv(self, slots: Tensor, positions: Ints, fused: Tensor) -> None:
        """Compute and store keys and values of each layer."""
        for layer, (keys, values) in enumerate(
            self.head.context_kv(fused, self.head.rope_rows(self.tensor(positions)))
        ):
            self.pages.store_kv(layer, slots, keys, values)

    def _forward(self, op: BlockForwardOp) -> tuple[Tensor, Tensor]:
        config, sequences = self.head.config, len(op.lengths)
        kv = self.pages.gather(split_pages(op.pages, op.page_counts), max(op.lengths) + config.block)
        mask = torch.ones(config.block, config.block, dtype=torch.bool)
        mask = mask.tril() if config.causal_in_block else mask
        depths = (-1,) * config.block  # the window of all rows is the anchor's
        attention = DraftAttention(kv, config.layer, op.lengths, mask, depths=depths)
        positions = self.tensor(op.lengths)[:, None] + torch.arange(config.block, device=self.device)
        rows = self.head.block_inputs(self.tensor(op.anchors)).flatten(0, 1)
        rope = self.head.rope_rows(positions.flatten())
        states = self.head.run_layers(rows, rope, attention).view(sequences, config.block, -1)
        states = self.head.draft_states(states)[:, : op.depth]
        return states, self.head.output_logits(states)


class MedusaOps(TorchHeadOps):
    """Operations of Medusa heads, each of which drafts one position."""

    head: MedusaHead

    def run(self, op: HeadOp) -> HeadLogits:
        """Return logits [sequences * depth, outputs], ordered by sequence and position."""
        assert isinstance(op, MedusaForwardOp), "this head has no other operations"
        logits = self.head.logits(self.head(self.hidden_states(self.tensor(op.slots)), op.depth))
        return HeadLogits(gather_logits(self.head, logits.flatten(0, 1), op.top_k))


def make_head_ops(head: DraftHead[Any], pages: HeadPages) -> TorchHeadOps:
    """Return the operations of a head."""
    if isinstance(head, BlockHead):
        return BlockOps(head, pages)
    return MedusaOps(head, pages) if isinstance(head, MedusaHead) else EagleOps(head, pages)
