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
from foretell.runner.heads.kv import HeadPages, Look, Memory, Pass, Span
from foretell.runner.heads.sampler import all_scores

Numbers = list[int]


@dataclass(frozen=True)
class HeadOp:
    """Fields are numbers and lists of numbers, and nothing else."""


@dataclass(frozen=True)
class PrefillOp(HeadOp):
    """Remember places of some texts, whose features are kept already."""

    starts: Numbers
    stops: Numbers
    tokens: Numbers  # of all these places but the first of a text; or of each place those that a head looks back at
    pages: Numbers  # of all texts, one after the other
    counts: Numbers  # how many each has


@dataclass(frozen=True)
class StepOp(HeadOp):
    """One step of a head that guesses a token after another; as many rows for each text."""

    tokens: Numbers
    places: Numbers
    before: Numbers  # where the feature before each row is: in a first step a slot, then a row wanted of the last step
    wanted: Numbers  # rows that count; the others fill up
    text: Numbers  # of each text the places that all its rows see
    seen: Numbers  # [texts, rows, guesses]: which of the guesses behind its text each row sees
    reach: Numbers  # how far behind its text each row of a text stands
    top: int  # how many of the likeliest tokens are looked at; 0: all
    columns: int = 0  # places of a text, guesses included; what follows is told in a first step only
    pages: Numbers = field(default_factory=list)
    counts: Numbers = field(default_factory=list)


@dataclass(frozen=True)
class BlockForwardOp(HeadOp):
    """Run a block behind each text, to `depth` guesses; what comes of it is asked for level by level."""

    anchors: Numbers
    text: Numbers  # places before each anchor
    depth: int
    pages: Numbers
    counts: Numbers


@dataclass(frozen=True)
class BlockLevelOp(HeadOp):
    """Of the last pass the guesses at one depth, each of one of its texts and behind one token."""

    depth: int
    owners: Numbers
    before: Numbers
    top: int
    judges: int  # whether the head is to say how sure it is


@dataclass(frozen=True)
class MedusaForwardOp(HeadOp):
    """Guess as many places at once from the states kept in some slots."""

    slots: Numbers
    depth: int
    top: int


JOBS: tuple[type[HeadOp], ...] = (PrefillOp, StepOp, BlockForwardOp, BlockLevelOp, MedusaForwardOp)


def flat(texts: Several[Several[int]]) -> tuple[Numbers, Numbers]:
    """Pages of all texts one after the other, and how many each has."""
    return [page for pages in texts for page in pages], [len(pages) for pages in texts]


def by_text(pages: Numbers, counts: Numbers) -> list[Numbers]:
    """What `flat` was given."""
    return [pages[stop - count : stop] for count, stop in zip(counts, accumulate(counts), strict=True)]


@dataclass(frozen=True)
class HeadLogits:
    """Logits over all the head can guess, in the order of what was asked for. Of several ranks the first has them."""

    logits: Tensor
    sure: Tensor | None = None  # logits of a confidence head


NOTHING = HeadLogits(torch.empty(0))


class HeadOps(Protocol):
    """What a drafter asks of its head, wherever that lies."""

    def keep(self, slots: Tensor, states: Tensor) -> None: ...
    def run(self, job: HeadOp) -> HeadLogits: ...


class TorchHeadOps(ABC):
    """A head, and what it keeps of each place."""

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        self.head: Any = head
        self.pages, self.device = pages, pages.device

    def keep(self, slots: Tensor, states: Tensor) -> None:
        """Keep what becomes of the target's states [places, tapped width] here, until places are read and after; a head
        that looks at tokens alone keeps nothing."""
        if self.pages.kept_features is not None:
            self.pages.put_features(slots, self.head.local_hidden(states))

    @abstractmethod
    def run(self, job: HeadOp) -> HeadLogits:
        """Do it, all ranks at once."""

    def numbers(self, of: Numbers) -> Tensor:
        return torch.tensor(of, device=self.device)

    def features(self, slots: Tensor) -> Tensor:
        """[places, width]: what all ranks keep of them; zeros, where none is kept."""
        if self.pages.kept_features is None:
            nothing: Tensor = self.head.like.new_zeros(len(slots), self.head.config.layer.width)
            return nothing
        features: Tensor = self.head.gather_columns(self.pages.features(slots))
        return features

    def spans(self, job: PrefillOp, first: int) -> list[Span]:
        """Pages, start and stop of each text's places, none of them before `first`."""
        found = zip(by_text(job.pages, job.counts), job.starts, job.stops, strict=True)
        return [(pages, max(start, first), stop) for pages, start, stop in found if stop > first]

    def slots(self, spans: list[Span], back: int = 0) -> Tensor:
        """Those of all places, or of the ones `back` before them."""
        runs = (slots_of(pages, self.pages.page_size, start - back, stop - back) for pages, start, stop in spans)
        return self.numbers([slot for run in runs for slot in run])


class EagleOps(TorchHeadOps):
    """Of a head that guesses one token after another."""

    head: EagleHead | MtpHead | DistilledHead

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        super().__init__(head, pages)
        self._memory, self._behind = Memory([], []), torch.empty(0)

    def run(self, job: HeadOp) -> HeadLogits:
        if isinstance(job, PrefillOp):
            self._read(job)
            return NOTHING
        assert isinstance(job, StepOp), "there is nothing else it can do"
        return HeadLogits(self._step(job))

    def _read(self, job: PrefillOp) -> None:
        """At place p it keeps the pair of p's token and the feature of p-1: that depends on nothing behind p."""
        spans = self.spans(job, 1)  # the first place of a text has no feature before it
        tokens, own = self.numbers(job.tokens), self.slots(spans)
        features = self.features(self.slots(spans, back=1))
        turn = self.head.rope_rows(self.numbers([place for _, start, stop in spans for place in range(start, stop)]))
        attend = Pass(self.pages, self.head.config.layer, spans, own)
        self.pages.put(-1, own, *self.head.keys_values(tokens, features, turn, attend))

    def _step(self, job: StepOp) -> Tensor:
        before = self.numbers(job.before)
        if job.counts:
            self._memory = self.pages.memory(by_text(job.pages, job.counts), job.columns)
            feature = self.features(before)
        else:
            feature = self._behind[before]
        seen = torch.tensor(job.seen, dtype=torch.bool, device=self.device).view(len(job.text), len(job.reach), -1)
        look = Look(self._memory, self.head.config.layer, job.text, seen, hidden=1, reach=tuple(job.reach))
        turn = self.head.rope_rows_clamped(self.numbers(job.places))
        states = self.head.step(self.numbers(job.tokens), feature, turn, look)[self.numbers(job.wanted)]
        self._behind = self.head.carry(states)
        return all_scores(self.head, self.head.logits(states), job.top)


class BlockForwardOutput:
    """What a pass came to: states that guess [texts, depth, width], and scores without what a Markov head adds."""

    def __init__(self, head: BlockHead, states: Tensor, scores: Tensor) -> None:
        self.head, self.states, self.scores = head, states, scores

    def level(self, job: BlockLevelOp) -> HeadLogits:
        owners, before = torch.tensor([job.owners, job.before], device=self.scores.device)
        logits = self.scores[owners, job.depth]
        if self.head.config.markov_rank:
            logits = logits + self.head.markov_logits(before)
        sure = self.head.confidence_logits(self.states[owners, job.depth], before) if job.judges else None
        return HeadLogits(all_scores(self.head, logits, job.top), sure)


class BlockOps(TorchHeadOps):
    """Of a head that guesses a block at once."""

    head: BlockHead

    def __init__(self, head: DraftHead[Any], pages: HeadPages) -> None:
        super().__init__(head, pages)
        self._passed: BlockForwardOutput | None = None

    def run(self, job: HeadOp) -> HeadLogits:
        if isinstance(job, PrefillOp):
            spans = self.spans(job, 0)
            slots = self.slots(spans)
            fused = self.head.normalize_projected(self._kept(slots, job.tokens))
            self.remember(slots, [place for _, start, stop in spans for place in range(start, stop)], fused)
        elif isinstance(job, BlockForwardOp):
            self._passed = BlockForwardOutput(self.head, *self._pass(job))
        else:
            assert isinstance(job, BlockLevelOp) and self._passed is not None, "there is nothing else it can do"
            return self._passed.level(job)
        return NOTHING

    def _kept(self, slots: Tensor, tokens: Numbers) -> Tensor:
        """What is kept here of features, and of the tokens that stand beside them, where the head wants those."""
        kept, back = self.pages.features(slots), self.head.config.look_back
        return kept + self.head.project_hints(self.numbers(tokens).view(-1, back)) if back else kept

    def remember(self, slots: Tensor, places: Numbers, fused: Tensor) -> None:
        """Keep keys and values of each layer."""
        for layer, (keys, values) in enumerate(self.head.context_kv(fused, self.head.rope_rows(self.numbers(places)))):
            self.pages.put(layer, slots, keys, values)

    def _pass(self, job: BlockForwardOp) -> tuple[Tensor, Tensor]:
        config, texts = self.head.config, len(job.text)
        memory = self.pages.memory(by_text(job.pages, job.counts), max(job.text) + config.block)
        seen = torch.ones(config.block, config.block, dtype=torch.bool)
        seen = seen.tril() if config.causal_in_block else seen
        look = Look(memory, config.layer, job.text, seen, reach=(-1,) * config.block)  # a window is the anchor's
        places = self.numbers(job.text)[:, None] + torch.arange(config.block, device=self.device)
        rows = self.head.block_inputs(self.numbers(job.anchors)).flatten(0, 1)
        states = self.head.run_layers(rows, self.head.rope_rows(places.flatten()), look).view(texts, config.block, -1)
        states = self.head.draft_states(states)[:, : job.depth]
        return states, self.head.output_logits(states)


class MedusaOps(TorchHeadOps):
    """Of heads that each guess one place further."""

    head: MedusaHead

    def run(self, job: HeadOp) -> HeadLogits:
        """Logits [texts * depth, outputs], each text's places in order."""
        assert isinstance(job, MedusaForwardOp), "there is nothing else it can do"
        logits = self.head.logits(self.head(self.features(self.numbers(job.slots)), job.depth))
        return HeadLogits(all_scores(self.head, logits.flatten(0, 1), job.top))


def head_work(head: DraftHead[Any], pages: HeadPages) -> TorchHeadOps:
    """The one for its kind."""
    if isinstance(head, BlockHead):
        return BlockOps(head, pages)
    return MedusaOps(head, pages) if isinstance(head, MedusaHead) else EagleOps(head, pages)
