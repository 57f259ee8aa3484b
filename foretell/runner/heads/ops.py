"""What a head is asked to do, in whole numbers: what the first of several ranks tells the others, and does itself."""

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
    """Fields are numbers and lists of numbers, and nothing else."""


@dataclass(frozen=True)
class PrefillOp(HeadOp):
    """Remember places of some texts, whose features are kept already."""

    starts: Ints
    stops: Ints
    tokens: Ints  # of all these places but the first of a text; or of each place those that a head looks back at
    pages: Ints  # of all texts, one after the other
    page_counts: Ints  # how many each has


@dataclass(frozen=True)
class StepOp(HeadOp):
    """One step of a head that guesses a token after another; as many rows for each text."""

    tokens: Ints
    positions: Ints
    previous: Ints  # where the feature before each row is: in a first step a slot, then a row wanted of the last step
    used_rows: Ints  # rows that count; the others fill up
    lengths: Ints  # of each text the places that all its rows see
    draft_mask: Ints  # [texts, rows, guesses]: which of the guesses behind its text each row sees
    depths: Ints  # how far behind its text each row of a text stands
    top_k: int  # how many of the likeliest tokens are looked at; 0: all
    columns: int = 0  # places of a text, guesses included; what follows is told in a first step only
    pages: Ints = field(default_factory=list)
    page_counts: Ints = field(default_factory=list)


@dataclass(frozen=True)
class BlockForwardOp(HeadOp):
    """Run a block behind each text, to `depth` guesses; what comes of it is asked for level by level."""

    anchors: Ints
    lengths: Ints  # places before each anchor
    depth: int
    pages: Ints
    page_counts: Ints


@dataclass(frozen=True)
class BlockLevelOp(HeadOp):
    """Of the last pass the guesses at one depth, each of one of its texts and behind one token."""

    depth: int
    sequences: Ints
    previous_tokens: Ints
    top_k: int
    wants_confidence: int  # whether the head is to say how sure it is


@dataclass(frozen=True)
class MedusaForwardOp(HeadOp):
    """Guess as many places at once from the states kept in some slots."""

    slots: Ints
    depth: int
    top_k: int


HEAD_OPS: tuple[type[HeadOp], ...] = (PrefillOp, StepOp, BlockForwardOp, BlockLevelOp, MedusaForwardOp)


def flatten_pages(texts: Several[Several[int]]) -> tuple[Ints, Ints]:
    """Pages of all texts one after the other, and how many each has."""
    return [page for pages in texts for page in pages], [len(pages) for pages in texts]


def split_pages(pages: Ints, counts: Ints) -> list[Ints]:
    """What `flat` was given."""
    return [pages[stop - count : stop] for count, stop in zip(counts, accumulate(counts), strict=True)]


@dataclass(frozen=True)
class HeadLogits:
    """Logits over all the head can guess, in the order of what was asked for. Of several ranks the first has them."""

    logits: Tensor
    confidence: Tensor | None = None  # logits of a confidence head


NO_LOGITS = HeadLogits(torch.empty(0))


class HeadOps(Protocol):
    """What a drafter asks of its head, wherever that lies."""

    def store_hidden_states(self, slots: Tensor, states: Tensor) -> None: ...
    def run(self, job: HeadOp) -> HeadLogits: ...


class TorchHeadOps(ABC):
    """A head, and what it keeps of each place."""

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        self.head: Any = head
        self.pages, self.device = pages, pages.device

    def store_hidden_states(self, slots: Tensor, states: Tensor) -> None:
        """Keep what becomes of the target's states [places, tapped width] here, until places are read and after; a head
        that looks at tokens alone keeps nothing."""
        if self.pages.state_cache is not None:
            self.pages.store_hidden_states(slots, self.head.kept(states))

    @abstractmethod
    def run(self, job: HeadOp) -> HeadLogits:
        """Do it, all ranks at once."""

    def tensor(self, of: Ints) -> Tensor:
        return torch.tensor(of, device=self.device)

    def hidden_states(self, slots: Tensor) -> Tensor:
        """[places, width]: what all ranks keep of them; zeros, where none is kept."""
        if self.pages.state_cache is None:
            nothing: Tensor = self.head.like.new_zeros(len(slots), self.head.config.layer.width)
            return nothing
        features: Tensor = self.head.whole(self.pages.hidden_states(slots))
        return features

    def spans(self, job: PrefillOp, first: int) -> list[PrefillSpan]:
        """Pages, start and stop of each text's places, none of them before `first`."""
        found = zip(split_pages(job.pages, job.page_counts), job.starts, job.stops, strict=True)
        return [(pages, max(start, first), stop) for pages, start, stop in found if stop > first]

    def slots(self, spans: list[PrefillSpan], back: int = 0) -> Tensor:
        """Those of all places, or of the ones `back` before them."""
        runs = (slots_of(pages, self.pages.page_size, start - back, stop - back) for pages, start, stop in spans)
        return self.tensor([slot for run in runs for slot in run])


class EagleOps(TorchHeadOps):
    """Of a head that guesses one token after another."""

    head: EagleHead | MtpHead | DistilledHead

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        super().__init__(head, pages)
        self._kv, self._carried = DraftKV([], []), torch.empty(0)

    def run(self, job: HeadOp) -> HeadLogits:
        if isinstance(job, PrefillOp):
            self._prefill(job)
            return NO_LOGITS
        assert isinstance(job, StepOp), "there is nothing else it can do"
        return HeadLogits(self._step(job))

    def _prefill(self, job: PrefillOp) -> None:
        """At place p it keeps the pair of p's token and the feature of p-1: that depends on nothing behind p."""
        spans = self.spans(job, 1)  # the first place of a text has no feature before it
        tokens, own = self.tensor(job.tokens), self.slots(spans)
        features = self.hidden_states(self.slots(spans, back=1))
        turn = self.head.rope_rows(self.tensor([place for _, start, stop in spans for place in range(start, stop)]))
        attend = PrefillAttention(self.pages, self.head.config.layer, spans, own)
        self.pages.store_kv(-1, own, *self.head.keys_values(tokens, features, turn, attend))

    def _step(self, job: StepOp) -> Tensor:
        before = self.tensor(job.previous)
        if job.page_counts:
            self._kv = self.pages.gather(split_pages(job.pages, job.page_counts), job.columns)
            feature = self.hidden_states(before)
        else:
            feature = self._carried[before]
        seen = torch.tensor(job.draft_mask, dtype=torch.bool, device=self.device).view(
            len(job.lengths), len(job.depths), -1
        )
        look = DraftAttention(
            self._kv, self.head.config.layer, job.lengths, seen, first_position=1, depths=tuple(job.depths)
        )
        turn = self.head.rope_rows_clamped(self.tensor(job.positions))
        states = self.head.step(self.tensor(job.tokens), feature, turn, look)[self.tensor(job.used_rows)]
        self._carried = self.head.carry(states)
        return gather_logits(self.head, self.head.logits(states), job.top_k)


class BlockForwardOutput:
    """What a pass came to: states that guess [texts, depth, width], and scores without what a Markov head adds."""

    def __init__(self, head: BlockHead, states: Tensor, scores: Tensor) -> None:
        self.head, self.states, self.logits = head, states, scores

    def level(self, job: BlockLevelOp) -> HeadLogits:
        owners, before = torch.tensor([job.sequences, job.previous_tokens], device=self.logits.device)
        logits = self.logits[owners, job.depth]
        if self.head.config.markov_rank:
            logits = logits + self.head.markov_logits(before)
        sure = self.head.confidence_logits(self.states[owners, job.depth], before) if job.wants_confidence else None
        return HeadLogits(gather_logits(self.head, logits, job.top_k), sure)


class BlockOps(TorchHeadOps):
    """Of a head that guesses a block at once."""

    head: BlockHead

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        super().__init__(head, pages)
        self._output: BlockForwardOutput | None = None

    def run(self, job: HeadOp) -> HeadLogits:
        if isinstance(job, PrefillOp):
            spans = self.spans(job, 0)
            slots = self.slots(spans)
            fused = self.head.normalize_projected(self._hidden_states(slots, job.tokens))
            self.store_kv(slots, [place for _, start, stop in spans for place in range(start, stop)], fused)
        elif isinstance(job, BlockForwardOp):
            self._output = BlockForwardOutput(self.head, *self._forward(job))
        else:
            assert isinstance(job, BlockLevelOp) and self._output is not None, "there is nothing else it can do"
            return self._output.level(job)
        return NO_LOGITS

    def _hidden_states(self, slots: Tensor, tokens: Ints) -> Tensor:
        """What is kept here of features, and of the tokens that stand beside them, where the head wants those."""
        kept, back = self.pages.hidden_states(slots), self.head.config.look_back
        return kept + self.head.project_hints(self.tensor(tokens).view(-1, back)) if back else kept

    def store_kv(self, slots: Tensor, places: Ints, fused: Tensor) -> None:
        """Keep keys and values of each layer."""
        for layer, (keys, values) in enumerate(self.head.context_kv(fused, self.head.rope_rows(self.tensor(places)))):
            self.pages.store_kv(layer, slots, keys, values)

    def _forward(self, job: BlockForwardOp) -> tuple[Tensor, Tensor]:
        config, texts = self.head.config, len(job.lengths)
        memory = self.pages.gather(split_pages(job.pages, job.page_counts), max(job.lengths) + config.block)
        seen = torch.ones(config.block, config.block, dtype=torch.bool)
        seen = seen.tril() if config.causal_in_block else seen
        look = DraftAttention(
            memory, config.layer, job.lengths, seen, depths=(-1,) * config.block
        )  # a window is the anchor's
        places = self.tensor(job.lengths)[:, None] + torch.arange(config.block, device=self.device)
        rows = self.head.block_inputs(self.tensor(job.anchors)).flatten(0, 1)
        states = self.head.run_layers(rows, self.head.rope_rows(places.flatten()), look).view(texts, config.block, -1)
        states = self.head.draft_states(states)[:, : job.depth]
        return states, self.head.output_logits(states)


class MedusaOps(TorchHeadOps):
    """Of heads that each guess one place further."""

    head: MedusaHead

    def run(self, job: HeadOp) -> HeadLogits:
        """Logits [texts * depth, outputs], each text's places in order."""
        assert isinstance(job, MedusaForwardOp), "there is nothing else it can do"
        logits = self.head.logits(self.head(self.hidden_states(self.tensor(job.slots)), job.depth))
        return HeadLogits(gather_logits(self.head, logits.flatten(0, 1), job.top_k))


def make_head_ops(head: DraftHead[Any], pages: HeadPages) -> TorchHeadOps:
    """The one for its kind."""
    if isinstance(head, BlockHead):
        return BlockOps(head, pages)
    return MedusaOps(head, pages) if isinstance(head, MedusaHead) else EagleOps(head, pages)
