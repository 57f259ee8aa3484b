"""What drafters over the target's states have in common: they keep what the target ran, and guess from that."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foretell.draft.base import Drafter
from foretell.draft.draft_builder import ChainBuilder, DraftTokens
from foretell.draft.heads.graph_draft import whole_reader
from foretell.draft.heads.sampling import ChildSampler, DraftTemperature, TreeInProgress, draw_nodes, must_draw
from foretell.draft.heads.tree import EagleTree, FixedTree, RankAcceptance
from foretell.draft.reserved import check_reserved
from foretell.models.draft_heads import DraftHead, HeadConfig
from foretell.runner.heads.kv import HeadPages
from foretell.runner.heads.ops import PrefillOp, flatten_pages, make_head_ops
from foretell.runner.model_runner import ModelRunner
from foretell.runner.native.head_draft import DraftRequest, NativeHead
from foretell.runner.native.head_prefill import NativePrefill, PrefillRange, addresses_of
from foretell.types import NO_DRAFT, Budget, Draft, Sequence, StepResult

Rows = tuple[Tensor, int, int]  # of a step's states, from one row to another


@dataclass
class PendingHiddenStates:
    """States of a text that the head has not read yet: of the places from `start` on."""

    start: int
    states: list[Rows] = field(default_factory=list)
    stop: int = 0
    gap: bool = False  # whether positions before are missing: a step failed
    pages: list[int] = field(default_factory=list)  # the sequence's own list, a new one each time it is admitted

    def take(self, seq: Sequence, whole: bool) -> PrefillRange:
        """What is still to be read of the text; it counts as read from now on. `whole`: states need not be cut out."""
        states = [] if whole else [rows[begin:end] for rows, begin, end in self.states]
        found = WholeReading(seq, self.start, self.stop, states, self.states)
        self.start, self.states = self.stop, []
        return found


class Trails(dict[int, PendingHiddenStates]):
    """The trails of all sequences by id, and the pages with positions that the head could not read."""

    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.page_size = page_size
        self.unread: set[int] = set()  # pages

    def continued(self, seq: Sequence, start: int) -> PendingHiddenStates:
        """Return the trail of a sequence whose next step begins at `start`.

        A sequence that is new here, or was preempted and admitted again, has its first positions from the prefix
        cache: the head has read these for another sequence, unless that failed.
        """
        trail = self.get(seq.id)
        if trail is None or (trail.pages is not seq.pages and start != trail.stop) or start < trail.stop:
            trail = self[seq.id] = PendingHiddenStates(start, stop=start)
            trail.gap = bool(self.unread) and not self.unread.isdisjoint(seq.pages[: self._pages_for(start)])
        trail.pages = seq.pages
        return trail

    def rewrite(self, seq: Sequence, start: int) -> None:
        """Note that a step has written the pages after position `start` from their first position on."""
        if self.unread:
            self.unread.difference_update(seq.pages[self._pages_for(start) : self._pages_for(seq.cached)])

    def miss(self, outcomes: list[StepResult]) -> None:
        """Note that positions of these sequences were not read: drafts without them would be noise."""
        for outcome in outcomes:
            seq = outcome.scheduled.seq
            self.unread.update(seq.pages[outcome.scheduled.start // self.page_size : self._pages_for(seq.cached)])
            self[seq.id] = PendingHiddenStates(seq.cached, stop=seq.cached, gap=True, pages=seq.pages)
            if seq.finish_reason is not None:
                del self[seq.id]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class WholeReading(PrefillRange):
    """The same, told by rows of steps: to cut those out takes torch as long as the library takes to read them."""

    runs: list[Rows]

    def row_addresses(self) -> list[int]:
        found: list[int] = []
        for states, begin, end in self.runs:
            found += addresses_of(states, begin, end)
        return found


def of_the_text(outcome: StepResult, first: int, places: int) -> list[Rows]:
    """The states of a step's rows that are the text's now, what was pending and the accepted path, from place `first`
    of them on: in pieces, for an index would have to be brought to where they are."""
    assert outcome.hidden_states is not None, "the target taps what a head wants"
    take, path = (
        outcome.scheduled.num_new_tokens,
        () if outcome.verify_result is None else outcome.verify_result.accepted_path,
    )
    stop = min(places, take)
    start = min(first, stop)
    runs: list[tuple[int, int]] = []
    for node in path[max(0, first - take) : max(0, places - take)]:
        if take + node != stop:
            runs.append((start, stop))
            start = take + node
        stop = take + node + 1
    return [(outcome.hidden_states, begin, end) for begin, end in (*runs, (start, stop)) if begin < end]


class HeadDrafter(Drafter):
    """All it knows of a text lies in the text's own pages, so a prefix that is found there was read already.

    States are read when a page is full or a guess is wanted: while nobody asks, many places cost as much as one.
    """

    draws = True
    gives_probability = True
    grows = True
    cost_share = 0.1
    prior = 0.6

    def __init__(
        self,
        runner: ModelRunner,
        head: DraftHead[Any],
        pages: HeadPages,
        name: str,
        draft_temperature: DraftTemperature = "fixed",
        min_confidence: float = 0.0,
        whole: bool | None = None,
    ) -> None:
        """`runner` is the target's, which taps what this head wants. `whole`: a draft is one piece of work, unless
        the head is split."""
        self.head, self.pages, self.name, self.context = head, pages, name, runner.context
        self._runner = runner
        self.hidden_layers, self.device, self.vocab = (
            head.config.hidden_layers,
            runner.device,
            runner.model.config.vocab,
        )
        self.draft_temperature, self.min_confidence = draft_temperature, min_confidence
        self.is_split = head.shard is not None
        self.whole = not self.is_split and (runner.device.type == "cuda" if whole is None else whole)
        self.work = runner.leader_head_ops(make_head_ops(head, pages)) if self.is_split else make_head_ops(head, pages)
        self._columns = _columns(runner.hidden_layers, head.config, runner.device, self.is_split)
        self._reader: NativePrefill | None = None  # where the native library can read for it
        self._whole_reader = whole_reader(head, pages) if self.whole else None
        self._trails = Trails(pages.page_size)
        self.chooser, self.ranks = ChildSampler(head.draft_ids, draft_temperature), RankAcceptance(head.config.accuracy)
        # As good as it was seen to be when it was made; one that was bad then may be better at what is asked here.
        self.prior = max(0.1, head.config.accuracy[0]) if head.config.accuracy else type(self).prior

    def take(self, head: DraftHead[Any]) -> None:
        """Guess with another head of the same shape from now on: all that was readied for the old one is made anew."""
        settings = (self.name, self.draft_temperature, self.min_confidence, self.whole)
        vars(self).update(vars(type(self)(self._runner, head, self.pages, *settings)))

    @property
    def by_library(self) -> bool:
        """Whether the native library reads for it, and guesses chains: then torch computes nothing, and need not enter
        a mode, which takes it longer than all that is done here."""
        return self._reader is not None and self._whole_reader is None

    def update_kv(self, outcomes: list[StepResult]) -> None:
        try:
            if self.by_library:
                self._follow(outcomes)
            else:
                with torch.inference_mode():
                    self._follow(outcomes)
        except BaseException:
            self._trails.miss(outcomes)
            raise

    def _follow(self, outcomes: list[StepResult]) -> None:
        full = []
        for outcome in outcomes:
            seq = outcome.scheduled.seq
            trail = self._add(outcome)
            if seq.cached // self.pages.page_size * self.pages.page_size > trail.start:
                full.append(seq)  # a page is full, and is offered to others after this
        if full:
            self._read([reading for seq in full if (reading := self._take(seq)) is not None])
        for outcome in outcomes:
            if outcome.scheduled.seq.finish_reason is not None:
                self._trails.pop(outcome.scheduled.seq.id, None)

    def _add(self, outcome: StepResult) -> PendingHiddenStates:
        """Note the states of what was run and stayed."""
        seq, start = outcome.scheduled.seq, outcome.scheduled.start
        trail = self._trails.continued(seq, start)
        if start > trail.stop:
            trail.gap = True
            trail.start, trail.states = start, []
        self._trails.rewrite(seq, start)
        known = self.known_of(outcome) if trail.start == start else 0
        trail.start += known
        trail.states += of_the_text(outcome, known, seq.cached - start)
        trail.stop = seq.cached
        return trail

    def known_of(self, outcome: StepResult) -> int:
        """How many of the places that a step brought are remembered already, as reading them would have it."""
        return 0

    def _take(self, seq: Sequence) -> PrefillRange | None:
        """What is still to be read of a text; it counts as read from now on."""
        trail = self._trails.get(seq.id)
        if trail is None or trail.start == trail.stop:
            return None
        return trail.take(seq, whole=self.by_library)

    def _read(self, readings: list[PrefillRange]) -> None:
        if not readings:
            return
        if self._whole_reader is not None and self._whole_reader.prefill(readings, self._columns):
            return
        if self._reader is not None:
            self._reader.prefill(readings)
            return
        slots = [slot for each in readings for slot in self.pages.slots(each.seq, each.start, each.stop)]
        pieces = [piece for each in readings for piece in each.states]
        states = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        states = states if self._columns is None else states.index_select(1, self._columns)
        self.read(readings, torch.tensor(slots, device=self.device), states)

    def to_read(self, readings: list[PrefillRange], first: int | None) -> PrefillOp:
        """The same in plain numbers, with the tokens of places from `first` on, where the head looks at them."""
        starts, stops = [each.start for each in readings], [each.stop for each in readings]
        begins = stops if first is None else [max(start, first) for start in starts]
        spans = zip(readings, begins, stops, strict=True)
        tokens = [token for each, start, stop in spans for token in each.seq.tokens[start:stop]]
        return PrefillOp(starts, stops, tokens, *flatten_pages([each.seq.pages for each in readings]))

    def catch_up(self, readings: list[PrefillRange]) -> None:
        """Read these places before the guesses that are wanted now, or with them."""
        self._read(readings)

    @abstractmethod
    def read(self, readings: list[PrefillRange], slots: Tensor, states: Tensor) -> None:
        """Keep what these places are to be remembered by; `slots` and `states` are of all of them, end to end."""

    def propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        if self.by_library and not any(budget.is_tree for budget in budgets):
            return self._propose(seqs, budgets)
        with torch.inference_mode():
            return self._propose(seqs, budgets)

    def _propose(self, seqs: list[Sequence], budgets: list[Budget]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(seqs)
        straight, bushy, readings = list[int](), list[int](), list[PrefillRange]()
        for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            if self._can(seq, budget):
                (bushy if budget.is_tree else straight).append(i)
                if (reading := self._take(seq)) is not None:
                    readings.append(reading)
        self.catch_up(readings)
        if straight:
            chains = self.guess([seqs[i] for i in straight], [budgets[i] for i in straight])
            for i, chain in zip(straight, chains, strict=True):
                drafts[i] = self._draft(seqs[i], chain)
        if not bushy:
            return drafts
        trees = {i: TreeInProgress(seqs[i], self.plant(seqs[i], budgets[i])) for i in bushy}
        self.grow(list(trees.values()))
        for i, plot in trees.items():
            drafts[i] = self._tree(plot)
        return drafts

    def _can(self, seq: Sequence, budget: Budget) -> bool:
        """Whether all that is needed is there: every place but the last was run, and none of them is missing."""
        known = seq.pending == 1 and len(seq.tokens) > 1 and not self._trails.continued(seq, seq.cached).gap
        return known and 0 < budget.depth <= self.context - len(seq.tokens)

    @abstractmethod
    def guess(self, seqs: list[Sequence], budgets: list[Budget]) -> list[ChainBuilder]:
        """A chain for each text, of at least one guess."""

    def plant(self, seq: Sequence, budget: Budget) -> EagleTree | FixedTree:
        """A tree without nodes yet: where tokens are drawn, its shape is settled before."""
        floor = max(budget.min_probability, self.min_confidence)
        if must_draw(seq):
            return FixedTree(self.ranks.shape(budget, self.deepest, floor))
        if budget.depth > self.deepest:
            budget = replace(budget, max_depth=self.deepest)
        return EagleTree(budget, floor)

    @property
    def deepest(self) -> int:
        """The longest chain it can guess."""
        return self.context

    @abstractmethod
    def grow(self, plots: list[TreeInProgress]) -> None:
        """Grow a tree behind each text."""

    def _tree(self, plot: TreeInProgress) -> Draft:
        draft = plot.tree.draft(self.name)
        rows = plot.tree.rows() if isinstance(plot.tree, FixedTree) else None
        if rows is None:
            return draft
        probs = torch.zeros(len(draft), self.vocab, device=self.device)
        return replace(draft, probs=probs.index_copy_(1, self.head.draft_ids, rows))

    def observe(self, outcomes: list[StepResult]) -> None:
        for outcome in outcomes:
            if outcome.draft.source == self.name and outcome.draft.origins is None:
                self.ranks.learn(outcome)

    def read_natively(self, native: NativeHead, tapped: tuple[int, ...]) -> None:
        """Let the library that guesses read, too; the target taps these layers."""
        columns = _parts(tapped, self.head.config)
        self._reader = NativePrefill(native, self.pages.state_cache, columns)

    def chains(self, budgets: list[Budget]) -> list[ChainBuilder]:
        return [ChainBuilder(budget, max(budget.min_probability, self.min_confidence)) for budget in budgets]

    def asked(self, seqs: list[Sequence], chains: list[ChainBuilder]) -> DraftRequest:
        asked = DraftRequest([], [], [], [], [])
        for seq, chain in zip(seqs, chains, strict=True):
            last, depth = len(seq.tokens) - 1, chain.budget.depth
            check_reserved(seq, last + depth, self.pages.page_size)
            asked.tokens.append(seq.tokens[last])
            asked.positions.append(last)
            asked.pages.append(seq.pages)
            asked.depths.append(depth)
            asked.min_probabilities.append(chain.floor)
        return asked

    def slots_before(self, seqs: list[Sequence]) -> list[int]:
        """Of the last place of each text that was run."""
        return [self.pages.slots(seq, len(seq.tokens) - 2, len(seq.tokens) - 1)[0] for seq in seqs]

    @staticmethod
    def is_greedy(seqs: list[Sequence]) -> bool:
        """Whether nothing is drawn for any of them."""
        return all(seq.request.params.temperature == 0 for seq in seqs)

    def draw(self, seqs: list[Sequence], offset: int, logits: Tensor) -> DraftTokens:
        """A guess for each text of logits [texts, outputs]; drawn, where any request draws."""
        if self.is_greedy(seqs):
            best, at = logits.max(-1)
            sure = (best - logits.logsumexp(-1)).exp()
            return DraftTokens(self.head.draft_ids[at], sure.tolist())
        drawn = draw_nodes(logits, seqs, offset, self.draft_temperature, self.head.draft_ids)
        return DraftTokens(torch.tensor(drawn.tokens, device=logits.device), drawn.confidence, drawn.probs)

    def _draft(self, seq: Sequence, chain: ChainBuilder) -> Draft:
        parents = tuple(range(-1, len(chain.tokens) - 1))
        # What is drawn with the target's own noise is judged by its token, as what is likeliest is.
        drawn, probs = ((True,) * len(parents), self._probs(chain)) if must_draw(seq) else (None, None)
        return Draft(tuple(chain.tokens), parents, self.name, drawn, tuple(chain.confidence), probs)

    def _probs(self, chain: ChainBuilder) -> Tensor:
        """What its guesses were drawn from, [guesses, vocab]."""
        if chain.spread is not None:
            return chain.spread[: len(chain.tokens)]
        probs = torch.zeros(len(chain.probs), self.vocab, device=self.device)
        return probs.index_copy_(1, self.head.draft_ids, torch.stack(chain.probs))

    def forget(self, seq: Sequence) -> None:
        self._trails.pop(seq.id, None)

    @property
    def memory(self) -> int:
        return self.head.bytes


def _parts(tapped: tuple[int, ...], config: HeadConfig) -> list[int]:
    """Where what a head is given of a place begins, in parts of the target's width: the layers' states that it wants
    among all that are tapped, and behind those what else it wants to know."""
    width, others = config.target_width, config.input_width // config.target_width - len(config.hidden_layers)
    return [tapped.index(tap) * width for tap in config.hidden_layers] + [
        (len(tapped) + i) * width for i in range(others)
    ]


def _columns(tapped: tuple[int, ...], config: HeadConfig, device: torch.device, is_split: bool) -> Tensor | None:
    """All of those columns; None: just so. Where a head is split, what else it wants to know is each rank's to make."""
    if tapped == config.hidden_layers:
        return None
    width, parts = config.target_width, _parts(tapped, config)
    some = parts[: len(config.hidden_layers)] if is_split else parts
    return torch.tensor([first + i for first in some for i in range(width)], device=device)
