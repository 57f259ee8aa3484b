"""Heads that guess several places at once, as one graph: a block in one pass with what its Markov head adds, and
Medusa's heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor

from foretell.models.draft_heads import BlockHead, MedusaHead
from foretell.runner.cuda.graphs import GraphCache
from foretell.runner.heads.graph_draft import ReadbackGraphCache
from foretell.runner.heads.kv import Glance, HeadMemory
from foretell.runner.heads.sampler import DraftOutput, ExponentialRace, ProbsBuffer, TreeCandidates, TreeTopK, pick
from foretell.runner.heads.tables import BEFORE, PLACE, TOKEN, DraftRow, DraftShape, DraftTable, sizes_of

WholeHead = TypeVar("WholeHead", BlockHead, MedusaHead)


class GraphForward(ABC, Generic[WholeHead]):
    """What both have in common: logits of all places are there before the first token is."""

    guesses = 0  # rows of a pass that stand behind a text

    def __init__(self, head: WholeHead, page_size: int, device: torch.device, most_children: int) -> None:
        self.head: WholeHead = head
        self.page_size, self.device = page_size, device
        self.children = min(most_children, head.config.outputs)
        self.tables: dict[DraftShape, DraftTable] = {}
        self.room = ProbsBuffer(head.config.outputs, device)
        self.recorder: GraphCache[DraftShape, DraftOutput] = ReadbackGraphCache(device)

    def chain(self, texts: list[DraftRow], depth: int) -> DraftOutput:
        """For each text a token at each place: the likeliest, or the one that wins its race."""
        sizes = self._sent(texts, sizes_of(texts, depth))
        probs = self.room(sizes)
        return self.recorder(sizes, lambda: self.run_chain(sizes, probs), sizes.is_small).of(len(texts))

    def tree(self, texts: list[DraftRow], depth: int) -> TreeCandidates:
        """The likeliest children of each place; with a Markov head, of each node that is followed there."""
        sizes = self._sent(texts, sizes_of(texts, depth, self.children if self.is_told_tokens else 1))
        return TreeCandidates.told(self.recorder(sizes, lambda: self.run_tree(sizes), sizes.is_small).told)

    @property
    def is_told_tokens(self) -> bool:
        """Whether what may come at a place hangs on the token before it."""
        return False

    def _sent(self, texts: list[DraftRow], wanted: DraftShape) -> DraftShape:
        sizes = self.recorder.serving(wanted)
        if sizes not in self.tables:
            self.tables[sizes] = DraftTable(sizes, self.guesses, self.page_size, self.device)
        self.tables[sizes].send(texts)
        return sizes

    def run_chain(self, sizes: DraftShape, probs: Tensor | None) -> DraftOutput:
        """Leaves in `probs` what was drawn from."""
        table = self.tables[sizes]
        states, scores = self.scores(table)
        race, tokens = ExponentialRace(table, self.head.draft_ids), table.field(TOKEN)
        found = DraftOutput(torch.empty(2, sizes.depth, sizes.texts, device=table.device), probs)
        for offset in range(sizes.depth):
            before, tokens = tokens, pick(self.nudged(scores[:, offset], tokens), race, found, offset)
            self.judge(states[:, offset], before, found.told[1, offset])
        return found

    def run_tree(self, sizes: DraftShape) -> DraftOutput:
        table = self.tables[sizes]
        _, scores = self.scores(table)
        choice, tokens, rows = TreeTopK(table, self.head.draft_ids, self.children), table.field(TOKEN), 1
        for depth in range(sizes.depth):
            if depth and self.is_told_tokens:
                (tokens, _), rows = choice.descend(), sizes.wide
            elif depth:
                choice.depth += 1
            level = scores[:, depth, None].expand(-1, rows, -1).flatten(0, 1)
            choice.look(self.nudged(level, tokens))
        return DraftOutput(choice.found)

    @abstractmethod
    def scores(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        """States that guess [texts, depth, width], and their logits."""

    def nudged(self, logits: Tensor, before: Tensor) -> Tensor:
        """Logits behind these tokens."""
        return logits

    def judge(self, states: Tensor, before: Tensor, sure: Tensor) -> None:
        """Say how sure the head is, where it says so itself."""


class GraphBlockDraft(GraphForward[BlockHead]):
    """Its keys and values stay in the copy of the pages that is made for the pass."""

    def __init__(self, head: BlockHead, keys: list[Tensor], values: list[Tensor], most_children: int) -> None:
        super().__init__(head, keys[0].shape[1], keys[0].device, most_children)
        self.keys, self.values, self.guesses = keys, values, head.config.block
        self.filler = head.mask_embeddings.clone()  # made here, because it takes a number from the host

    @property
    def is_told_tokens(self) -> bool:
        return self.head.config.markov_rank > 0

    def scores(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        config, head = self.head.config, self.head
        memory = HeadMemory(self.keys, self.values, config.layer, table.pages)
        anchors, block = table.field(TOKEN), config.block
        x = head.block_inputs_with(anchors, self.filler).flatten(0, 1)
        rows = torch.arange(block, device=self.device)
        turn = head.rope_rows((table.field(PLACE)[:, None] + rows).flatten())
        glance = Glance(memory, memory.bias(self._seen(memory, table, rows)), table.columns)
        states = head.run_layers(x, turn, glance).view(len(anchors), block, -1)
        states = head.draft_states(states)[:, : table.sizes.depth]
        return states, head.output_logits(states)

    def _seen(self, memory: HeadMemory, table: DraftTable, rows: Tensor) -> Tensor:
        """[texts, block, columns]; a window is the anchor's."""
        text = memory.of_text(table.field(PLACE), table.columns, torch.full_like(rows, -1), hidden=0)
        guess = torch.arange(memory.columns - table.columns, device=self.device)
        limit = rows[:, None] if self.head.config.causal_in_block else len(rows) - 1
        own = (guess <= limit).expand(len(rows), -1)
        return torch.cat([text, own.expand(len(text), -1, -1)], -1)

    def nudged(self, logits: Tensor, before: Tensor) -> Tensor:
        return logits + self.head.markov_logits(before) if self.head.config.markov_rank else logits

    def judge(self, states: Tensor, before: Tensor, sure: Tensor) -> None:
        if self.head.config.confidence:
            sure.copy_(self.head.confidence_logits(states, before).sigmoid())


class GraphMedusaDraft(GraphForward[MedusaHead]):
    """It looks at one state and at nothing behind it."""

    def __init__(self, head: MedusaHead, features: Tensor, most_children: int) -> None:
        """`features` [pages, page_size, 1, width]."""
        super().__init__(head, features.shape[1], features.device, most_children)
        self.features = features.view(-1, features.shape[-1])

    def scores(self, table: DraftTable) -> tuple[Tensor, Tensor]:
        states = self.head(self.features.index_select(0, table.field(BEFORE)), table.sizes.depth)
        return states, self.head.logits(states)
